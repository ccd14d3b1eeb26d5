"""Algorithms 1 and 2 for the paper's network: its layers re-whitened on a schedule, optimizer state and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.carry import Rules, carry_, check_state, rules_for
from bprong.checks import check_continuous, check_parameters, number, one_of, pair, refuse_distributed
from bprong.convert import whitened_layers
from bprong.coordinates import Change
from bprong.errors import Fisher
from bprong.layers import WhitenedLayer
from bprong.likelihood import Likelihood, likelihood_of, some
from bprong.moments import wide, widened
from bprong.recording import Measured, record
from bprong.schedule import SIDES, Schedule, Settings, Side
from bprong.tracking import Rows, Track
from bprong.whitening import Damping, Factorisation, LinAlgError, Whitener, WhiteningError, whitener

__all__ = ["Mode", "Refresh", "Rewhitening"]

Mode = Literal["periodic", "continuous"]
PROBED = 8  # rows on which a continuous step is checked: more would cost as much as the step itself


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
    refresh            "periodic", the paper's: an exact factorisation whenever one is due; "continuous": a relative
                       step from the batch given (`bprong.continuous`), and an exact factorisation, an anchor, only at
                       the start and where a side has drifted from white; `step` returns the anchors
    rate               μ of continuous whitening: each step keeps 1 − μ of what came before
    forward_every, forward_offset, backward_every, backward_offset
                       the paper's τ₁, c₁, τ₂, c₂; by default back-whitening falls half way between two of its own
                       refreshes; 100, continuous: 5
    forward_damping, backward_damping
                       ε of Ž and of D, or a `bprong.Damping`
    factorisation      "eigh" (the paper's), "cholesky" (cheaper) or "symmetric"; only coordinate-wise optimizers such
                       as Adam can tell them apart
    samples            a held sample of the training set, x or (x, y), to measure instead of the batch given, for exact
                       factorisations (relative steps take the batch)
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
        refresh: Mode = "periodic",
        rate: float = 0.05,
        forward_every: int | None = None,
        forward_offset: int = 0,
        backward_every: int | None = None,
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
        self._factorisation = one_of("factorisation", factorisation, get_args(Factorisation))
        self._samples = pair(samples)
        self._rules = rules_for(optimizer, carry)
        self._continuous = one_of("refresh", refresh, get_args(Mode)) == "continuous"
        self._rate, self._tracks = number("rate", rate, 1e-6, 1), dict[tuple[str, Side], Track]()
        if self._continuous:
            check_continuous(self._layers, average)
        usual = 5 if self._continuous else 100
        settings = Settings.of(
            forward_every=usual if forward_every is None else forward_every, forward_offset=forward_offset,
            backward_every=usual if backward_every is None else backward_every, backward_offset=backward_offset,
            forward_damping=forward_damping, backward_damping=backward_damping,
            fisher=fisher, average=average, record_every=record_every, seed=seed,
        )  # fmt: skip
        two_sided = any(layer.R is not None for layer in self._layers.values())
        self._schedule = Schedule(settings, SIDES if two_sided else ("forward",))

    def step(self, x: Any = None, y: Tensor | None = None) -> list[Refresh]:
        """Does what is due at this iteration with batch x (and targets y, for the empirical Fisher matrix).

        An unfit batch or likelihood raises before anything is changed, and the iteration does not count.
        """
        refreshed: list[Refresh | None] = []
        if self._schedule.wanted:
            check_state(self.optimizer, self._rules, self._layers)
            sides = [(n, side) for side in self._schedule.due for n in self._layers]
            anchors = self._move(x, y, sides) if self._continuous else sides
            measured = self._measure(x, y) if anchors or not self._continuous else {}
            refreshed = [self._refresh(name, side, measured[name]) for name, side in anchors]
        self._schedule.t += 1
        return [done for done in refreshed if done is not None]

    def _move(self, x: Any, y: Tensor | None, sides: list[tuple[str, Side]]) -> list[tuple[str, Side]]:
        """Moves what is due by a relative step; returns what needs an exact factorisation instead."""
        fresh = [key for key in sides if key not in self._tracks]
        if x is None or len(fresh) == len(sides):
            return sides
        rows = self._record(x, y, rows=True)
        return [key for key in sides if key in fresh or not self._moved(*key, rows[key[0]])]

    def _moved(self, name: str, side: Side, measured: Measured) -> bool:
        layer = self._layers[name]
        matrix = layer.U if side == "forward" else layer.R
        found = measured.z_rows if side == "forward" else measured.delta_rows
        if matrix is None or not _is_trained(layer) or not found or measured.probe is None:
            return True  # nothing to move, or nothing to move it by: an idle layer waits for its next batch
        precision = torch.promote_types(matrix.dtype, torch.float32)
        values = torch.cat(found).to(precision)
        centred = side == "forward" and layer.centred
        if (side == "forward" and not centred and bool(layer.c.any())) or not torch.isfinite(values).all():
            return False  # an anchor alone can take c back to zero, and says why a batch is unfit
        rows = Rows(values, 1.0 if side == "forward" else len(values) / measured.targets)
        try:
            step = self._tracks[name, side].step(
                matrix.to(precision), layer.c.to(precision) if centred else None, rows, self._rate,
                self._schedule.settings.damping[side],
            )  # fmt: skip
            if step is None:
                return False
            T, c = step
            move = partial(layer.step_forward_, T, c) if side == "forward" else partial(layer.step_backward_, T)
            change = _kept_(layer, measured.probe[:PROBED], move)
        except (WhiteningError, LinAlgError):
            return False
        carry_(self.optimizer, self._rules, layer, change)
        return True

    def _measure(self, x: Any, y: Tensor | None) -> dict[str, Measured]:
        if self._samples is not None:
            x, y = self._samples
        measured = self._record(x, y)
        self._schedule.average_(measured)
        return measured

    def _record(self, x: Any, y: Tensor | None, rows: bool = False) -> dict[str, Measured]:
        if x is None:
            raise ValueError("a refresh is due and there is nothing to measure: call step(x), or give samples=")
        schedule = self._schedule
        counted = some(self._likelihood.left_in(y)) if isinstance(y, Tensor) else None
        return record(
            self.model, {name: (layer, layer.centred) for name, layer in self._layers.items()}, x, y,
            likelihood=self._likelihood if "backward" in schedule.sides else None, fisher=schedule.settings.fisher,
            inputs="forward" in schedule.wanted, errors="backward" in schedule.wanted,
            rows=rows, counted=counted, seed=schedule.seed,
        )  # fmt: skip

    def _refresh(self, name: str, side: Side, measured: Measured) -> Refresh | None:
        layer, schedule = self._layers[name], self._schedule
        moments = measured.z if side == "forward" else measured.delta
        if (side == "backward" and layer.R is None) or not _is_trained(layer):
            return None
        if moments is None or measured.probe is None:
            schedule.warn(
                name, side, "no statistics reached it; is it used, and not detached, when the model is called?"
            )
            return None
        try:
            found = whitener(moments.second, schedule.settings.damping[side], self._factorisation)
            change = _rewhiten_(layer, side, found, moments.mean, measured.probe)
        except WhiteningError as reason:
            schedule.failed(name, side, reason)
            return None
        carry_(self.optimizer, self._rules, layer, change)
        schedule.succeeded(name, side)
        if self._continuous:
            self._tracks.setdefault((name, side), Track()).anchor(found.second)
        return Refresh(name, side, found)

    def state_dict(self) -> dict[str, Any]:
        """Everything that shapes what comes next: tensors and plain values only."""
        tracks = {f"{side}:{name}": track.state_dict() for (name, side), track in self._tracks.items()}
        return self._schedule.state_dict() | ({"tracks": tracks} if self._continuous else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the model and the optimizer are loaded by their own."""
        devices = {name: widened(layer.c).device for name, layer in self._layers.items()}
        self._schedule.load_state_dict(state, devices)
        saved = state.get("tracks", {})
        keys = [(name, side) for name in self._layers for side in SIDES if f"{side}:{name}" in saved]
        self._tracks = {(name, side): Track.of(saved[f"{side}:{name}"], devices[name]) for name, side in keys}


def _rewhiten_(layer: WhitenedLayer, side: Side, found: Whitener, mean: Tensor | None, probe: Tensor) -> Change:
    """Changes the layer's coordinates to those of a new whitener."""
    if side == "backward":
        return _kept_(layer, probe, lambda: layer.rewhiten_backward_(found.matrix))
    c = torch.zeros_like(layer.c) if mean is None else mean
    return _kept_(layer, probe, lambda: layer.rewhiten_forward_(found.matrix, c))


def _kept_(layer: WhitenedLayer, probe: Tensor, move: Callable[[], Change]) -> Change:
    """Makes a change of coordinates, and takes it back if it moved the layer's outputs on the probe."""
    with torch.no_grad(), _restored_on_error(layer):
        before = layer(probe)
        if not torch.isfinite(before).all():
            raise WhiteningError("its outputs on this batch are not finite")
        change = move()
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
def _restored_on_error(layer: WhitenedLayer) -> Iterator[None]:
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


def _is_trained(layer: WhitenedLayer) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())
