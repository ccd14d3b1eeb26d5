"""Recipes: the schedule, the averaged weights, exact resuming, and the comparison with the other methods."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bprong.experiments.data import load
from bprong.experiments.methods import METHODS, Problem, Recipe
from bprong.experiments.models import perceptron
from bprong.experiments.progress import Progress
from bprong.experiments.recipes import RECIPES, comparison, in_run
from bprong.experiments.records import read_results
from bprong.experiments.runner import run
from bprong.experiments.training import Config, ResumeError, load_trained, train_epoch
from experiments.made_up_runs import NAN, run_of
from helpers import assert_close

UPDATES = 14  # of an epoch on digits


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def started(method, digits, updates):
    plain = perceptron([digits.features, 20, digits.classes], "relu", seed=0)
    problem = Problem(plain, 0.01, digits.x_train, digits.y_train, 0, METHODS[method].whitening)
    return METHODS[method].start(problem, updates)


class Interrupt(Progress):
    """Ends a run of one method with KeyboardInterrupt when this epoch has been saved."""

    def __init__(self, epoch):
        self.epoch = epoch

    def show(self, done, total, left, running):
        if done == self.epoch:
            raise KeyboardInterrupt


def without_seconds(rows):
    return [replace(row, seconds=0.0) for row in rows]


def test_the_recipes_are_the_methods_with_a_schedule():
    assert tuple(name for name, method in METHODS.items() if method.recipe is not None) == RECIPES
    assert started_parts("sgd") == {"model", "optimizer"}
    assert started_parts("bn-recipe") == {"model", "optimizer", "scheduler", "average"}


def started_parts(method):
    return set(started(method, load("digits"), 10).state_dict())


@pytest.mark.parametrize("method", RECIPES)
def test_the_learning_rate_falls_to_zero_along_a_cosine_over_the_run(method, digits):
    state = started(method, digits, updates=2 * UPDATES)
    lr = METHODS[method].recipe.settings["lr"]
    for epoch in (1, 2):
        train_epoch(state, digits.x_train, digits.y_train, torch.arange(UPDATES * 100), 100)
        rates = [group["lr"] for group in state.optimizer.param_groups]
        assert rates == pytest.approx([lr * (1 + math.cos(math.pi * epoch / 2)) / 2] * len(rates), abs=1e-12)


@pytest.mark.parametrize("method", RECIPES)
def test_the_deployed_network_has_the_exponential_average_of_the_weights(method, digits):
    updates = 50  # of which the average spans 4 %: two updates
    state = started(method, digits, updates)
    paths = []
    for step in range(10):
        train_epoch(state, digits.x_train, digits.y_train, torch.arange(100 * step, 100 * step + 100), 100)
        paths.append({k: v.clone() for k, v in state.model.state_dict().items() if v.is_floating_point()})
    found = state.deployed().state_dict()
    for name in paths[0]:
        expected = paths[0][name]
        for weights in paths[1:]:
            expected = expected.lerp(weights[name], 0.5)
        assert_close(found[name], expected, 1e-6, name)
        if name.endswith("weight"):
            assert not torch.equal(found[name], paths[-1][name])


def test_without_an_average_the_last_weights_are_deployed(digits):
    state = started("sgd", digits, 10)
    Recipe({}, average=0.0).apply_(state, 10)
    assert state.average is None
    train_epoch(state, digits.x_train, digits.y_train, torch.arange(300), 100)
    assert torch.equal(state.deployed()[0].weight, state.model[0].weight)


@pytest.mark.parametrize("method", RECIPES)
def test_losses_are_those_of_the_averaged_weights(method, digits, tmp_path):
    """After the second of four epochs, when the average and the last weights differ most."""
    with pytest.raises(KeyboardInterrupt):
        run(Config((method,), epochs=4), digits, tmp_path, Interrupt(epoch=2))
    rows = read_results(tmp_path / "results.csv")
    saved = torch.load(tmp_path / "checkpoints" / f"{method}-0.pt", weights_only=True)["trainee"]
    model = load_trained(tmp_path / "checkpoints" / f"{method}-0.pt", digits)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved["average"][f"module.{name}"])
    with torch.no_grad():
        val_loss = float(F.cross_entropy(model(digits.x_test), digits.y_test))
        train_loss = float(F.cross_entropy(model(digits.x_train), digits.y_train))
    assert (rows[-1].train_loss, rows[-1].val_loss) == pytest.approx((train_loss, val_loss), rel=1e-6)
    model.load_state_dict(saved["model"])
    assert float(F.cross_entropy(model(digits.x_test), digits.y_test).detach()) != pytest.approx(val_loss, rel=1e-4)


@pytest.mark.parametrize("method", RECIPES)
def test_a_recipe_resumes_bit_for_bit(method, digits, tmp_path):
    """Interrupted after every epoch: the schedule and the average continue where they were."""
    config = Config((method,), epochs=4)
    whole = run(config, digits, tmp_path / "whole", Progress())
    for epoch in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run(config, digits, tmp_path / "parts", Interrupt(epoch), resume=True)
    assert without_seconds(run(config, digits, tmp_path / "parts", Progress(), resume=True)) == without_seconds(whole)
    ends = [torch.load(tmp_path / f / "checkpoints" / f"{method}-0.pt", weights_only=True) for f in ("whole", "parts")]
    for name, value in ends[0]["trainee"]["average"].items():
        assert torch.equal(value, ends[1]["trainee"]["average"][name]), name
    assert ends[0]["trainee"]["scheduler"] == ends[1]["trainee"]["scheduler"]


def test_a_schedule_cannot_be_extended_but_the_other_methods_can(digits, tmp_path):
    run(Config(("sgd", "bn-recipe"), epochs=2), digits, tmp_path, Progress())
    with pytest.raises(ResumeError, match=r"epochs was 2, now 3\. Use the same settings.*or leave out bn-recipe"):
        run(Config(("sgd", "bn-recipe"), epochs=3), digits, tmp_path, Progress(), resume=True)
    rows = run(Config(("sgd",), epochs=3), digits, tmp_path, Progress(), resume=True)
    assert {(row.method, row.epoch) for row in rows} == {("sgd", e) for e in range(4)} | {
        ("bn-recipe", e) for e in range(3)
    }


def test_the_rate_of_a_recipe_is_its_own(digits, tmp_path):
    found = [run(Config(("bn-recipe",), epochs=1, lr=lr), digits, tmp_path / str(lr), Progress()) for lr in (0.01, 0.5)]
    assert without_seconds(found[0]) == without_seconds(found[1])


def test_the_comparison_gives_the_last_loss_of_a_recipe_and_the_lowest_of_all_others():
    losses = {"sgd": [2.3, 1.0, 0.9], "bn": [2.3, 0.2, 0.3], "bprong-recipe": [2.3, 0.05, 0.1]}
    rows = run_of(losses)
    assert in_run(rows) == ["bprong-recipe"]
    assert comparison(rows) == [
        ("BPRONG-recipe, validation loss after epoch 2 (the last)", "0.100; accuracy 90.91 %"),
        ("Lowest validation loss of the other methods, at any epoch", "0.200; BN after epoch 1"),
    ]
    assert comparison(run_of({"bn": [2.3, 0.2]})) == []
    assert comparison(run_of({"bn-recipe": [2.3, 0.2]}))[1][1] == "no other method is in this run"
    assert comparison(run_of({"bn-recipe": [2.3, NAN]}))[0] == (
        "BN-recipe, validation loss", "diverged at epoch 1",
    )  # fmt: skip
