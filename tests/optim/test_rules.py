"""A step rule is one class: a third rule needs no change of the optimizer or of the statistics."""

import copy

import pytest
import torch

import bprong
from bprong.linalg.factors import Damping
from bprong.optim.rules import StepRule
from helpers import classification, mlp, snapshot
from training import EXACT, assert_same_path, batches, literal, train


class PlainDescent(StepRule):
    """p ← p − lr d along the whitened directions d; other parameters follow their gradient."""

    def __init__(self, epsilon=0.1):
        self.epsilon = epsilon
        self.seen = []
        self.steps = 0

    def damping(self, layer, side):
        self.seen.append((layer.name, side.name))
        return Damping(self.epsilon)

    def step_(self, gradients, layers):
        self.steps += 1
        rates = {p: float(group["lr"]) for p, group in gradients.groups.items()}
        for p, step in (gradients.values | layers.natural_gradients(gradients.values)).items():
            p.sub_(step, alpha=rates[p])

    def state_dict(self, parameters):
        return {"steps": self.steps}

    def load_state_dict(self, state, parameters):
        self.steps = state["steps"]

    def report(self):
        return {"epsilon": self.epsilon}


def ruled(model, lr=0.05, **arguments):
    """An optimizer with the rule of this file."""
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, options=EXACT, **arguments)
    optimizer._rule = PlainDescent()
    return optimizer


def test_a_third_rule_moves_the_parameters_along_whitened_directions():
    """At the same damping it is the fixed rate without momentum."""
    x, y = classification(60, 5, 3)
    ours = mlp(5, 6, 4, 3)
    theirs = copy.deepcopy(ours)
    train(ours, ruled(ours, every=3), batches(x, y, 20, 10))
    fixed = literal(theirs, "cross_entropy", lr=0.05, forward_damping=0.1, backward_damping=0.1, every=3, options=EXACT)
    train(theirs, fixed, batches(x, y, 20, 10))
    assert_same_path(snapshot(ours), snapshot(theirs), 1e-12)


def test_a_rule_is_asked_for_the_damping_of_each_side():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = ruled(model, every=10)
    rule = optimizer._rule
    train(model, optimizer, batches(x, y, 20, 1))
    assert set(rule.seen) == {(name, side) for name in ("0", "2") for side in ("forward", "backward")}


def test_the_state_and_the_numbers_of_a_rule_are_those_of_the_optimizer():
    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = ruled(model)
    train(model, optimizer, batches(x, y, 20, 4))
    assert optimizer.report().rule == {"epsilon": 0.1}
    assert "epsilon 0.1" in str(optimizer.report())
    assert optimizer.report().layers[0]["forward_damping"] == pytest.approx(0.1)
    other = ruled(model)
    other.load_state_dict(optimizer.state_dict())
    assert other._rule.steps == 4


def test_a_rule_that_undoes_its_last_update_ends_the_step():
    """The optimizer asks a rule before it measures anything."""

    class Undoing(PlainDescent):
        blown_up = False

        def undo_if_blown_up_(self, gradients):
            return self.blown_up

        def undo_(self, gradients):
            raise AssertionError("gradients are finite")

    x, y = classification(60, 5, 3)
    model = mlp(5, 4, 3)
    optimizer = ruled(model)
    optimizer._rule = Undoing()
    train(model, optimizer, [(x, y)])
    optimizer._rule.blown_up = True
    before = snapshot(model)
    train(model, optimizer, [(x, y)])
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items())
    assert optimizer.report().steps == 1
