"""Smaller faults: tiny gradients that count as zero, and prime widths that are whitened coordinate by coordinate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
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
    entries = _entries(optimizer._whitening.state_dict()["layers"][""]["forward"]["moments"])
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
