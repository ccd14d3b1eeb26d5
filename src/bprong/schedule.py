"""Algorithms 1 and 2: when a whitened layer is re-whitened, and what happens if that fails.

Fujimoto & Ohira, Algorithm 2: forward-whitening when mod(t, τ₁) = c₁, back-whitening when mod(t, τ₂) = c₂. Algorithm 1
(PRONG) is the same with forward-only layers.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.carry import Rules, carry_, check_state, rules_for
from bprong.checks import averaging, check_parameters, one_of, pair, period, refuse_distributed
from bprong.convert import whitened_layers
from bprong.coordinates import Change
from bprong.layers import WhitenedLinear
from bprong.likelihood import Likelihood, likelihood_of
from bprong.moments import Moments, wide
from bprong.recording import Fisher, Measured, record
from bprong.whitening import Damping, Factorisation, LinAlgError, Whitener, WhiteningError, whitener

__all__ = ["PATIENCE", "Refresh", "Rewhitening", "WhiteningWarning", "mixed"]

Side = Literal["forward", "backward"]
PATIENCE = 3  # consecutive failures of one side of one layer that are warned about before they are raised


class WhiteningWarning(UserWarning):
    """A layer kept its previous whitener; the message names it and says why."""


@dataclass(frozen=True)
class Refresh:
    """One side of one layer re-whitened, and by what (`whitener.rank` is the rank its statistics had)."""

    layer: str
    side: Side
    whitener: Whitener


class Rewhitening:
    """Re-whitens the layers of a `whiten_`ed model on a schedule and carries the optimizer's state along.

    Call `step(x)` once per iteration, before the loss is computed; nothing happens unless a refresh is due. A refresh
    changes coordinates, never the function.

    model, optimizer   the whitened model and a torch optimizer of its parameters (SGD with or without momentum, Adam,
                       AdamW, NAdam, RAdam, RMSprop, Adagrad; for others see `carry`)
    likelihood         "categorical", "bernoulli", "gaussian" or your own `bprong.Likelihood`; one target is one row of
                       the output's last dimension
    fisher             targets behind D: "sampled" from the model, "exact" (no sampling, one backward pass for each
                       output of a target), or "empirical" (the data's; then `step(x, y)`)
    forward_every, forward_offset, backward_every, backward_offset
                       the paper's τ₁, c₁, τ₂, c₂; by default back-whitening falls half way between two of its own
                       refreshes
    forward_damping, backward_damping
                       ε of Ž and of D, or a `bprong.Damping`
    factorisation      "eigh" (the paper's), "cholesky" (cheaper) or "symmetric"; only coordinate-wise optimizers such
                       as Adam can tell them apart
    samples            a held sample of the training set, x or (x, y), to measure instead of the batch given
    average            0: each refresh takes its own batch; ρ > 0: a running average that keeps ρ at each new batch
    record_every       with `average`: also measure, without refreshing, every so many steps
    carry              how state of an optimizer unknown here moves: {"momentum_buffer": "velocity", …}
    seed               of the targets drawn; by default torch's initial seed
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        likelihood: str | Likelihood = "categorical",
        *,
        fisher: Fisher = "sampled",
        forward_every: int = 100,
        forward_offset: int = 0,
        backward_every: int = 100,
        backward_offset: int | None = None,
        forward_damping: float | Damping = 0.1,
        backward_damping: float | Damping = 0.03,
        factorisation: Factorisation = "eigh",
        samples: Any = None,
        average: float = 0.0,
        record_every: int | None = None,
        carry: Rules | None = None,
        seed: int | None = None,
    ) -> None:
        refuse_distributed(model)
        self.model, self.optimizer = model, optimizer
        self._layers = dict(whitened_layers(model))
        check_parameters(self._layers, optimizer)
        self._likelihood = likelihood_of(likelihood)
        self._fisher = one_of("fisher", fisher, get_args(Fisher))
        self._schedule: dict[Side, tuple[int, int]] = {
            "forward": period("forward", forward_every, forward_offset),
            "backward": period("backward", backward_every, backward_offset),
        }
        self._damping: dict[Side, Damping] = {
            "forward": Damping.of(forward_damping),
            "backward": Damping.of(backward_damping),
        }
        self._factorisation = one_of("factorisation", factorisation, get_args(Factorisation))
        self._samples = pair(samples)
        self._average, self._record_every = averaging(average, record_every)
        self._rules = rules_for(optimizer, carry)
        self._seed = torch.initial_seed() if seed is None else seed
        self._t = 0
        self._moments: dict[tuple[str, Side], Moments] = {}
        self._failures: Counter[tuple[str, Side]] = Counter()
        self._warned: set[str] = set()

    def step(self, x: Any = None, y: Tensor | None = None) -> list[Refresh]:
        """Does what is due at this iteration with batch x (and targets y, for the empirical Fisher matrix).

        An unfit batch or likelihood raises before anything is changed, and the iteration does not count.
        """
        due = [side for side in self._schedule if self._is_due(side)]
        refreshed: list[Refresh] = []
        if due or self._records():
            check_state(self.optimizer, self._rules, self._layers)
            wanted: dict[Side, bool] = {
                side: self._has(side) and (side in due or self._records()) for side in self._schedule
            }
            measured = self._measure(x, y, wanted)
            for side in due:
                for name in self._layers:
                    done = self._refresh(name, side, measured[name])
                    refreshed += [] if done is None else [done]
        self._t += 1
        return refreshed

    def _is_due(self, side: Side) -> bool:
        every, offset = self._schedule[side]
        return self._has(side) and self._t % every == offset

    def _has(self, side: Side) -> bool:
        return side == "forward" or any(layer.R is not None for layer in self._layers.values())

    def _records(self) -> bool:
        return self._record_every is not None and self._t % self._record_every == 0

    def _measure(self, x: Any, y: Tensor | None, wanted: dict[Side, bool]) -> dict[str, Measured]:
        if self._samples is not None:
            x, y = self._samples
        if x is None:
            raise ValueError("a refresh is due and there is nothing to measure: call step(x), or give samples=")
        layers = {name: (layer, layer.centred) for name, layer in self._layers.items()}
        measured = record(
            self.model, layers, x, y, fisher=self._fisher,
            likelihood=self._likelihood if self._has("backward") else None,
            inputs=wanted["forward"], errors=wanted["backward"], seed=mixed(self._seed, self._t),
        )  # fmt: skip
        if self._average:
            for name, m in measured.items():
                m.z, m.delta = self._averaged(name, "forward", m.z), self._averaged(name, "backward", m.delta)
        return measured

    def _averaged(self, name: str, side: Side, new: Moments | None) -> Moments | None:
        """The running average with the new batch in it, unless that batch is not finite."""
        old = self._moments.get((name, side))
        if new is None or not new.finite:
            return new
        if old is not None and (old.mean is None) == (new.mean is None):
            new = old.decay(self._average).merge(new)
        self._moments[name, side] = new
        return new

    def _refresh(self, name: str, side: Side, measured: Measured) -> Refresh | None:
        layer = self._layers[name]
        moments = measured.z if side == "forward" else measured.delta
        if (side == "backward" and layer.R is None) or not _is_trained(layer):
            return None
        if moments is None or measured.probe is None:
            self._warn(name, side, "no statistics reached it; is it used, and not detached, when the model is called?")
            return None
        try:
            found = whitener(moments.second, self._damping[side], self._factorisation)
            change = _rewhiten_(layer, side, found, moments.mean, measured.probe)
        except WhiteningError as reason:
            self._failed(name, side, reason)
            return None
        carry_(self.optimizer, self._rules, layer, change)
        self._failures[name, side] = 0
        return Refresh(name, side, found)

    def _failed(self, name: str, side: Side, reason: WhiteningError) -> None:
        self._failures[name, side] += 1
        if self._failures[name, side] >= PATIENCE:
            raise WhiteningError(f"layer {name!r}, {side} whitening, {PATIENCE} times in a row: {reason}") from reason
        self._warn(name, side, reason)

    def _warn(self, name: str, side: Side, reason: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            message = f"layer {name!r} keeps its previous {side} whitener: {reason}"
            warnings.warn(message, WhiteningWarning, stacklevel=5)

    def state_dict(self) -> dict[str, Any]:
        """Everything that shapes what comes next: tensors and plain values only."""
        moments = {
            f"{side}:{name}": {"weight": m.weight, "mean": m.mean, "scatter": m.scatter}
            for (name, side), m in self._moments.items()
        }
        return {"t": self._t, "seed": self._seed, "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the model and the optimizer are loaded by their own."""
        if not {"t", "seed", "moments"} <= set(state):
            raise ValueError(f"a state of Rewhitening has t, seed and moments; this one has {sorted(state)}")
        known = {f"{side}:{name}": (name, side) for name in self._layers for side in self._schedule}
        unknown = set(state["moments"]) - set(known)
        if unknown:
            raise ValueError(f"the state speaks of layers this model does not have: {sorted(unknown)}")
        self._moments = {known[key]: self._moments_like(known[key][0], m) for key, m in state["moments"].items()}
        self._t, self._seed = state["t"], state["seed"]
        self._failures.clear()

    def _moments_like(self, name: str, saved: dict[str, Any]) -> Moments:
        """Saved moments where the layer's own are: a checkpoint may have been read to another device."""
        where = wide(self._layers[name].c).device
        mean = saved["mean"]
        return Moments(saved["weight"], None if mean is None else mean.to(where), saved["scatter"].to(where))


def _rewhiten_(layer: WhitenedLinear, side: Side, found: Whitener, mean: Tensor | None, probe: Tensor) -> Change:
    """Changes the layer's coordinates, and changes them back if that moved its outputs on the probe."""
    with torch.no_grad(), _restored_on_error(layer):
        before = layer(probe)
        if not torch.isfinite(before).all():
            raise WhiteningError("its outputs on this batch are not finite")
        change: Change
        if side == "forward":
            change = layer.rewhiten_forward_(found.matrix, torch.zeros_like(layer.c) if mean is None else mean)
        else:
            change = layer.rewhiten_backward_(found.matrix)
        moved = float(
            wide(layer(probe) - before).norm() / wide(before).norm().clamp(min=torch.finfo(before.dtype).tiny)
        )
        allowed = torch.finfo(before.dtype).eps ** 0.5
        if not moved <= allowed:  # written so that NaN is not allowed
            raise WhiteningError(
                f"re-whitening would change its outputs on this batch by {moved:.1e} relative, more than "
                f"{before.dtype} allows ({allowed:.1e}); a larger damping makes the change better conditioned"
            )
    return change


@contextmanager
def _restored_on_error(layer: WhitenedLinear) -> Iterator[None]:
    tensors = [t for t in (layer.weight_dagger, layer.bias_dagger, layer.U, layer.c, layer.R) if t is not None]
    saved = [t.detach().clone() for t in tensors]
    try:
        yield
    except BaseException as reason:
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        torch.clear_autocast_cache()
        if isinstance(reason, LinAlgError):  # U or R, as the layer's dtype rounds them, are singular
            raise WhiteningError(f"its new coordinates cannot be inverted: {reason}") from reason
        raise


def _is_trained(layer: WhitenedLinear) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def mixed(seed: int, t: int) -> int:
    """A seed for iteration t that shares no stream with the user's own seed, whatever small numbers both are."""
    return (seed * 0x9E3779B97F4A7C15 + t * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
