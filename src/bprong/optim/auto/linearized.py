"""How the output changes with the parameters: J d for a few directions d, and with the likelihood dᵢᵀ F dⱼ.

F = E[Jᵀ F_out J] is the Fisher matrix of the whole network; only these products of it are ever formed. They come from
separate forward passes that leave no trace: random number generators, buffers (running statistics of BatchNorm),
`.grad` and the modes of the modules are afterwards what they were before.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from bprong.capture.output import Head, laid_out
from bprong.capture.own_pass import random_numbers, recorded_run
from bprong.contexts import own_pass
from bprong.likelihood.families import Likelihood
from bprong.optim.rules import Direction


@dataclass(frozen=True)
class Linearized:
    """A network to first order in its parameters: f(θ + Σ αᵢ dᵢ) ≈ output + Σ αᵢ along[i].

    refused: why forward-mode AD was unavailable, as torch says it; `along` then comes from finite differences
    """

    output: Tensor
    along: tuple[Tensor, ...]
    refused: str | None = None


@dataclass(frozen=True)
class Rerun:
    """The output on x at the current parameters: detached, eager, without autocast, with dropout drawn from the seed.

    class_dim: see `output.laid_out`
    head:      finds the output

    Attention uses no fused kernels, because these have no forward-mode AD.

    >>> run = Rerun(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), torch.ones(4, 3), seed=1)
    >>> bool(run().equal(run()))
    True
    """

    model: nn.Module
    x: Any
    seed: int
    class_dim: int | None = None
    head: Head | None = None

    def __call__(self) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            for device in {parameter.device.type for parameter in self.model.parameters()}:
                stack.enter_context(torch.autocast(device, enabled=False))
            parts, _ = stack.enter_context(
                recorded_run(self.model, [], self.x, self.seed, errors=False, head=self.head)
            )
            return laid_out(parts, self.class_dim)


def linearized(run: Rerun, directions: Sequence[Direction], forward_mode: bool = True) -> Linearized:
    """The output on a batch and J d for each direction, with the same random numbers and buffers for all.

    forward_mode: whether to try forward-mode AD; trying it in vain takes the time of half a pass

    >>> layer = nn.Linear(2, 1)
    >>> run = Rerun(layer, torch.tensor([[1.0, 2.0]]), seed=0)
    >>> linearized(run, [{layer.weight: torch.tensor([[1.0, 10.0]])}]).along[0]
    tensor([[21.]])
    """
    refused: str | None = "forward-mode AD was not requested"
    if forward_mode and directions:
        try:
            # One after the other. All at once (torch.func: vmap of jvp) computes the output once instead of k times but
            # must stack the directions: 75 ms against 85 for two of the autoencoder 784-1000-500-250-30-… at batch 250
            # (a forward and backward pass: 39), and it refuses models that write to their buffers, as BatchNorm does.
            duals = [_dual(run, d) for d in directions]
            return Linearized(duals[0][0], tuple(tangent for _, tangent in duals))
        except (NotImplementedError, RuntimeError) as reason:  # an error of the model itself will be raised again below
            refused = str(reason).split("\n", maxsplit=1)[0]
    along = tuple(_difference(run, d) for d in directions)
    return Linearized(run(), along, refused if directions else None)


def curvature(network: Linearized, run: Rerun, likelihood: Likelihood, counted: Tensor | None = None) -> Tensor:
    """dᵢᵀ F dⱼ, averaged over the targets that the loss counts: (k, k), float64.

    run:     what was linearized; its seed is that of the targets that are drawn for a likelihood without roots
    counted: which targets count, without the output's last dimension; None: all
    """
    likelihood.check(network.output)
    with random_numbers(run.model, run.seed):
        products = likelihood.fisher_products(network.output, network.along, counted)
    return products / (likelihood.targets(network.output) if counted is None else int(counted.sum()))


def _dual(run: Callable[[], Tensor], direction: Direction) -> tuple[Tensor, Tensor]:
    """f and J d in one pass of dual numbers.

    The parameters themselves become dual, in place, instead of being replaced: whatever refers to them (tied layers,
    the list in nn.LSTM) then sees the tangents. Leaving the level removes the tangents again.
    """
    _import_decompositions()
    with own_pass(), dual_level():
        with torch.no_grad():
            for parameter, d in direction.items():
                parameter.copy_(make_dual(parameter.detach(), d.to(parameter)))  # type: ignore[no-untyped-call]
        output, tangent = unpack_dual(run())  # type: ignore[no-untyped-call]
        return output.clone(), torch.zeros_like(output) if tangent is None else tangent.clone()


def _difference(run: Callable[[], Tensor], direction: Direction) -> Tensor:
    """(f(θ + hd) − f(θ − hd)) / 2h, which is J d up to errors of h² and of rounding / h; these balance at h = ε^⅓."""
    h = max(torch.finfo(p.dtype).eps for p in direction) ** (1 / 3) * _norm(direction) / _norm(direction.values())
    return (_at(run, direction, h) - _at(run, direction, -h)).div(2 * h)


def _norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors together; one if they are zero."""
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors)) or 1.0


@torch.no_grad()
def _at(run: Callable[[], Tensor], direction: Direction, step: float) -> Tensor:
    """The output with the parameters moved by step · d; restores them bit for bit."""
    before = {parameter: parameter.detach().clone() for parameter in direction}
    try:
        for parameter, d in direction.items():
            parameter.add_(d.to(parameter), alpha=step)
        return run()
    finally:
        for parameter, value in before.items():
            parameter.copy_(value)


@functools.cache
def _import_decompositions() -> None:
    """Imports torch's jvp decompositions once, silencing the warnings of deprecation that torch raises at itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15
        importlib.import_module("torch._decomp.decompositions_for_jvp")
