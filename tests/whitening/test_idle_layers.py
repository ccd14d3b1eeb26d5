"""Layers that are not used, or not yet: they need nothing, and the first step that uses them measures them."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F

import bprong
from automatic import DATA, auto
from bprong.optim import Periods
from helpers import Woken, assert_close, assert_unchanged, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, train


def explicit(model, **arguments):
    return bprong.BPRONG(model, "cross_entropy", lr=0.1, **{"every": 10} | arguments)


def drifting(model, **arguments):
    return explicit(model, every=None, **arguments)


RULES = pytest.mark.parametrize("rule", [explicit, drifting, auto])


def made(rule, **arguments):
    torch.manual_seed(3)
    model = Woken().double()
    return model, rule(model, **arguments)


def idle_layer(optimizer):
    return optimizer._whitening.layers["idle"]


def refreshed_at(layer):
    return {side.name: side.refreshed_at for side in layer.sides}


@RULES
def test_an_unused_layer_changes_nothing(rule):
    """The path of the others is that without it; it stays where it is, and has no state."""
    model, optimizer = made(rule, options=EXACT)
    before = snapshot(model)
    ours = snapshot(train(model, optimizer, batches(*DATA, 20, 25)))
    frozen, _ = made(rule)
    frozen.idle.requires_grad_(False)
    expected = snapshot(train(frozen, rule(frozen, options=EXACT), batches(*DATA, 20, 25)))
    assert_same_path(ours, expected)
    assert_unchanged({k: v for k, v in before.items() if "idle" in k}, {k: v for k, v in ours.items() if "idle" in k})
    assert not {model.idle.weight, model.idle.bias} & set(optimizer.state)
    assert "idle" in str(optimizer.report())


@RULES
@pytest.mark.parametrize("t", [3, 10, 13])
def test_a_layer_is_measured_at_the_first_step_that_uses_it(rule, t):
    """At a refresh and between two: its factors are those of the batch of that step, and the others' stay."""
    model, optimizer = made(rule, options=EXACT)
    data = list(batches(*DATA, 20, t + 3))
    train(model, optimizer, data[:t])
    whitening = optimizer._whitening
    layer = idle_layer(optimizer)
    used = whitening.layers["used"]
    assert layer.forward.factor is None
    others = refreshed_at(used)
    due = whitening.due
    model.awake = True
    with torch.no_grad():
        z = model.used(data[t][0]).tanh()
    train(model, optimizer, data[t : t + 1])
    assert refreshed_at(layer) == {"forward": t, "backward": t}
    assert_close(layer.c, z.mean(dim=0), 1e-12)
    assert due or refreshed_at(used) == others
    train(model, optimizer, data[t + 1 : t + 2])
    assert layer.forward.refreshed_at == t or whitening.schedule.t % 10 == 1


@pytest.mark.parametrize("periods", [Periods(10), Periods(10, 2, backward_offset=3)], ids=str)
@pytest.mark.parametrize("rule", [explicit, auto])
def test_both_sides_of_it_are_refreshed_whatever_the_schedule(rule, periods):
    model, optimizer = made(rule, every=periods, options={"average": 0.5})
    train(model, optimizer, batches(*DATA, 20, 13))
    model.awake = True
    train(model, optimizer, [DATA])
    assert refreshed_at(idle_layer(optimizer)) == {"forward": 13, "backward": 13}


@RULES
def test_the_first_step_of_such_a_layer_is_whitened(rule):
    """It has the direction of the first step of an optimizer that is made at that moment."""
    model, optimizer = made(rule, options=EXACT)
    x, y = DATA
    train(model, optimizer, [(x, y)] * 13)
    model.awake = True
    other = copy.deepcopy(model)
    fresh = rule(other, options=EXACT)
    before = model.idle.weight.detach().clone()
    train(model, optimizer, [(x, y)])
    train(other, fresh, [(x, y)])
    ours = model.idle.weight.detach() - before
    theirs = other.idle.weight.detach() - before
    cosine = float((ours * theirs).sum() / ours.norm() / theirs.norm())
    assert cosine == pytest.approx(1, abs=1e-9 if rule is not auto else 0.05)  # λ has moved, and with it ε


@RULES
def test_a_layer_that_is_used_without_being_called_is_named_and_follows_the_fallback_rule(rule):
    torch.manual_seed(3)
    model = Woken(by_hand=True).double()
    optimizer = rule(model)
    train(model, optimizer, batches(*DATA, 20, 13))
    model.awake = True
    before = snapshot(model)
    with pytest.warns(bprong.WhiteningWarning, match="layer 'idle' follows the fallback rule"):
        train(model, optimizer, [DATA])
    train(model, optimizer, [DATA] * 10)
    assert all(not torch.equal(before[name], value) for name, value in snapshot(model).items())
    assert "exp_avg" in optimizer.state[model.idle.weight]


@RULES
@pytest.mark.parametrize("t", quick_cases([1, 12, 15], 12))
def test_it_resumes_bit_for_bit_before_and_after_the_layer_is_used(rule, t):
    """The layer is used from step 14 on."""

    def go(model, optimizer, data, start):
        for i, batch in enumerate(data, start):
            model.awake = i >= 14
            train(model, optimizer, [batch])

    data = list(batches(*DATA, 20, 25))
    model, optimizer = made(rule)
    go(model, optimizer, data[:t], 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    go(model, optimizer, data[t:], t)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = made(rule)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    go(other, resumed, data[t:], t)
    assert_unchanged(snapshot(model), snapshot(other))


def test_gradients_of_zeros_do_not_count_as_a_use():
    model, optimizer = made(explicit)
    for p in model.idle.parameters():
        p.grad = torch.zeros_like(p)
    F.cross_entropy(model(DATA[0]), DATA[1]).backward()
    optimizer.step()
    assert idle_layer(optimizer).forward.factor is None


def test_with_recording_the_layer_is_measured_at_once_too():
    model, optimizer = made(explicit)
    for t in range(21):
        model.awake = t >= 13
        optimizer.zero_grad()
        with optimizer.recording() as record:
            output = model.forward(DATA[0])
            record(output)
        F.cross_entropy(output, DATA[1]).backward()
        optimizer.step()
        assert (idle_layer(optimizer).forward.factor is None) == (t < 13)
