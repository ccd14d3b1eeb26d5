"""Algorithms 1 and 2 for the paper's network: re-whitens its layers on a schedule and moves the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.measure import record
from bprong.capture.request import Fisher, LayerMoments, Request
from bprong.capture.weights import weight_matrix_of
from bprong.checks import integer, number, one_of, pair, takes_loss, unwrapped
from bprong.contexts import Uninterrupted
from bprong.errors import LinAlgError, WhiteningError
from bprong.likelihood.families import nontrivial
from bprong.likelihood.loss import ACCEPTED, Declaration, declared_loss
from bprong.likelihood.random_numbers import mixed
from bprong.linalg.damped_inverse import Damping, Root, RootSolver, root_of
from bprong.linalg.moments import Moments
from bprong.network.continuous import Track, centred_rows
from bprong.network.convert import whitened_layers
from bprong.network.coordinates import Transports, carry_, check_state, holders_for
from bprong.network.layers import WhitenedLayer
from bprong.parallel.processes import Ranks
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers
from bprong.whitening.ranks import measured_by_all
from bprong.whitening.refresh import refresh, update
from bprong.whitening.schedule import Schedule, Settings
from bprong.whitening.side import Side, SideName

RefreshMode = Literal["periodic", "continuous"]

PROBE_ROWS = 8  # rows on which a relative step is checked; more would cost as much as the step itself


@dataclass(frozen=True)
class Refresh:
    """One side of one layer that was re-whitened, with its new U or R (`root.rank` is the rank of its statistics)."""

    layer: str
    side: SideName
    root: Root


class Rewhitening:
    """Re-whitens the layers of a model converted by `whiten_`, and moves the optimizer's state along.

    Call `step(x)` once per iteration, before the loss is computed; nothing happens unless a refresh is due. A refresh
    changes coordinates, never the function.

    model, optimizer   the whitened model and a torch optimizer of its parameters (SGD with or without momentum, Adam,
                       AdamW, NAdam, RAdam, RMSprop, Adagrad, Muon; for others see `carry`), or a list of several, such
                       as Muon for each W† and Adam for each b†
    loss               the loss that you minimise, as for `bprong.BPRONG`; one target is one row of the output's last
                       dimension. Not needed if all layers are forward-only
    fisher             the targets behind D: "sampled" from the model (default), "exact" (no sampling, but one backward
                       pass for each output of a target), or "empirical" (those of the data; then call `step(x, y)`)
    refresh            "periodic", as in the paper: an exact factorisation whenever one is due; "continuous": a relative
                       step from the batch (see `bprong.network.continuous`), with an exact factorisation, an anchor,
                       only at the start and when a side has drifted from white; `step` returns the anchors
    rate               μ of continuous whitening, 0.05 by default: each step keeps 1 − μ of the statistics before it
    forward_every, forward_offset, backward_every, backward_offset
                       the paper's τ₁, c₁, τ₂, c₂; by default R is refreshed half a period after t = 0; the default
                       period is 100, or 5 with refresh="continuous"
    forward_damping, backward_damping
                       ε of Ž and of D, or a `bprong.Damping`; by default 0.1 and 0.03
    solver             "eigh" (the paper's), "cholesky" (cheaper) or "symmetric"; only coordinate-wise optimizers such
                       as Adam can tell them apart
    samples            a held-out sample of the training set, x or (x, y), to measure instead of the batch for exact
                       factorisations (relative steps use the batch)
    average            0: each refresh uses its own batch; ρ > 0: a running average that keeps ρ at each new batch
    record_every       with `average`: also measure, without a refresh, every so many steps
    carry              how the state of other optimizers moves: {"momentum_buffer": "velocity", …}; for several
                       optimizers a list of these, with None for those that are known
    seed               of the targets that are drawn; by default torch's initial seed

    A model whose layers are all forward-only takes neither fisher nor the options of the backward side.
    """

    @takes_loss
    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], loss: Declaration | None = None, *,
        fisher: Fisher | None = None, refresh: RefreshMode = "periodic", rate: float | None = None,
        forward_every: int | None = None, forward_offset: int = 0,
        backward_every: int | None = None, backward_offset: int | None = None,
        forward_damping: float | Damping = 0.1, backward_damping: float | Damping | None = None,
        solver: RootSolver = "eigh", samples: Any = None, average: float = 0.0, record_every: int | None = None,
        carry: Transports | Sequence[Transports | None] | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._ranks = Ranks.of(model)
        self.model = model = unwrapped(model)
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else list(optimizer)
        self._modules = whitened_layers(model)
        self._holders = holders_for(self.optimizer, carry)
        _check_parameters(self._modules, [holder for holder, _ in self._holders])
        backward_options = {"fisher": fisher, "backward_every": backward_every, "backward_offset": backward_offset,
                            "backward_damping": backward_damping}  # fmt: skip
        two_sided = any(module.R is not None for module in self._modules.values())
        for name, value in backward_options.items():
            if value is not None and not two_sided:
                raise ValueError(
                    f"{name} would have no effect: all whitened layers are forward-only (backward=False); leave it out"
                )
        if loss is None and two_sided:
            raise TypeError(f"Rewhitening needs the loss that you minimise: {ACCEPTED}")
        self._likelihood = declared_loss(loss).likelihood
        self._samples = pair(samples)
        backward_damping = 0.03 if backward_damping is None else backward_damping
        self._damping = {"forward": Damping.of(forward_damping), "backward": Damping.of(backward_damping)}
        one_of("solver", solver, get_args(RootSolver))
        layers = []
        for name, module in self._modules.items():
            layers.append(Layer(weight_matrix_of(name, module), solver, backward=module.R is not None))
        self._layers = Layers(layers)
        self._mu = _mu_of(refresh, rate, average, self._layers)
        self._tracks: dict[Side, Track] = {}  # of the sides that are whitened continuously, once they have an anchor
        period = 5 if self._mu else 100
        settings = Settings.checked(
            forward=(period if forward_every is None else forward_every, forward_offset),
            backward=(period if backward_every is None else backward_every, backward_offset),
            fisher="sampled" if fisher is None else fisher,
            average=average,
            record_every=record_every,
            seed=None if seed is None else integer("seed", seed, 0),
        )
        self._schedule = Schedule(settings, self._layers)

    def step(self, x: Any = None, y: Tensor | None = None) -> list[Refresh]:
        """Do what is due at this iteration with batch x (and targets y, for the empirical Fisher matrix).

        An unfit batch or likelihood raises before anything is changed, and the iteration does not count.
        """
        with Uninterrupted():
            if self._mu and self._ranks.size > 1:
                raise ValueError('refresh="continuous" works in one process only; use refresh="periodic" in several')
            refreshed = self._rewhiten(x, y) if self._schedule.wanted else []
            self._schedule.t += 1
            return refreshed

    def _rewhiten(self, x: Any, y: Tensor | None) -> list[Refresh]:
        """Measure, and re-whiten the sides that are due; return those that were factored exactly."""
        check_state(self._holders, self._modules)
        trained = [layer for layer in self._layers.values() if any(p.requires_grad for p in layer.parameters)]
        names = self._schedule.due
        due = {side: layer for layer in trained for side in layer.sides if side.name in names}
        followed: set[Side] = set()  # sides that took a relative step and need no anchor
        if self._mu and x is not None and due.keys() & self._tracks.keys():
            rows = self._record(trained, x, y, rows=True)
            followed = {side for side, layer in due.items() if self._follow(layer, side, rows[layer.name])}
        if self._mu and len(followed) == len(due):
            return []
        measured = self._record(trained, *(self._samples or (x, y)))
        pending = update(self._layers, measured, self._schedule.settings.average)
        for side, layer in due.items():
            if side not in pending:
                layer.warn(side, "no statistics reached it; is it used, and not detached, when the model is called?")
        for side in followed:
            pending.pop(side, None)
        refreshed: list[Refresh] = []
        refresh(
            self._layers, pending, self._schedule, damping=lambda _, side: self._damping[side.name],
            take=partial(self._take, measured, refreshed),
        )  # fmt: skip
        return refreshed

    def _follow(self, layer: Layer, side: Side, measured: LayerMoments) -> bool:
        """Move one side by a relative step with the rows measured; return False, unchanged, if it needs an anchor.

        A batch that is not finite needs one too: the exact factorisation reports why it cannot be used.
        """
        moments = measured.z if side.of_inputs else measured.delta
        if side not in self._tracks or moments is None:
            return side in self._tracks  # a layer without rows waits for its next batch
        module = self._modules[layer.name]
        U = module.U if side.of_inputs else cast(Tensor, module.R)
        U = U.to(torch.promote_types(U.dtype, torch.float32))
        V = moments.values.to(U) / math.sqrt(moments.weight)
        mean = None
        if moments.mean is not None:
            V, mean = centred_rows(V, moments.mean.to(U), module.c.to(U), self._mu)
        try:
            T, track = self._tracks[side].step(U, V, self._mu, self._damping[side.name])
            self._move(module, side, T.times(U), mean, cast(Tensor, measured.probe)[:PROBE_ROWS], T)
        except (WhiteningError, LinAlgError):
            return False
        self._tracks[side] = track
        return True

    def _move(self, module: WhitenedLayer, side: Side, *new: Any) -> None:
        """Change the coordinates of a layer by `rewhiten_`, and the state of the optimizers with them."""
        carry_(self._holders, module, module.rewhiten_(side.name, *new))

    def _record(self, trained: list[Layer], x: Any, y: Tensor | None, rows: bool = False) -> Mapping[str, LayerMoments]:
        """Measure the layers on a batch; rows: keep the rows of z and δ themselves in their moments."""
        schedule = self._schedule
        centred = {layer.name: self._modules[layer.name].centred for layer in trained}

        def measure() -> Mapping[str, LayerMoments]:
            if x is None:
                raise ValueError("a refresh is due and there is nothing to measure: call step(x), or give samples=")
            rank = self._ranks.rank
            request = Request(
                weights={layer.linear: centred[layer.name] for layer in trained},
                inputs=schedule.measured("forward"),
                errors=schedule.measured("backward"),
                likelihood=self._likelihood if schedule.two_sided else None,
                fisher=schedule.settings.fisher,
                seed=mixed(schedule.seed, rank) if rank else schedule.seed,
                rows=rows,
            )
            counted = nontrivial(self._likelihood.not_ignored(y)) if isinstance(y, Tensor) else None
            return record(self.model, request, x, y, counted)

        return measured_by_all(self._ranks, self._layers, schedule, centred, measure, self.model.parameters)

    def _take(
        self,
        measured: Mapping[str, LayerMoments],
        refreshed: list[Refresh],
        layer: Layer,
        side: Side,
        moments: Moments,
        damping: Damping,
        factor: object,
    ) -> None:
        """Change the coordinates of one side to those of new moments, and move the optimizer's state along.

        It needs a root of the inverse, so it has no use for a factor.
        """
        root = root_of(moments.second, damping, cast(RootSolver, side.solver))
        self._move(self._modules[layer.name], side, root.matrix, moments.mean, measured[layer.name].probe)
        if self._mu:
            self._tracks[side] = Track()
        if not self._schedule.settings.average:
            side.moments = None  # nothing reads them again
        refreshed.append(Refresh(layer.name, side.name, root))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on: tensors and plain values only."""
        layers = {}
        tracks = {}
        for name, layer in self._layers.items():
            layers[name] = layer.state_dict()
            tracks[name] = {side.name: asdict(self._tracks[side]) for side in layer.sides if side in self._tracks}
        return {"schedule": self._schedule.state_dict(), "layers": layers, "tracks": tracks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; load the model and the optimizer by their own `load_state_dict`."""
        if not {"schedule", "layers", "tracks"} <= set(state):
            raise ValueError(f"the state of a Rewhitening has schedule, layers and tracks; this has {sorted(state)}")
        if set(state["layers"]) != set(self._layers):
            raise ValueError(f"the state has layers {sorted(state['layers'])}; this model has {sorted(self._layers)}")
        tracks = {}  # a side that is not among them is anchored first
        for name, layer in self._layers.items():  # check everything before changing anything
            layer.check_state(state["layers"][name])
            for side in layer.sides:
                if side.name in state["tracks"][name]:
                    tracks[side] = Track(**state["tracks"][name][side.name])
        self._schedule.load_state_dict(state["schedule"])
        for name, layer in self._layers.items():
            layer.load_state_dict(state["layers"][name])
        self._tracks = tracks


def _mu_of(refresh: RefreshMode, rate: float | None, average: float, layers: Layers) -> float:
    """Return μ of continuous whitening, for which sides must be single blocks; 0 for periodic refreshes."""
    if one_of("refresh", refresh, get_args(RefreshMode)) == "periodic":
        if rate is not None:
            raise ValueError('rate has no effect with refresh="periodic": leave it out, or give refresh="continuous"')
        return 0.0
    if average:
        raise ValueError(f'refresh="continuous" averages by its rate: leave average at 0, not {average:g}')
    for layer in layers.values():
        for side in layer.sides:
            if side.blocks.lead:
                raise ValueError(
                    f"layer {layer.name!r}: its {side.name} side is whitened as {side.blocks}, and only a side of one "
                    f'block can be whitened continuously; use refresh="periodic", or whiten_ with a larger max_dim'
                )
    return number("rate", 0.05 if rate is None else rate, 1e-6, 1)


def _check_parameters(layers: Mapping[str, WhitenedLayer], optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError unless there are whitened layers and the optimizers hold their trained parameters."""
    if not layers:
        raise ValueError("the model has no whitened layer; call bprong.whiten_(model) first")
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, layer in layers.items():
        if any(parameter.requires_grad and id(parameter) not in held for parameter in layer.parameters()):
            raise ValueError(
                f"the optimizer does not hold the parameters of layer {name!r}: it was built before whiten_, which "
                f"gives layers new parameters, or without them. Build it after whiten_; to leave a layer untrained, "
                f"set requires_grad_(False) on it"
            )
