"""How an optimizer makes a step: observe → whiten → steps.

When statistics are due, they are measured in the pass that the user makes: its calls of the weights are recorded, and
sampled errors are sent back through its graph when its backward pass begins. Other steps carry no per-layer hooks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.batches import Batch
from bprong.capture.coverage import fallback_reasons
from bprong.capture.measure import Meter
from bprong.capture.recorder import Recorder
from bprong.checks import unwrapped
from bprong.contexts import Uninterrupted, timed, without_autocast
from bprong.errors import warn
from bprong.likelihood.loss import Loss
from bprong.linalg.factors import Damping, Factor
from bprong.linalg.moments import Moments
from bprong.optim.advice import warn_of_fallback, warn_of_untrained
from bprong.optim.checkpoint import KEY
from bprong.optim.options import Options
from bprong.optim.rules import Gradients, Group, NotFiniteError, StepRule
from bprong.parallel.processes import ALIKE, Ranks
from bprong.parallel.slices import local, reshard, summed, whole
from bprong.whitening.layer import PATIENCE, Layer, Side
from bprong.whitening.ranks import measured_by_all
from bprong.whitening.refresh import Whitening

LONG_GRADIENT = 2**14  # entries from which on a dot product is faster than a norm


class SteppingOptimizer(Optimizer):
    """An optimizer that measures, whitens and steps. A subclass makes its parts and keeps their state.

    _model:      as it was written, also if it is compiled
    _sharded:    whether each process has slices of all parameters
    _observes:   whether the calls of the model are observed until the next step
    _takes_all:  whether parameters without a group are worth a warning
    _started:    when the first step was made

    Copies and pickles contain these attributes, and none that is not declared here.
    """

    _model: nn.Module
    _loss: Loss
    _options: Options
    _ranks: Ranks
    _rule: StepRule
    _whitening: Whitening
    _meter: Meter
    _recorder: Recorder
    _refusal: Refusal
    _sharded: bool
    _observes: bool
    _takes_all: bool
    _started: float | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step with the gradients in `.grad`; returns the loss of the closure, if one is given.

        Gradients that are not finite are refused with a warning and nothing changes; several in a row raise an error.
        On a fresh optimizer, gradients that are all zero create the states of the parameters, as distributed
        checkpoints ask for, and do not count as a step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        with Uninterrupted():
            self._step()
        return loss

    def _step(self) -> None:
        """One step, which an interrupt cannot leave half made."""
        if self._ranks.before is None:
            unwrapped(self._model, self._sharded)  # it may have been sharded since the optimizer was made
        if self._sharded:
            reshard(self._model)
        gradients = self._gradients()
        if self._observes:
            self._observed_step(gradients)
        elif self._plain_step(gradients):
            self._whitening.schedule.t += 1
            self._recorder.reader.observed.clear()  # given although nothing was due
            self._wait()
        else:
            self._forget()

    def _plain_step(self, gradients: Gradients) -> bool:
        """A step for which nothing is measured; False: it was refused."""
        start = time.perf_counter()
        if not gradients.values or (self._rule.undoes and self._rule.undo_if_blown_up_(gradients)):
            return False
        with without_autocast(next(iter(gradients.values)).device.type):
            try:
                checks = self._rule.checks and not self._sharded
                if not (checks or self._accepts(gradients)):
                    return False
                gradients.checked = not checks
                self._rule.step_(gradients, self._whitening.layers)
            except NotFiniteError:
                if not self._accepts(gradients):
                    return False
                gradients.checked = True
                self._rule.step_(gradients, self._whitening.layers)
        self._refusal.count = 0
        self._whitening.seconds["step"] += time.perf_counter() - start
        return True

    def _observed_step(self, gradients: Gradients) -> None:
        """A step for which something is measured, or whose batches the rule needs."""
        self._recorder.stop_watching()
        size = None
        if self._rule.reads_every_batch and self._ranks.size == 1 and gradients.values:
            size, gradients.factor = self._recorder.scale.compare(gradients.values)
        if not self._accepts(gradients, size):
            if gradients.t == 0:
                self._rule.prepare(gradients, self._whitening.layers)
                for p in gradients.values:
                    self.state[p].setdefault(KEY, {})  # where distributed checkpoints expect something to be loaded
            self._forget()
            return
        self._ranks.check()
        self._take_batches(gradients)
        if self._rule.undo_if_blown_up_(gradients) or (self._rule.reads_every_batch and not gradients.any_batch):
            self._forget()
            return
        start = time.perf_counter()
        if self._started is None:
            self._started = start - sum(self._whitening.seconds.values())  # measured in the first backward pass
        whitening = self._whitening
        with without_autocast(next(iter(gradients.values)).device.type):
            shared = self._ranks.size > 1
            measures = whitening.measures if shared else whitening.due or whitening.unused or self._meter.recorded
            if measures:
                self._refresh(gradients.batches)
                start = time.perf_counter()
            if gradients.t == 0:
                warn_of_fallback(self._parameters, fallback_of(self._model, self._parameters, self._whitening))
            if gradients.noted and self._takes_all:
                self._takes_all = not warn_of_untrained(self._model, set(self._parameters))
            self._rule.step_(gradients, whitening.layers)
        whitening.seconds["step"] += time.perf_counter() - start
        whitening.schedule.t += 1
        if measures:
            self._forget()
        else:
            self._recorder.forget()
            self._wait()

    def _refresh(self, batches: Sequence[Batch]) -> None:
        """Refreshes the factors that are due, from the moments of these batches."""
        whitening = self._whitening
        whitening.share()
        request = whitening.request()
        centred = {weight.name: centre for weight, centre in request.weights.items()}
        with timed(whitening.seconds, "statistics"), whole(self._model) as parameters:
            measured = measured_by_all(
                self._ranks, whitening.layers, whitening.schedule, centred,
                partial(self._meter.moments, batches, request, parameters), whitening.gradients,
            )  # fmt: skip
        whitening.refresh(measured, self._rule.damping, _take)

    def _gradients(self) -> Gradients:
        groups: dict[Tensor, Group] = {}
        values: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise TypeError("sparse gradients are not supported; use sparse=False in the embedding")
                groups[p] = group
                values[p] = gradient
        schedule = self._whitening.schedule
        return Gradients(values, groups, self.state, schedule.t, schedule.base_seed, self._whitening.due, self._sharded)

    def _take_batches(self, gradients: Gradients) -> None:
        """Gives the gradients the batches behind them, and whether any process has one."""
        if self._ranks.size == 1:
            gradients.batches = self._batches()
            gradients.any_batch = bool(gradients.batches)
        else:
            self._take_batches_of_all(gradients)
        if any(batch.targets is None or batch.targets.total is None for batch in gradients.batches):
            # Without the call of the loss, a scale that is divided out again cannot be told from clipping.
            gradients.factor = 1.0

    def _take_batches_of_all(self, gradients: Gradients) -> None:
        """The same in several processes, of which one alone may find an error."""
        scale = self._recorder.scale
        if self._rule.reads_every_batch:
            if scale.is_comparable is None and not self._sharded:
                # Who averages gradients by hand does so after the norms were noted, which then differ between ranks.
                sizes = self._ranks.table(1, lambda: [scale.size()])
                scale.is_comparable = torch.allclose(sizes, sizes[:1], rtol=ALIKE)
            gradients.factor = scale.factor(gradients.values, self._ranks if self._sharded else None)
        batches: list[Batch] = []

        def count_batches() -> list[float]:
            batches.extend(self._batches())
            return [float(bool(batches))]

        gradients.any_batch = self._ranks.sums(1, count_batches)[0] > 0
        gradients.batches = batches

    def _batches(self) -> list[Batch]:
        """The batches of this process since the last step."""
        is_due = self._whitening.due and not self._meter.recorded
        return self._recorder.take(
            needed=is_due or self._rule.reads_every_batch,
            counting=is_due or self._loss.sums,
            shared=self._ranks.size > 1,
        )

    def _accepts(self, gradients: Gradients, size: float | None = None) -> bool:
        return self._refusal.accepts(gradients, self._model, self._rule.undo_, size)

    def _forget(self) -> None:
        """After a step, whether it was made, undone or refused: forgets its batches, and prepares for the next."""
        self._recorder.forget()
        self._meter.recorded.clear()
        self._whitening.attend()
        self._listen()

    def _wait(self) -> None:
        """After a step that has measured nothing, so that the next one that does is known."""
        self._whitening.due = self._whitening.schedule.t == self._whitening.next_due
        self._listen()

    def _listen(self) -> None:
        """Observes the calls of the model until the next step, if that needs them."""
        whitening = self._whitening
        self._recorder.measures = whitening.due or bool(whitening.unused)
        self._observes = self._recorder.measures or self._rule.reads_every_batch
        if self._rule.reads_every_batch:
            self._recorder.keeps = self._rule.reruns(whitening.schedule.t)
        listener = self._recorder.listener
        if listener.wanted != self._observes:
            listener.listen(self._observes)

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: torch's own state and ours, without batches."""
        ours = {name: getattr(self, name) for name in SteppingOptimizer.__annotations__}
        return super().__getstate__() | ours | {"_started": None}


def name_in(model: nn.Module, parameter: Tensor) -> str:
    """The name of a parameter in a model."""
    names = (name for name, p in model.named_parameters() if p is parameter)
    return next(names, "a parameter outside the model")


def fallback_of(model: nn.Module, parameters: Sequence[Tensor], whitening: Whitening) -> dict[Tensor, str]:
    """The parameters that are not whitened, with the reason."""
    reasons = fallback_reasons(model, [p for p in parameters if p not in whitening.covered])
    return reasons | {p: reason for p, reason in whitening.reasons.items() if p in reasons}


def _take(layer: Layer, side: Side, moments: Moments, damping: Damping, factor: Factor | None) -> None:
    """Puts a new factor into force."""
    layer.take(side, moments, factor or side.solve(moments, damping, layer.like))


# Gradients that are not finite ----------------------------------------------------------------------------------------


class Refusal:
    """Refuses gradients that are not finite: with a warning, and after several in a row with an error.

    count: how many were refused in a row
    """

    def __init__(self) -> None:
        self.count = 0

    def accepts(
        self,
        gradients: Gradients,
        model: nn.Module,
        undo_: Callable[[Gradients], bool],
        size: float | None = None,
    ) -> bool:
        """Whether gradients are finite and, at the first step, not all zero.

        model:   whose parameters they belong to
        undo_:   undoes the last update; True if there was one
        size:    the sum of their norms, if known
        """
        values = list(gradients.values.values())
        if not values:
            return False
        slices = [local(g) for g in values] if gradients.sliced else values
        if size is None:
            size = float(_size(slices))
        if math.isfinite(summed(size, values) if gradients.sliced else size):
            self.count = 0
            return gradients.t > 0 or summed(any(bool(g.any()) for g in slices), values) > 0
        names = []
        for p, g in gradients.values.items():
            if summed(float(not local(g).isfinite().all()), [g]):
                names.append(name_in(model, p))
        if not names:  # every number is finite, but the square of one overflows
            return True
        self.count += 1
        message = f"step {gradients.t} refused: the gradient of {', '.join(names)} is not finite"
        if self.count >= PATIENCE:
            raise FloatingPointError(f"{message}, {PATIENCE} times in a row; lower the learning rate or check the data")
        # Two in a row are not one bad batch but a bad step.
        is_undone = self.count == PATIENCE - 1 and undo_(gradients)
        warn(f"{message}; {'the last update was undone' if is_undone else 'nothing was changed'}")
        return False


def _size(gradients: list[Tensor]) -> Tensor:
    """A number that is finite if all gradients are, unless it overflows: squared norms of long ones, else norms."""
    sizes = []
    others = []
    for g in gradients:
        if g.numel() > LONG_GRADIENT and g.is_contiguous() and not g.is_complex():
            flat = g.view(-1)
            sizes.append(torch.dot(flat, flat))
        else:
            others.append(g)
    sizes += torch._foreach_norm(others) if others else []
    device = gradients[0].device
    return torch.stack([size.to(device, torch.float32) for size in sizes]).sum()
