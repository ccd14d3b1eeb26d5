"""The path of a model from a seed: its parameters after some steps with a refresh each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bprong
from helpers import snapshot
from training import EXACT

Rate = float | str


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double()


def path(
    model: nn.Module,
    loss: Any,
    lr: Rate,
    backward: Callable[[nn.Module], None],
    kind: type = bprong.BPRONG,
    steps: int = 3,
    **settings: Any,
) -> dict[str, Tensor]:
    """The parameters after some steps with a refresh each; they must have moved."""
    optimizer = kind(model, loss, lr=lr, every=1, **({"options": EXACT} | settings))
    before = snapshot(model)
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    after = snapshot(model)
    assert any(not torch.equal(before[name], value) for name, value in after.items())
    return after
