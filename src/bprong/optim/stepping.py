"""How an optimizer makes a step: observe → whiten → steps.

When statistics are due, they are measured in the pass that the user makes: its calls of the weights are recorded, and
sampled errors are sent back through its graph when its backward pass begins. Other steps carry no per-layer hooks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.coverage import fallback_reasons
from bprong.capture.listener import uninterrupted, without_autocast
from bprong.capture.measure import Meter, timed
from bprong.capture.recorder import Recorder
from bprong.errors import warn
from bprong.likelihood.loss import Loss
from bprong.optim.auto.race import Race
from bprong.optim.averaging import AveragedWeights
from bprong.optim.checkpoint import KEY
from bprong.optim.options import Options
from bprong.optim.rules import Gradients, Group, NotFiniteError, StepRule, read
from bprong.parallel.processes import Ranks, local, summed
from bprong.parallel.slices import reshard, unwrapped
from bprong.whitening.layer import PATIENCE
from bprong.whitening.refresh import SEEN_IN_PART, Whitening

FALLBACK_LIMIT = 0.5  # of the trained numbers: if more follow the fallback rule, the user is told


class SteppingOptimizer(Optimizer):
    """An optimizer that measures, whitens and steps. A subclass makes its parts and keeps their state.

    _model:      as it was written, also if it is compiled
    _race:       finds out which steps serve better; None: the user has chosen
    _averages:   of the weights; None: nobody has asked for them
    _observes:   whether the calls of the model are observed until the next step
    _takes_all:  whether parameters without a group are worth a warning
    _started:    when the first step was made
    _refused:    how many steps were refused in a row

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
    _race: Race | None = None
    _averages: AveragedWeights | None = None
    _refused: int = 0
    _observes: bool
    _takes_all: bool
    _started: float | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step with the gradients in `.grad`; returns the loss of the closure, if one is given.

        Gradients that are not finite are refused with a warning and nothing changes; several in a row raise an error.
        On a fresh optimizer, gradients that are all zero create the states of the parameters, as distributed
        checkpoints ask for, and do not count as a step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        with uninterrupted(), torch.no_grad():  # in this order: an interrupt never leaves gradients switched off
            self._step()
        return loss

    def _step(self) -> None:
        """One step, which an interrupt cannot leave half made."""
        if self._ranks.before is None:
            unwrapped(self._model, self._ranks.sharded)  # it may have been sharded since the optimizer was made
        if self._ranks.sharded:
            reshard(self._model)
        whitening = self._whitening
        if self._make(self._gradients()) and not (whitening.due or whitening.unused):
            whitening.due = whitening.schedule.t == whitening.schedule.next  # as planned: nothing was measured
        else:
            whitening.attend()
        if self._race and self._race.rival:
            self._race.rival.note_leader()
        self._forget()

    def _make(self, gradients: Gradients) -> bool:
        """Whether a step was made; False: it was refused, or the last one was undone."""
        rule = self._rule
        whitening = self._whitening
        if self._observes:
            self._recorder.stop_watching()
            self._ranks.check()
        if not gradients.values:
            return False
        if gradients.checked and not self._accepts(gradients):
            return False
        if self._observes and not self._take_batches(gradients):
            return False
        if rule.undo_if_blown_up_(gradients):
            return False
        with without_autocast(next(iter(gradients.values)).device.type):
            if self._observes:
                self._measure(gradients)
            start = time.perf_counter()
            if self._averages is not None:
                self._averages.add(self._parameters)
            winner = None
            if self._race is not None and gradients.t >= self._race.next:
                winner = self._race.winner(rule, gradients, whitening.layers)
            if winner is None:
                try:
                    rule.step_(gradients, whitening.layers)
                except NotFiniteError:
                    gradients.checked = True
                    return self._make(gradients)
            else:
                self._rule = winner  # which goes on from the weights that it has led to
                whitening.schedule.restart(gradients.t + 1)
                if self._averages is not None:
                    self._averages.restart()
        self._refused = 0
        whitening.seconds["step"] += time.perf_counter() - start
        whitening.schedule.t += 1
        return True

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
        is_sharded = self._ranks.sharded
        checks = self._rule.checks and self._averages is None  # weights are added before a rule checks
        return Gradients(
            values, groups, self.state, schedule.t, schedule.base_seed,
            noted=self._whitening.due, sliced=is_sharded,
            checked=self._observes or is_sharded or not checks or schedule.t == 0,
        )  # fmt: skip

    def _accepts(self, gradients: Gradients) -> bool:
        """Whether gradients are finite and, at the first step, not all zero."""
        slices = list(gradients.values.values())
        if gradients.sliced:
            slices = list(map(local, slices))
        if self._rule.reads_every_batch:
            size, gradients.factor = self._recorder.scale.compare(gradients.values, self._ranks)
        else:
            size = sum(read(torch._foreach_norm(slices)))
        if not math.isfinite(gradients.summed(size)) and self._refuses(gradients):
            return False
        self._refused = 0
        if gradients.t > 0 or gradients.summed(any(bool(g.any()) for g in slices)):
            return True
        prepare(gradients, self._rule, self._whitening)
        return False

    def _refuses(self, gradients: Gradients) -> bool:
        """Warns of gradients that are not finite or, after several in a row, raises an error; False: they all are."""
        wrong = [p for p, g in gradients.values.items() if summed(not local(g).isfinite().all(), [g])]
        if not wrong:  # every number is finite, but the square of one overflows
            return False
        self._refused += 1
        names = ", ".join(name_in(self._model, p) for p in wrong)
        message = f"step {gradients.t} refused: the gradient of {names} is not finite"
        if self._refused >= PATIENCE:
            raise FloatingPointError(f"{message}, {PATIENCE} times in a row; lower the learning rate or check the data")
        # Two in a row are not one bad batch but a bad step.
        is_undone = self._refused == PATIENCE - 1 and self._rule.undo_(gradients)
        warn(f"{message}; {'the last update was undone' if is_undone else 'nothing was changed'}")
        return True

    def _take_batches(self, gradients: Gradients) -> bool:
        """Gives the gradients the batches behind them; False: the rule needs one, and no process has any."""
        is_due = self._whitening.due and not self._meter.recorded
        with self._ranks.exchange(1) as rows:  # of several processes one alone may find an error
            batches = self._recorder.take(
                needed=is_due or self._rule.reads_every_batch,
                counting=is_due or self._loss.sums,
                shared=self._ranks.size > 1,
            )
            rows.append([len(batches)])
        gradients.batches = batches
        if any(batch.targets is None or math.isnan(batch.targets.total) for batch in batches):
            # Without the call of the loss, a scale that is divided out again cannot be told from clipping.
            gradients.factor = 1.0
        return not self._rule.reads_every_batch or any(row[0] for row in rows)

    def _measure(self, gradients: Gradients) -> None:
        """Measures and refreshes what is due, and warns of what is not whitened."""
        whitening = self._whitening
        if self._started is None:  # what was measured in the first backward pass counts too
            self._started = time.perf_counter() - sum(whitening.seconds.values())
        if whitening.due or (whitening.unused and whitening.measures):
            request = whitening.request()
            with timed(whitening.seconds, "statistics"), self._ranks.whole(self._model) as parameters:
                moments = partial(self._meter.moments, gradients.batches, request, parameters)
                measured = whitening.measured(request, moments)
            whitening.refresh(measured, self._rule.damping)
        if gradients.t == 0:
            warn_of_fallback(self._parameters, self._fallback_reasons())
        if gradients.noted and self._takes_all:
            self._takes_all = not warn_of_untrained(self._model, whitening.given)

    def _forget(self) -> None:
        """After a step, whether it was made, undone or refused: forgets its batches, and listens for the next."""
        if self._observes:
            self._recorder.forget()
        self._meter.recorded.clear()
        self._listen()

    def _listen(self) -> None:
        """Observes the calls of the model until the next step, if that needs them."""
        whitening = self._whitening
        self._recorder.measures = whitening.due or bool(whitening.unused)
        self._observes = self._recorder.measures or self._rule.reads_every_batch
        if self._rule.reads_every_batch:
            t = whitening.schedule.t
            self._recorder.keeps = self._rule.reruns(t) or (self._race is not None and t >= self._race.next)
        listener = self._recorder.listener
        if listener.wanted != self._observes:
            listener.listen(self._observes)

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _fallback_reasons(self) -> dict[Tensor, str]:
        """The parameters that are not whitened, with the reason."""
        whitening = self._whitening
        covered = whitening.layers.parameters
        uncovered = [p for p in self._parameters if p not in covered]
        return fallback_reasons(self._model, uncovered) | whitening.reasons

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: torch's own state and ours, without batches."""
        ours = {name: getattr(self, name) for name in SteppingOptimizer.__annotations__}
        return super().__getstate__() | ours | {"_started": None}


def prepare(gradients: Gradients, rule: StepRule, whitening: Whitening) -> None:
    """Creates the states of the parameters, which distributed checkpoints ask for before they load them.

    gradients: all zero
    """
    whitening.share()
    groups = {p: group | {"lr": 0.0} for p, group in gradients.groups.items()}
    rule.prepare(replace(gradients, groups=groups, noted=False), whitening.layers)
    for p in gradients.values:
        state = gradients.states[p]
        for key in state.keys() - {KEY}:
            state[key] = state[key] * 0  # steps are counted there
        state[KEY] = {}


def name_in(model: nn.Module, parameter: Tensor) -> str:
    """The name of a parameter in a model."""
    names = (name for name, p in model.named_parameters() if p is parameter)
    return next(names, "a parameter outside the model")


def warn_of_fallback(parameters: Sequence[Tensor], reasons: Mapping[Tensor, str]) -> None:
    """Warns if most of the numbers that are trained are not whitened, apart from layers that were warned about.

    reasons: why parameters are not whitened
    """
    counts: Counter[str] = Counter()
    for p in parameters:
        if p.requires_grad:
            counts[reasons.get(p, "")] += p.numel()
    trained = counts.total()
    del counts[""], counts[SEEN_IN_PART]
    fraction = counts.total() / max(1, trained)
    if fraction > FALLBACK_LIMIT:
        warn(
            f"{fraction:.0%} of the trained numbers follow the fallback rule (Adam) and are not whitened, most of "
            f"them {', '.join(reason for reason, _ in counts.most_common(3))}. Layers that compute what a layer "
            f"of torch's does can be whitened: see bprong.register, and bprong.coverage(model) for each parameter"
        )


def warn_of_untrained(model: nn.Module, trained: set[Tensor]) -> bool:
    """Warns if parameters have gradients, but the optimizer does not train them; returns whether there are any."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and p not in trained]
    if names:
        warn(
            f"{', '.join(names[:3])}{' and others' * (len(names) > 3)} have gradients, but are not trained: they "
            f"were frozen, or not there yet, when the optimizer was made. Use optimizer.add_param_group, or make "
            f"the optimizer with params=model.parameters(). If another optimizer trains them, choose with params="
        )
    return bool(names)
