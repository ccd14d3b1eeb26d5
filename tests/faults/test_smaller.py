"""Smaller faults: tiny and huge numbers, prime widths, habits of torch's optimizers, models that return their loss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.sklearn import MLPRegressor
from helpers import assert_close, classification, mlp, snapshot
from training import EXACT

X, Y = classification(60, 5, 3)

# Tiny gradients -------------------------------------------------------------------------------------------------------

TINY = [(torch.float32, 2.0**-80), (torch.float32, 2.0**-110), (torch.float64, 2.0**-600), (torch.float64, 2.0**-900)]


@pytest.mark.parametrize(("dtype", "factor"), TINY)
@pytest.mark.parametrize("width", [5, 20_000])
def test_tiny_gradients_are_not_zero(dtype: torch.dtype, factor: float, width: int) -> None:
    """A factor on the loss is a factor on the step, although squares of such gradients vanish; a power of two is exact.

    Long gradients are measured in another way than short ones. The gradients that are compared are those of the first
    step, which does nothing and does not count if all are zero.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, width, dtype=dtype, generator=generator)
    y = torch.randint(3, (8,), generator=generator)
    steps = []
    for scale in (1.0, factor):
        torch.manual_seed(1)
        model = nn.Linear(width, 3, dtype=dtype)
        with torch.no_grad():
            model.weight /= width**0.5
        optimizer = bprong.PRONG(model, lr=2.0**-3 / scale, options={"max_dim": 64})
        before = model.weight.detach().clone()
        (F.cross_entropy(model(x), y) * scale).backward()
        assert model.weight.grad.any()
        optimizer.step()
        assert optimizer.report().steps == 1
        steps.append(model.weight.detach() - before)
    assert steps[0].any()
    assert_close(steps[1], steps[0], 1e-4)


def test_gradients_that_are_zero_still_do_nothing() -> None:
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    (F.cross_entropy(model(X), Y) * 0.0).backward()
    before = snapshot(model)
    optimizer.step()
    assert optimizer.report().steps == 0
    assert torch.equal(before["0.weight"], model[0].weight)


# Prime widths ---------------------------------------------------------------------------------------------------------


def product_design(groups: list[int]) -> Tensor:
    """Inputs in groups of features that are correlated within a group, and exactly uncorrelated between groups.

    Every combination of the rows of all groups occurs once.
    """
    generator = torch.Generator().manual_seed(2)
    rows = []
    for size in groups:
        values = torch.randn(8 if size > 1 else 2, size, dtype=torch.float64, generator=generator)
        values = values @ torch.randn(size, size, dtype=torch.float64, generator=generator)
        rows.append(values - values.mean(dim=0))
    places = torch.cartesian_prod(*(torch.arange(len(values)) for values in rows))
    return torch.cat([values[places[:, i]] for i, values in enumerate(rows)], dim=1)


@pytest.mark.parametrize("groups", [[6, 6], [6, 1, 6]])
@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
def test_a_side_of_prime_width_is_whitened_in_blocks(groups: list[int], kind: type[bprong.BPRONG]) -> None:
    """With two blocks that cut no group, the step is that of the whole side: 12 = 6 + 6, and 13 = 6 + 7 or 7 + 6."""
    x = product_design(groups)
    y = torch.arange(len(x)) % 3
    steps = []
    for max_dim in (4096, 10):  # the memory of one block of 10 is that of two of 7
        torch.manual_seed(1)
        model = nn.Linear(sum(groups), 3, dtype=torch.float64)
        optimizer = kind(
            model, "cross_entropy", lr=0.1,
            options=(EXACT if kind is bprong.BPRONG else {}) | {"max_dim": max_dim, "solver": "exact"},
        )  # fmt: skip
        before = model.weight.detach().clone()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps.append(model.weight.detach() - before)
    assert_close(steps[1], steps[0], 1e-9)


@pytest.mark.parametrize("width", [101, 103, 499, 997])
def test_a_prime_width_above_max_dim_is_not_diagonal(width: int) -> None:
    """Neither as inputs nor as outputs, and neither in the preview nor in the report."""
    model = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width)).double()
    assert "diagonal" not in str(bprong.coverage(model, max_dim=100))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options={"max_dim": 100})
    x = torch.randn(20, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(x), torch.arange(20)).backward()
    optimizer.step()
    rows = optimizer.report().layers
    assert not any("diagonal" in str(row.get(key)) for row in rows for key in ("forward_factor", "backward_factor"))


def test_blocks_of_a_prime_width_take_no_more_memory_than_one_block_of_max_dim() -> None:
    """As for every other width, to within a block."""
    model = nn.Linear(997, 4).double()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, options={"max_dim": 100})
    x = torch.randn(20, 997, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    F.cross_entropy(model(x), torch.arange(20) % 4).backward()
    optimizer.step()
    state = optimizer._whitening.layers[""].state_dict()["forward"]
    entries = _entries([state["scatter"], state["mean"]])
    assert 2 * 997 < entries <= 1.1 * 100**2 + 997  # the mean of every feature is kept as well


def _entries(value: Any) -> int:
    """The number of entries of all tensors in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, (dict, list, tuple)):
        return sum(map(_entries, value.values() if isinstance(value, dict) else value))
    return 0


def test_a_checkpoint_of_a_prime_width_continues_bit_for_bit() -> None:
    x = torch.randn(20, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20) % 3

    def made() -> tuple[nn.Module, bprong.BPRONG]:
        torch.manual_seed(1)
        model = mlp(13, 11, 3)
        return model, bprong.BPRONG(model, "cross_entropy", lr=0.1, every=2, options={"max_dim": 8})

    def step(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    model, optimizer = made()
    for _ in range(3):
        step(model, optimizer)
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        step(model, optimizer)
        step(other, resumed)
    assert torch.equal(model[0].weight, other[0].weight)
    assert "diagonal" not in str(optimizer.report())


# Habits of torch's optimizers -----------------------------------------------------------------------------------------


def test_a_learning_rate_may_be_a_tensor() -> None:
    steps = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        torch.manual_seed(0)
        model = mlp(4, 3)
        x, y = classification(20, 4, 3)
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=lr)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps.append(model[0].weight.detach().clone())
    assert torch.equal(*steps)


NEEDS_NO_BPRONG = """
import sys, torch
sys.modules["bprong"] = None  # importing it fails
model = torch.load(sys.argv[1], weights_only=False)
x = torch.ones(2, 4, dtype=torch.float64)
assert model(x).shape == (2, 3)
"""


def test_a_saved_model_is_loaded_without_bprong(tmp_path: Path) -> None:
    model = mlp(4, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, lr=0.01)
    x, y = classification(20, 4, 3)
    criterion(model(x), y).backward()
    optimizer.step()
    torch.save(model, tmp_path / "model.pt")
    subprocess.run([sys.executable, "-c", NEEDS_NO_BPRONG, str(tmp_path / "model.pt")], check=True)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    again = bprong.BPRONG(loaded, criterion, lr=0.01)
    criterion(loaded(x), y).backward()
    again.step()
    assert again.report().steps == 1


def test_an_input_of_the_wrong_width_raises_torchs_own_error() -> None:
    model = mlp(4, 3)
    x = torch.ones(2, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError) as plain:
        model(x)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.01)
    with pytest.raises(RuntimeError, match=re.escape(str(plain.value))):
        model(x)
    del optimizer


# Sizes of numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-18, 1e-20, 1e-25, 1e-30])
def test_spectral_steps_on_tiny_inputs_have_their_usual_length(size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.01, step="spectral")
    for _ in range(5):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(model(size * x), y).backward()
        optimizer.step()
        length = float((model[0].weight.detach() - before).square().mean().sqrt())
        assert length <= 0.2 * 0.01 * 1.01, length


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_targets_of_any_size_are_fitted(scale: float) -> None:
    X = np.random.default_rng(0).normal(size=(60, 3))
    target = X @ np.array([1.0, -2.0, 0.5])
    plain = MLPRegressor(hidden_layer_sizes=(), max_iter=20).fit(X, target).predict(X)
    scaled = MLPRegressor(hidden_layer_sizes=(), max_iter=20).fit(X, scale * target).predict(X)
    assert np.isfinite(scaled).all()
    np.testing.assert_allclose(scaled / scale, plain, rtol=1e-5, atol=1e-5)


# Models that return their loss ----------------------------------------------------------------------------------------


class ReturnsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(4, 5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.network(x), y)


@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_prong_trains_a_model_that_returns_its_loss_as_one_that_returns_logits(step: str) -> None:
    x, y = classification(20, 4, 3)
    ends = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = ReturnsLoss()
        trained = model if inside else model.network
        optimizer = bprong.PRONG(trained, lr=0.05, step=step)
        for _ in range(4):
            optimizer.zero_grad()
            (model(x, y) if inside else F.cross_entropy(model.network(x), y)).backward()
            optimizer.step()
        ends.append(model.network[0].weight.detach().clone())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
