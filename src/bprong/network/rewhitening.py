"""Algorithms 1 and 2 for the paper's network: re-whitens its layers on a schedule and moves the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.listener import uninterrupted
from bprong.capture.measure import record
from bprong.capture.request import Fisher, LayerMoments, Request
from bprong.capture.weights import weight_matrix_of
from bprong.checks import one_of
from bprong.likelihood.declared import ACCEPTED, Declaration, declared_loss
from bprong.likelihood.families import mixed, nontrivial
from bprong.linalg.factors import Damping
from bprong.linalg.moments import Moments
from bprong.linalg.roots import Root, RootSolver, root_of
from bprong.network.convert import whitened_layers
from bprong.network.coordinates import Holder, Transports, carried_with, carry_, holders_for
from bprong.parallel.processes import Ranks
from bprong.parallel.slices import unwrapped
from bprong.whitening.layer import Layer, Side, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.ranks import measured_by_all
from bprong.whitening.refresh import refresh, update
from bprong.whitening.schedule import Periods, Schedule


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
    forward_every, forward_offset, backward_every, backward_offset
                       the paper's τ₁, c₁, τ₂, c₂. By default backward_every is forward_every, and R is refreshed half
                       a period after t = 0
    forward_damping, backward_damping
                       ε of Ž and of D, or a `bprong.Damping`; by default 0.1 and 0.03
    solver             "eigh" (the paper's), "cholesky" (cheaper) or "symmetric"; only coordinate-wise optimizers such
                       as Adam can tell them apart
    average            0: each refresh uses its own batch; ρ > 0: a running average that keeps ρ at each new batch
    carry              how the state of other optimizers moves: {"momentum_buffer": "velocity", …}
    seed               of the targets that are drawn; by default torch's initial seed

    For a model whose layers are all forward-only, fisher and the options of the backward side have no effect.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], loss: Declaration | None = None, *,
        fisher: Fisher = "sampled",
        forward_every: int = 100, forward_offset: int = 0,
        backward_every: int | None = None, backward_offset: int | None = None,
        forward_damping: float | Damping = 0.1, backward_damping: float | Damping = 0.03,
        solver: RootSolver = "eigh", average: float = 0.0, carry: Transports | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._ranks = Ranks.of(model)
        self.model = unwrapped(model)
        self._holders = holders_for(optimizer, carry)
        one_of("solver", solver, get_args(RootSolver))
        layers = []
        for name, module in whitened_layers(self.model).items():
            layers.append(Layer(weight_matrix_of(name, module), solver, backward=module.R is not None))
        self._layers = Layers(layers)
        _check_parameters(layers, self._holders)
        periods = Periods(forward_every, forward_offset, backward_every, backward_offset)
        self._schedule = Schedule(self._layers, periods, fisher, average, seed)
        if loss is None and self._schedule.two_sided:
            raise TypeError(f"Rewhitening needs the loss that you minimise: {ACCEPTED}")
        self._likelihood = declared_loss(loss).likelihood
        self._damping = {"forward": Damping.of(forward_damping), "backward": Damping.of(backward_damping)}
        if any(damping.relative_to == "variance" for damping in self._damping.values()):
            raise ValueError(
                'a whitened network has no units of features: use a number, or a Damping relative to "mean"'
            )

    def step(self, x: Any, y: Tensor | None = None) -> list[Refresh]:
        """Do what is due at this iteration with batch x (and targets y, for the empirical Fisher matrix).

        x may also be the same sample of the training set at each iteration. An unfit batch or likelihood raises before
        anything is changed, and the iteration does not count.
        """
        with uninterrupted():
            is_due = self._schedule.is_due
            refreshed = self._rewhiten(x, y) if is_due else []
            self._schedule.t += 1
            if is_due:
                self._schedule.plan()
            return refreshed

    def _rewhiten(self, x: Any, y: Tensor | None) -> list[Refresh]:
        """Measure, and re-whiten the sides that are due; return those that were factored exactly."""
        for layer in self._layers.values():
            for parameter in layer.parameters:
                carried_with(parameter, self._holders, layer.name)  # which raises before anything is changed
        request = self._request()
        measured = self._measured(request, x, y)
        updated = update(self._layers, measured, self._schedule.average)
        for weight in request.weights:
            layer = self._layers[weight.name]
            for side in layer.sides:
                if side not in updated and side.name in self._schedule.refreshed:
                    layer.warn(
                        side, "no statistics reached it; is it used, and not detached, when the model is called?"
                    )
        refreshed: list[Refresh] = []
        refresh(
            updated, self._schedule, damping=lambda _, side: self._damping[side.name],
            take=partial(self._take, measured, refreshed),
        )  # fmt: skip
        return refreshed

    def _request(self) -> Request:
        """Return what to measure at this iteration."""
        schedule = self._schedule
        rank = self._ranks.rank
        trained = [layer.linear for layer in self._layers.values() if layer.linear.is_trained]
        return Request(
            weights={weight: weight.module.centred for weight in trained},
            inputs=schedule.measured["forward"],
            errors=schedule.measured["backward"],
            likelihood=self._likelihood if schedule.two_sided else None,
            fisher=schedule.fisher,
            seed=mixed(schedule.seed, rank) if rank else schedule.seed,
        )

    def _measured(self, request: Request, x: Any, y: Tensor | None) -> Mapping[str, LayerMoments]:
        """Measure the layers on the batches of all processes."""

        def measure() -> dict[str, LayerMoments]:
            counted = nontrivial(self._likelihood.not_ignored(y)) if isinstance(y, Tensor) else None
            return record(self.model, request, x, y, counted)

        if self._ranks.size == 1:
            return measure()
        return measured_by_all(self._ranks, self._schedule, request.weights, measure, self.model.parameters())

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
        """Change the coordinates of one side to those of new moments.

        It needs a root of the inverse, so it has no use for a factor.
        """
        if not self._schedule.average:
            side.moments = None  # nothing reads them again
        root = root_of(moments.second, damping, cast(RootSolver, side.solver))
        self._move(layer, side, root.matrix, moments.mean, measured[layer.name].probe)
        refreshed.append(Refresh(layer.name, side.name, root))

    def _move(self, layer: Layer, side: Side, *new: Any) -> None:
        """Change the coordinates of a layer by `rewhiten_`, and the state of the optimizers with them."""
        module = layer.linear.module
        carry_(self._holders, module, module.rewhiten_(side.name, *new))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on: tensors and plain values only."""
        averaged = self._layers.values() if self._schedule.average else ()
        return {
            "schedule": self._schedule.state_dict(),
            "layers": {layer.name: layer.state_dict() for layer in averaged},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Load the model and the optimizer by their own `load_state_dict` first: these refuse the state of another model.
        """
        self._schedule.load_state_dict(state["schedule"])
        for name, saved in state["layers"].items():
            self._layers[name].load_state_dict(saved)


def _check_parameters(layers: Sequence[Layer], holders: Iterable[Holder]) -> None:
    """Raise ValueError unless there are whitened layers and the optimizers hold their trained parameters."""
    if not layers:
        raise ValueError("the model has no whitened layer; call bprong.whiten_(model) first")
    held = {p for optimizer, _ in holders for group in optimizer.param_groups for p in group["params"]}
    for layer in layers:
        if any(parameter.requires_grad and parameter not in held for parameter in layer.parameters):
            raise ValueError(
                f"the optimizer does not hold the parameters of layer {layer.name!r}: it was built before whiten_, "
                f"which gives layers new parameters, or without them. Build it after whiten_; to leave a layer "
                f"untrained, set requires_grad_(False) on it"
            )
