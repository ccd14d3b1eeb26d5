"""Assertions and small problems that several test files share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bprong import WhitenedLinear
from bprong.linalg.factors import Damping, Dense, factor_by_cholesky
from bprong.linalg.moments import Blocks, Moments, Sums
from bprong.linalg.roots import factor_by_eigenvalues

EPS = torch.finfo(torch.float64).eps


def quick_cases(cases, *quick):
    """The cases of a parametrised test, of which `make test` runs those in `quick` and `make test-rest` the others."""
    assert all(case in cases for case in quick)
    marks = {True: (), False: (pytest.mark.rest,)}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in quick]) for case in cases]


def assert_close(actual, expected, rtol: float, what: str = "value") -> None:
    """‖actual − expected‖ ≤ rtol · ‖expected‖, or ≤ rtol where ‖expected‖ is zero (below 1e-300)."""
    actual = torch.as_tensor(actual).detach().double()
    expected = torch.as_tensor(expected).detach().double()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    scale = float(expected.norm())
    off = float((actual - expected).norm())
    assert off <= rtol * (scale if scale > 1e-300 else 1.0), f"{what}: off by {off:.2e} beside {scale:.2e}, {rtol=:.0e}"


def assert_unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """The same names, and for each of them bitwise equal tensors."""
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), f"{name} changed"


def assert_same_state(actual: Any, expected: Any) -> None:
    """Equal keys, values and tensors at every level; NaN, which stands for no number, equals NaN."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_state(actual[key], value)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert actual == expected


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def mlp(*widths: int, bias: bool = True, dtype=torch.float64, phi=nn.Tanh) -> nn.Sequential:
    """Linear, φ, …, Linear."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), phi()]
    return nn.Sequential(*layers[:-1])


def input_moments(z: Tensor, centre: bool = True, blocks: int = 0) -> Moments:
    """c and Ž of inputs z (..., d), or (..., blocks, d)."""
    sums = Sums(centre)
    sums.add(z.reshape(-1, *z.shape[-2 if blocks else -1 :]))
    return sums.moments()


def exact_factor(moments: Moments, damping: Damping, blocks: Blocks, like: Tensor) -> Dense:
    """The exact factor, by whichever way finds it."""
    factor = factor_by_cholesky(moments, damping, blocks, like)
    return factor_by_eigenvalues(moments, damping, blocks, like) if factor is None else factor


def inverse(
    second: Tensor, damping: float | Damping = 0.0, dtype: torch.dtype = torch.float64, weight: float = 1.0
) -> Tensor:
    """(second / weight + ε)⁻¹."""
    blocks = Blocks(second.shape[-1], groups=second.shape[:-2].numel())
    return exact_factor(Moments(weight, None, second), Damping.of(damping), blocks, torch.empty(0, dtype=dtype)).inverse


def error_moments(delta: Tensor, targets: int) -> Moments:
    """D of errors δ (..., d): Σ δδᵀ over all rows, divided by `targets`."""
    sums = Sums(centre=False)
    sums.add(delta.reshape(-1, delta.shape[-1]))
    return sums.moments(float(targets))


def classification(n: int, features: int, classes: int, dtype=torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated inputs with a nonzero mean, and labels that depend on them."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(features, features))
    x = random.normal(size=(n, features)) @ mixing + random.normal(size=features)
    y = (x @ random.normal(size=(features, classes))).argmax(axis=1)
    return torch.tensor(x, dtype=dtype), torch.tensor(y)


def layers_of(model: nn.Module) -> list[WhitenedLinear]:
    return [module for module in model.modules() if isinstance(module, WhitenedLinear)]


def spd(d: int, seed: int = 0, condition: float = 100.0) -> Tensor:
    """A symmetric positive definite matrix of this condition; its eigenvalues are evenly spaced on a log scale."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator))
    eigenvalues = torch.logspace(0, -float(np.log10(condition)), d, dtype=torch.float64)
    return (Q * eigenvalues) @ Q.T


class Idle(nn.Module):
    """Two layers, one of which is never called."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.idle = nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


class SelfAttention(nn.Module):
    """Self-attention with a linear output at every position."""

    def __init__(self, mha: nn.MultiheadAttention, head: nn.Linear):
        super().__init__()
        self.mha = mha
        self.head = head

    def forward(self, x):
        return self.head(self.mha(x, x, x, need_weights=False)[0])


class Woken(nn.Module):
    """Its layer `idle` is used only while `awake` is set; by_hand: in a way that cannot be recorded."""

    def __init__(self, by_hand: bool = False):
        super().__init__()
        self.used = nn.Linear(5, 4)
        self.idle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.by_hand = by_hand
        self.awake = False

    def forward(self, x):
        z = self.used(x).tanh()
        if self.awake:
            z = z + (z @ self.idle.weight.T + self.idle.bias if self.by_hand else self.idle(z))
        return self.head(z)
