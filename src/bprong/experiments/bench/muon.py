"""Muon in float32: each hidden weight matrix moves along its averaged gradient, orthogonalised; the rest by AdamW.

`torch.optim.Muon` rounds to bfloat16, which a CPU emulates slowly, and refuses what is no matrix. Here matrices of
equal shape are orthogonalised together, and the packed projections of an attention count as the three that they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Keller Jordan's quintic: steep at 0, and about 1 from 0.7 to 1.2
STEPS = 5
RMS = 0.2  # of an entry of the step at learning rate 1, which is about what AdamW's steps have


def orthogonalised(x: Tensor) -> Tensor:
    """The matrices (… × m × n) with all singular values moved close to 1, by Newton–Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def hidden_weights(model: nn.Module) -> list[tuple[Tensor, int]]:
    """Weights of linear layers and convolutions but for the last, and the number of matrices packed in each.

    A linear layer with three times as many outputs as inputs is read as packed queries, keys and values: the networks
    of these benchmarks have no other layer of that shape.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return [(layer.weight, 3 if _packed(layer) else 1) for layer in layers[:-1]]


def _packed(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.out_features == 3 * layer.in_features


class Muon(Optimizer):
    """Muon for `hidden_weights(model)` at `lr`, AdamW for all other parameters at `rest_lr`.

    Decay is decoupled: p ← (1 − lr · weight_decay) p, for matrices only. A step is scaled by 0.2 · sqrt(longer side),
    so that its entries are as large as AdamW's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        rest_lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        hidden = hidden_weights(model)
        self._packs = dict(hidden)
        rest = [p for p in model.parameters() if p not in self._packs]
        self._adamw = torch.optim.AdamW(rest, rest_lr, betas, weight_decay=0.0)
        groups = [{"params": [*self._packs], "lr": lr}, {"params": rest, "lr": rest_lr}]
        super().__init__(groups, {"momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        matrices, rest = self.param_groups
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for p in matrices["params"]:
            p.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            for part, direction in self._parts(p, matrices["momentum"]):
                by_shape.setdefault(direction.shape, []).append((part, direction))
        for shape, members in by_shape.items():
            steps = orthogonalised(torch.stack([direction for _, direction in members]))
            length = RMS * max(shape) ** 0.5
            for (part, _), step in zip(members, steps, strict=True):
                part.add_(step.view_as(part), alpha=-matrices["lr"] * length)
        self._adamw.param_groups[0]["lr"] = rest["lr"]
        self._adamw.step()

    def _parts(self, p: Tensor, momentum: float) -> Iterable[tuple[Tensor, Tensor]]:
        """The matrices in a parameter, as views, each with its gradient averaged by Nesterov's momentum."""
        state = self.state[p]
        assert p.grad is not None
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 1 - momentum)
        direction = p.grad.lerp(average, momentum)
        packs = self._packs[p]
        return zip(p.chunk(packs), (part.flatten(1) for part in direction.chunk(packs)), strict=True)
