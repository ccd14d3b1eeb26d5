"""Arguments and options: how they are given, what each changes, and which are refused."""

import dataclasses
import inspect
import pydoc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong import WhiteningWarning
from bprong.linalg.factors import LOW_RANK_ERROR
from bprong.linalg.low_rank import LowRank
from bprong.optim import Options, Periods
from helpers import classification, mlp, snapshot
from layered import data, make
from layered import train as train_layered
from training import batches, train

# How they are given ---------------------------------------------------------------------------------------------------


def test_options_can_be_a_mapping_or_a_dataclass():
    given = {"fisher": "exact", "average": 0.5, "max_dim": 3}
    ends = []
    for options in (given, Options(**given)):
        torch.manual_seed(0)
        model = mlp(5, 4, 3)
        train(
            model,
            bprong.BPRONG(model, "cross_entropy", lr=0.1, every=3, options=options),
            batches(*classification(60, 5, 3), 20, 8),
        )
        ends.append(snapshot(model))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_options_are_frozen_and_documented():
    options = Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.average = 0.5
    for field in dataclasses.fields(Options):
        assert field.name in Options.__doc__, field.name


def test_prong_shows_its_own_arguments():
    ours = inspect.signature(bprong.PRONG).parameters
    theirs = dict(inspect.signature(bprong.BPRONG).parameters)
    assert theirs.pop("backward_damping") is not None
    assert list(ours) == list(theirs)
    own = {"loss": None, "lr": 0.01, "step": "natural"}  # at a fixed lr it needs no loss
    for name, parameter in ours.items():
        assert parameter.default == own.get(name, theirs[name].default), name
        assert parameter.annotation == theirs[name].annotation, name
    shown = pydoc.render_doc(bprong.PRONG, renderer=pydoc.plaintext)
    assert all(f"{name}:" in shown for name in ours)


def test_prong_passes_every_argument_on(monkeypatch):
    passed = {}
    monkeypatch.setattr(bprong.BPRONG, "__init__", lambda self, *a, **k: passed.update(zip("mkl", a, strict=True), **k))
    names = [name for name in inspect.signature(bprong.PRONG).parameters if name not in ("model", "loss", "lr")]
    bprong.PRONG("model", loss="loss", lr="lr", **{name: name for name in names})
    assert passed == {"m": "model", "k": "loss", "l": "lr"} | {name: name for name in names}


def test_backward_damping_is_no_argument_of_prong():
    with pytest.raises(TypeError, match="backward_damping"):
        bprong.PRONG(mlp(5, 3), backward_damping=0.1)


def test_there_are_at_most_twelve_arguments_and_eight_options():
    assert len(inspect.signature(bprong.BPRONG).parameters) <= 12
    assert len(dataclasses.fields(Options)) <= 8


def test_every_argument_is_documented():
    for name in inspect.signature(bprong.BPRONG).parameters:
        assert name in bprong.BPRONG.__doc__, name


# What each of them changes --------------------------------------------------------------------------------------------

CHANGES = [
    {"lr": 0.06}, {"loss": "mse"}, {"momentum": 0.5},
    {"weight_decay": 0.1}, {"forward_damping": 0.1}, {"backward_damping": 0.1}, {"every": 4}, {"max_step": 0.01},
    {"every": Periods(4, backward_every=3)}, {"every": Periods(3, forward_offset=1)},
    {"every": Periods(3, backward_every=4)}, {"every": Periods(3, backward_offset=1)},
    {"every": Periods(3, refresh="drift")},
]  # fmt: skip
OPTIONS = [
    {"fisher": "exact"}, {"fisher": "empirical"}, {"average": 0.5}, {"seed": 5},
    {"max_dim": 3}, {"solver": "low-rank"},
]  # fmt: skip


def end_of(options=None, steps=8, **arguments):
    """Where a small convolutional network ends up."""
    model = make("conv")
    settings = {"loss": "cross_entropy", "lr": 0.05, "every": 3} | arguments
    train_layered(model, bprong.BPRONG(model, options=options, **settings), data("conv", steps))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def usual():
    return end_of()


@pytest.mark.parametrize("arguments", CHANGES, ids=str)
def test_every_argument_changes_the_path(arguments, usual):
    with pytest.warns(WhiteningWarning, match="declared") if "loss" in arguments else nullcontext():
        found = end_of(**arguments)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, usual)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_changes_the_path(options, usual):
    found = end_of(options)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, usual)


def test_arguments_that_are_the_default_do_not_change_the_path(usual):
    assert torch.equal(end_of({"average": 0.9, "max_dim": 4096, "solver": "auto"}), usual)


def test_every_option_and_argument_was_tried():
    named = {name for changes in (CHANGES, OPTIONS) for each in changes for name in each}
    known = {field.name for field in dataclasses.fields(Options)} | set(inspect.signature(bprong.BPRONG).parameters)
    # In test_contract.py, test_spectral.py and tests/faults/test_output.py
    elsewhere = {"model", "params", "options", "output", "step", "power"}
    assert named == known - elsewhere


# The solver -----------------------------------------------------------------------------------------------------------


def wide_problem():
    torch.manual_seed(0)
    model = mlp(400, 12, 3, dtype=torch.float32)
    spread = torch.linspace(1, 12, 400).pow(-2) * 5
    x = torch.randn(60, 400) * spread
    return model, x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@pytest.mark.parametrize("solver", ["auto", "exact", "low-rank"])
def test_the_solver_decides_the_factor_of_a_wide_side(solver):
    model, x, y = wide_problem()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, momentum=0.5, every=2, options={"solver": solver})
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    factor = optimizer._whitening.layers["0"].forward.factor
    assert isinstance(factor, LowRank) == (solver != "exact")
    assert losses[-1] < 0.5 * losses[0]
    if isinstance(factor, LowRank):
        assert factor.error <= LOW_RANK_ERROR


def test_low_rank_factors_resume_bit_for_bit():
    ends = []
    for resumed in (False, True):
        model, x, y = wide_problem()
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=3, options={"solver": "low-rank"})
        for t in range(10):
            if resumed and t == 5:
                state = optimizer.state_dict()
                optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=3, options={"solver": "low-rank"})
                optimizer.load_state_dict(state)
            train(model, optimizer, [(x, y)])
        ends.append(snapshot(model))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            bprong.PRONG,
            {"every": Periods(4, backward_every=2)},
            "backward_every would have no effect: PRONG whitens forward",
        ),
        (bprong.PRONG, {"options": {"fisher": "exact"}}, "fisher would have no effect: PRONG measures no errors"),
        (bprong.BPRONG, {"lr": "auto", "momentum": 0.9}, "leave out momentum=0.9"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(mlp(5, 3), **({"loss": "cross_entropy", "lr": 0.01} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1}, "lr must be a finite number of at least 0, not -1"),
        ({"lr": "fast"}, "lr must be a number or \"auto\", not 'fast'"),
        ({"momentum": 1}, "less than 1, not 1"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
        ({"every": 0}, "^every must be a whole number of at least 1, not 0"),
        ({"every": Periods(0)}, "^forward_every must be a whole number of at least 1, not 0"),
        (
            {"every": Periods(3, backward_offset=3)},
            "backward_offset must be .* less than 3, not 3",
        ),
        ({"loss": "softmax"}, "loss cannot be 'softmax'. Give the loss that you minimise: nn.CrossEntropyLoss"),
        ({"max_step": 0}, "max_step must be a finite number above 0, not 0"),
        ({"max_step": "large"}, "max_step must be a number above 0, \"auto\" or None, not 'large'"),
        ({"options": {"max_dim": 0}}, "max_dim'. must be a whole number of at least 1, not 0"),
        ({"options": {"solver": "svd"}}, r"solver'\] must be one of \('auto', 'exact', 'low-rank'\), not 'svd'"),
        ({"every": Periods(2, refresh="often")}, r"refresh must be one of \('periodic', 'drift'\), not 'often'"),
        ({"options": {"fischer": "exact"}}, "options has no 'fischer'; it takes fisher, average"),
        ({"options": {"momentum": 0.5, "rate": 0.1}}, "options has no 'momentum', 'rate'"),
        ({"options": {"fisher": "true"}}, "fisher must be one of"),
        ({"options": {"seed": "a"}}, "seed must be a whole number"),
        ({"options": {"average": None}}, "average must be a finite number"),
    ],
    ids=str,
)
def test_errors_about_arguments_say_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        bprong.BPRONG(mlp(5, 3), **({"loss": "cross_entropy", "lr": 0.01} | arguments))


def test_zero_is_no_bound_where_denormals_are_flushed():
    torch.set_flush_denormal(True)
    with pytest.raises(ValueError, match="max_step must be"):
        bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.01, max_step=0)


def test_a_model_without_layers_to_whiten_is_refused():
    with pytest.raises(
        ValueError, match="BatchNorm2d has no layer that could be whitened; these can be: Linear, Conv1d"
    ):
        bprong.BPRONG(nn.BatchNorm2d(1), "cross_entropy", lr=0.01)


@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_parameters_instead_of_the_model_are_refused(kind):
    name = kind.__name__
    message = rf"{name} needs the model itself, not a generator: give it the model .*Use params= to select parameters"
    with pytest.raises(TypeError, match=message):
        kind(mlp(5, 3).parameters(), "cross_entropy")


@pytest.mark.parametrize("options", ["exact", ["fisher"], Options])
def test_options_of_another_type_are_refused(options):
    with pytest.raises(TypeError, match="options must be a bprong.optim.Options or a mapping"):
        bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.01, options=options)


@pytest.mark.parametrize("name", ["solver", "max_dim", "output"])
def test_what_is_an_option_is_no_argument(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.01, **{name: 1})


def test_groups_that_a_rule_cannot_follow_are_refused():
    model = mlp(5, 4, 3)
    with pytest.raises(ValueError, match='lr="auto" chooses how much of the last update to keep'):
        bprong.BPRONG(model, "cross_entropy", lr="auto", params=[{"params": model.parameters(), "momentum": 0.9}])
