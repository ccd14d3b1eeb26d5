"""How the output moves when the parameters do: J d of a few directions d, and with the likelihood dᵢᵀ F dⱼ.

F = E[Jᵀ F_out J] is the Fisher matrix of the whole network, of which nothing but these products is ever formed. They
come from forward passes of their own that leave no trace: random numbers, buffers (BatchNorm's running statistics),
`.grad` and the module's mode are afterwards as they were before.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from bprong.likelihood import Likelihood
from bprong.listening import unheard
from bprong.recording import observed, random_numbers

__all__ = ["Direction", "Linearized", "curvature", "linearized", "output_of"]

Direction = Mapping[Tensor, Tensor]  # what each parameter moves by; those that are not named stand still


@dataclass(frozen=True)
class Linearized:
    """A network to first order in its parameters: f(θ + Σ αᵢ dᵢ) ≈ output + Σ αᵢ along[i].

    refused: why forward mode could not be had, in torch's words; `along` is then by finite differences. None: it could
    """

    output: Tensor
    along: tuple[Tensor, ...]
    refused: str | None = None


def output_of(model: nn.Module, x: Any, seed: int) -> Tensor:
    """The output on x at the parameters as they are: detached, eager, without autocast, dropout drawn from the seed.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    >>> bool(output_of(model, torch.ones(4, 3), seed=1).equal(output_of(model, torch.ones(4, 3), seed=1)))
    True
    """
    eager = getattr(model, "_orig_mod", model)
    with _on_our_own(eager), observed(eager, {}, x, seed, errors=False) as (output, _):
        return output


def linearized(
    model: nn.Module, x: Any, directions: Sequence[Direction], seed: int, forward_mode: bool = True
) -> Linearized:
    """The output on x and J d for each direction, at the same random numbers and buffers for all.

    forward_mode: whether to try it; once it was refused, not trying again saves the time of half a pass

    >>> layer = nn.Linear(2, 1)
    >>> linearized(layer, torch.tensor([[1.0, 2.0]]), [{layer.weight: torch.tensor([[1.0, 10.0]])}], seed=0).along[0]
    tensor([[21.]])
    """
    refused: str | None = "forward mode was not asked for"
    if forward_mode and directions:
        try:
            # One after the other. All at once (torch.func: vmap of jvp) computes the output once instead of k times but
            # must stack the directions: 75 ms against 85 for two of the autoencoder 784-1000-500-250-30-… at batch 250
            # (a forward and backward pass: 39), and it refuses models that write to their buffers, as BatchNorm does.
            duals = [_dual(model, x, d, seed) for d in directions]
            return Linearized(duals[0][0], tuple(tangent for _, tangent in duals))
        except (NotImplementedError, RuntimeError) as reason:  # what is wrong with the model itself will be said again
            refused = str(reason).split("\n", maxsplit=1)[0]
    output = output_of(model, x, seed)
    along = tuple(_difference(model, x, d, seed) for d in directions)
    return Linearized(output, along, refused if directions else None)


def curvature(
    model: nn.Module, found: Linearized, likelihood: Likelihood, seed: int, counted: Tensor | None = None
) -> Tensor:
    """dᵢᵀ F dⱼ, averaged over the targets that the loss counts: (k, k), float64.

    counted: which targets those are, the output's last dimension apart; None: all
    seed:    for a likelihood of the user's own without roots, whose targets are drawn
    """
    likelihood.check(found.output)
    counted = likelihood.counted(found.output, counted)
    targets = likelihood.targets(found.output) if counted is None else int(counted.sum())
    with random_numbers(model, seed):
        return likelihood.information(found.output, found.along, counted) / targets


def _dual(model: nn.Module, x: Any, direction: Direction, seed: int) -> tuple[Tensor, Tensor]:
    """f and J d in one pass of dual numbers.

    The parameters themselves become dual, in place, rather than being replaced by others: whoever holds them (tied
    layers, the list in nn.LSTM) has them. Leaving the level takes the tangents away again.
    """
    _load_quietly()
    with forward_ad.dual_level():
        with torch.no_grad():
            for parameter, d in direction.items():
                dual = forward_ad.make_dual(parameter.detach(), d.to(parameter))  # type: ignore[no-untyped-call]
                parameter.copy_(dual)
        output, tangent = forward_ad.unpack_dual(output_of(model, x, seed))  # type: ignore[no-untyped-call]
        return output.clone(), torch.zeros_like(output) if tangent is None else tangent.clone()


def _difference(model: nn.Module, x: Any, direction: Direction, seed: int) -> Tensor:
    """(f(θ + hd) − f(θ − hd)) / 2h, which is J d up to h² and rounding / h; ε^⅓ is where the two meet."""
    d_norm, norm = _norm(direction.values()), _norm(direction)
    if d_norm == 0:
        return torch.zeros_like(output_of(model, x, seed))
    eps = max(torch.finfo(parameter.dtype).eps for parameter in direction)
    h = eps ** (1 / 3) * (norm or 1.0) / d_norm
    with _moved(direction, h):
        ahead = output_of(model, x, seed)
    with _moved(direction, -h):
        behind = output_of(model, x, seed)
    return (ahead - behind).div(2 * h)


@contextmanager
def _moved(direction: Direction, step: float) -> Iterator[None]:
    """θ + step · d while it lasts; afterwards θ bit for bit."""
    before = {parameter: parameter.detach().clone() for parameter in direction}
    with torch.no_grad():
        try:
            for parameter, d in direction.items():
                parameter.add_(d.to(parameter), alpha=step)
            yield
        finally:
            for parameter, value in before.items():
                parameter.copy_(value)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))


@contextmanager
def _on_our_own(model: nn.Module) -> Iterator[None]:
    """No listener, no autocast; attention written out, as its fused kernels have no forward mode."""
    with ExitStack() as stack:
        stack.enter_context(unheard())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for device in {parameter.device.type for parameter in model.parameters()}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _load_quietly() -> None:
    """What torch loads before the first dual number, and in which it uses what it has itself deprecated."""
    if "torch._decomp.decompositions_for_jvp" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("torch._decomp.decompositions_for_jvp")
