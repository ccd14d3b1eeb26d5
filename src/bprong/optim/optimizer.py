"""BPRONG and PRONG for unmodified models: the paper's trajectory as an ordinary torch optimizer.

When statistics are due, they are measured in the pass that the user makes: its calls of the weights are recorded, and
sampled errors are sent back through its graph when its backward pass begins. Other steps carry no per-layer hooks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.batches import Batch
from bprong.capture.coverage import fallback_reasons
from bprong.capture.meter import Meter
from bprong.capture.output import Head
from bprong.capture.recorder import Recorder
from bprong.capture.weights import COVERED, covered_weights
from bprong.checks import number, one_of, takes_loss, unwrapped
from bprong.contexts import Uninterrupted, timed, without_autocast
from bprong.errors import warn
from bprong.likelihood.loss import ACCEPTED, Declaration, declared_loss
from bprong.linalg.blocks import Limits
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.factors import Factor
from bprong.linalg.moments import Moments
from bprong.optim.advice import check_model, warn_of_fallback, warn_of_untrained
from bprong.optim.auto.step import Automatic
from bprong.optim.checkpoint import (
    KEY,
    check_demoted,
    exchanged_layers,
    packed,
    unpacked,
    with_entries,
    without_entries,
)
from bprong.optim.fixed_rate import FixedRate
from bprong.optim.options import Options
from bprong.optim.report import Report, layer_row
from bprong.optim.rules import Gradients, Group, NotFiniteError, Setup, StepRule
from bprong.optim.spectral import Spectral
from bprong.parallel.processes import ALIKE, Ranks
from bprong.parallel.slices import is_sharded, local, reshard, summed, whole
from bprong.whitening.layer import PATIENCE, Layer
from bprong.whitening.layers import Layers
from bprong.whitening.ranks import measured_by_all
from bprong.whitening.refresh import Whitening
from bprong.whitening.schedule import Periods, Schedule
from bprong.whitening.side import Side, SideName

StepKind = Literal["natural", "spectral"]
LONG_GRADIENT = 2**14  # entries from which on a dot product is faster than a norm


class BPRONG(Optimizer):
    """Natural-gradient descent by bidirectional whitening, for any model and an unchanged training loop.

        ΔW = −η (D+ε₂)⁻¹ (g_W − g_b cᵀ) (Ž+ε₁)⁻¹,   Δb = −η (D+ε₂)⁻¹ g_b − ΔW c

    for every linear layer, convolution, attention projection, embedding and recurrent cell, which is SGD in the
    coordinates of Fujimoto & Ohira's Algorithm 2. Other parameters, and tied ones, follow Adam's rule.
    Use `bprong.coverage(model)` to preview how each parameter is handled and `report()` to inspect it during training.

    model             the module that is called in training; its batches are kept until the step
    loss              the loss that you minimise: a torch loss module or function (nn.CrossEntropyLoss(…), nn.NLLLoss,
                      nn.BCEWithLogitsLoss, nn.MSELoss; F.cross_entropy, …), its name ("cross_entropy", "nll",
                      "bce_with_logits", "mse"), or a `bprong.Likelihood` of your own. A module is best: its calls show
                      the targets. "categorical", "bernoulli" and "gaussian" stand for the mean of −log p over targets
    lr                "auto": no learning rate; the step minimises a quadratic model of the loss (docs/auto.md), and the
                      group's lr, which is 1, multiplies it. A number: the paper's step at this learning rate, with the
                      gradient of your loss as it is, as for SGD
    params            parameters or parameter groups; by default all parameters of the model that are trainable now. If
                      you unfreeze others later, give model.parameters(), or use add_param_group then
    step              "natural": the paper's step. "spectral": Muon's step in whitened coordinates; lr and weight_decay
                      are then as for AdamW, since each weight's step has a root mean square of 0.2 lr
    momentum          as for SGD; a velocity in ordinary coordinates. Spectral steps average gradients instead, as Muon
                      does. None: 0, and 0.9 for spectral steps
    weight_decay      decoupled, on ordinary weights: p ← (1 − lr · weight_decay) p; lr="auto": a penalty beside −log p
    forward_damping, backward_damping
                      ε₁ of Ž and ε₂ of D: numbers, or `bprong.Damping`; docs/sweep.md has the sweep behind the
                      defaults. lr="auto" chooses them along with the step unless they are given
    every             steps between refreshes of the statistics; None: refresh what has drifted, in a tenth of run time.
                      `bprong.optim.Periods` has a period for each side
    max_step          a bound on the length √(dᵀFd) of each step d of the whitened parameters, momentum included; Adam's
                      learning rate for other parameters is then at most 0.01. "auto": 0.1 for BPRONG's natural steps
                      at a fixed lr, which makes them safe at any lr; the default damping is then raised where few
                      observations are behind the statistics. A lowered lr lowers the bound. None: the paper's literal
                      steps
    options           a `bprong.optim.Options` or a mapping with its fields: among them `output`, if the model returns
                      more than one tensor, and `fisher`, `solver` and `max_dim`

    Classification. The model returns logits:

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> criterion = nn.CrossEntropyLoss()
    >>> optimizer = BPRONG(model, criterion)
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     criterion(model(x), y).backward()
    ...     optimizer.step()

    Regression, at a fixed learning rate:

    >>> optimizer = BPRONG(model, nn.MSELoss(), lr=0.01)

    Several labels for each example, of which rare ones count more. The model returns one logit for each label:

    >>> optimizer = BPRONG(model, nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 5.0, 20.0])))
    """

    _whitens_backward = True
    _default_damping: Mapping[SideName, float | Damping] = {"forward": 0.2, "backward": 0.015}  # docs/sweep.md

    @takes_loss
    def __init__(
        self,
        model: nn.Module,
        loss: Declaration | None = None,
        lr: float | Literal["auto"] = "auto",
        *,
        step: StepKind = "natural",
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        forward_damping: float | Damping | None = None,
        backward_damping: float | Damping | None = None,
        every: int | Periods | None = None,
        max_step: float | Literal["auto"] | None = "auto",
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        check_model(model, type(self).__name__)
        if isinstance(lr, str) and lr != "auto":
            raise ValueError(f'lr must be a number or "auto", not {lr!r}')
        if loss is None and (self._whitens_backward or lr == "auto"):
            raise TypeError(f"{type(self).__name__} needs the loss that you minimise: {ACCEPTED}")
        spectral = one_of("step", step, get_args(StepKind)) == "spectral"
        wrapped = model
        model = unwrapped(wrapped, fully_sharded=True)
        self._ranks = Ranks.of(wrapped)
        self._sharded = is_sharded(model)
        self._options = Options.of(options)
        self._loss = declared_loss(loss)
        self._model = getattr(model, "_orig_mod", model)  # a compiled model is measured as it was written
        self._head = Head(self._options.output, self._loss.functions)
        dampings: dict[SideName, float | Damping | None] = {"forward": forward_damping, "backward": backward_damping}
        setup = Setup(
            self._model, self._loss, self._head, self._options, dampings, self._default_damping, max_step,
            self._whitens_backward, self._ranks,
        )  # fmt: skip
        self._rule: StepRule
        if lr == "auto":
            self._rule = Automatic.of(setup, spectral)
        else:
            self._rule = (Spectral if spectral else FixedRate).of(setup)
        defaults = {
            "lr": 1.0 if lr == "auto" else number("lr", lr, 0),
            "momentum": number("momentum", self._rule.momentum if momentum is None else momentum, 0, 1),
            "weight_decay": number("weight_decay", weight_decay, 0),
        }
        self._whitening = self._whitening_of(every)
        self._meter = Meter(self._model, self._loss, self._head, self._whitening, self._whitening.seconds, self._ranks)
        self._recorder = Recorder(
            model, self._loss, self._head, self._meter,
            self._rule.reads_every_batch, self._rule.reruns(0),
        )  # fmt: skip
        self._refusal = Refusal()
        self._processes: int | None = None  # that made the steps so far
        self._started: float | None = None
        self._takes_all = params is None  # so that parameters without a group are worth a warning
        super().__init__([p for p in model.parameters() if p.requires_grad] if params is None else params, defaults)
        self._attend()

    def _whitening_of(self, every: int | Periods | None) -> Whitening:
        rule = self._rule
        settings = self._options.settings(every, self._whitens_backward, rule.early_steps, rule.early_parts)
        layers = self._layers()
        if not layers:
            raise ValueError(f"{type(self._model).__name__} has no layer that could be whitened; {COVERED}")
        schedule = Schedule(settings, layers)
        return Whitening(self._loss.likelihood, layers, schedule, self._ranks, self._sharded)

    def _layers(self) -> Layers:
        """All layers of the model that can be whitened."""
        weights = covered_weights(self._model, Limits(self._options.max_dim))
        return Layers(Layer(weight, self._options.solver, backward=self._whitens_backward) for weight in weights)

    # A step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step with the gradients in `.grad`; returns the loss of the closure, if one is given.

        Gradients that are not finite are refused with a warning and nothing changes; several in a row raise an error.
        On a fresh optimizer, gradients that are all zero create the states of the parameters, as distributed
        checkpoints ask for, and do not count as a step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with Uninterrupted():
            self._step()
        return loss

    def _step(self) -> None:
        """One step, which an interrupt cannot leave half made."""
        if self._processes is None:
            unwrapped(self._model, self._sharded)  # it may have been sharded since the optimizer was made
        if self._sharded:
            reshard(self._model)
        gradients = self._gradients()
        if self._observes:
            self._observed_step(gradients)
        elif self._plain_step(gradients):
            self._whitening.schedule.t += 1
            self._recorder.observed.clear()  # given although nothing was due
            self._wait()
        else:
            self._forget()

    def _plain_step(self, gradients: Gradients) -> bool:
        """A step for which nothing is measured; False: it was refused."""
        whitening = self._whitening
        start = time.perf_counter()
        undoes = type(self._rule).undo_if_blown_up_ is not StepRule.undo_if_blown_up_
        if not gradients.values or (undoes and self._rule.undo_if_blown_up_(gradients)):
            return False
        with without_autocast(next(iter(gradients.values)).device.type):
            try:
                checks = self._rule.checks and not self._sharded
                if not (checks or self._accepts(gradients)):
                    return False
                self._rule.step_(replace(gradients, checked=False) if checks else gradients, whitening.layers)
            except NotFiniteError:
                if not self._accepts(gradients):
                    return False
                self._rule.step_(gradients, whitening.layers)
        self._refusal.count = 0
        whitening.seconds["step"] += time.perf_counter() - start
        return True

    def _observed_step(self, gradients: Gradients) -> None:
        """A step for which something is measured, or whose batches the rule needs."""
        self._recorder.stop_watching()
        size = None
        if self._rule.reads_every_batch and self._ranks.size == 1 and gradients.values:
            size, factor = self._recorder.scale.compare(gradients.values)
            gradients = replace(gradients, factor=factor)
        if not self._accepts(gradients, size):
            if gradients.t == 0:
                self._rule.prepare(gradients, self._whitening.layers)
                for p in gradients.values:
                    self.state[p].setdefault(KEY, {})  # where distributed checkpoints expect something to be loaded
            self._forget()
            return
        self._check_processes()
        gradients = self._with_batches_of_all(gradients)
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
                warn_of_fallback(self._parameters, self._fallback())
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
        with timed(whitening.seconds, "statistics"), whole(self._model) as parameters:
            measured = measured_by_all(
                self._ranks, whitening.layers, whitening.schedule, request.centred,
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

    def _check_processes(self) -> None:
        """Raises RuntimeError if training goes on with another number of processes: their states would differ."""
        size = self._ranks.size
        self._ranks.check()
        if self._processes is not None and size != self._processes:
            raise RuntimeError(
                f"the first steps were made by {self._processes} processes, and this one by {size}. Start "
                f"torch.distributed before the first step, or load a checkpoint into a new optimizer"
            )
        self._processes = size

    def _with_batches_of_all(self, gradients: Gradients) -> Gradients:
        """The gradients with the batches of this rank, and whether any rank has one."""
        if self._ranks.size == 1:
            with_batches = self._with_batches(gradients)
            return replace(with_batches, any_batch=bool(with_batches.batches))
        if self._rule.reads_every_batch and self._recorder.scale.is_comparable is None and not self._sharded:
            # Whoever averages gradients by hand does so after the norms were noted, which then differ between ranks.
            sizes = self._ranks.table(1, lambda: [self._recorder.scale.size()])
            self._recorder.scale.is_comparable = torch.allclose(sizes, sizes[:1], rtol=ALIKE)
        if self._rule.reads_every_batch:
            ranks = self._ranks if self._sharded else None
            gradients = replace(gradients, factor=self._recorder.scale.factor(gradients.values, ranks))
        if not (self._whitening.measures or self._rule.communicates(gradients)):
            return replace(self._with_batches(gradients), any_batch=True)
        with_batches = gradients

        def count_batches() -> list[float]:
            nonlocal with_batches
            with_batches = self._with_batches(gradients)
            return [float(bool(with_batches.batches))]

        any_batch = self._ranks.sums(1, count_batches)[0] > 0
        return replace(with_batches, any_batch=any_batch)

    def _with_batches(self, gradients: Gradients) -> Gradients:
        """The gradients with the batches behind them, if these are needed for this step."""
        is_due = self._whitening.due and not self._meter.recorded
        batches = self._recorder.take(
            needed=is_due or self._rule.reads_every_batch,
            counting=is_due or self._loss.sums,
            shared=self._ranks.size > 1,
        )
        if any(batch.targets is None or batch.targets.total is None for batch in batches):
            # Without the call of the loss, a scale that is divided out again cannot be told from clipping.
            gradients = replace(gradients, factor=1.0)
        return replace(gradients, batches=batches)

    def _accepts(self, gradients: Gradients, size: float | None = None) -> bool:
        return self._refusal.accepts(gradients, self._name_of, self._rule.undo_, size)

    def _fallback(self) -> dict[Tensor, str]:
        """The parameters that are not whitened, with the reason."""
        whitening = self._whitening
        reasons = fallback_reasons(self._model, [p for p in self._parameters if p not in whitening.covered])
        return reasons | {p: reason for p, reason in whitening.reasons.items() if p in reasons}

    def _forget(self) -> None:
        """After a step, whether it was made, undone or refused: forgets its batches, and prepares for the next."""
        self._recorder.forget()
        self._meter.recorded.clear()
        self._attend()

    def _wait(self) -> None:
        """After a step that has measured nothing, so that the next one that does is known."""
        self._whitening.due = self._whitening.schedule.t == self._whitening.next_due
        self._listen()

    def _attend(self) -> None:
        """Finds out whether the next step will measure."""
        self._whitening.attend()
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

    # Statistics -------------------------------------------------------------------------------------------------------

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Gives the batch to measure at the next step, instead of what the model was called with.

        For training in eval mode, for models that are called through a wrapper, and for fisher="empirical", which
        needs y.
        """
        self._recorder.observe(x, y)

    def recording(self) -> AbstractContextManager[Callable[..., None]]:
        """For models that are not called as model(x): measures a forward pass of your own.

            with optimizer.recording() as record:
                output = model.head(model.body(x))
                record(output)

        If the loss ignores some targets, give them too: `record(output, y)`.
        """
        return self._meter.recording()

    def report(self) -> Report:
        """The state of each layer, the parameters that are not whitened, the shares of time, and the step rule."""
        whitening = self._whitening
        total = math.inf if self._started is None else time.perf_counter() - self._started
        t = whitening.schedule.t
        fallback = {self._name_of(p): reason for p, reason in self._fallback().items()}
        rows = [layer_row(layer, t, self._rule.damping) for layer in whitening.layers.values()]
        shares = {purpose: seconds / total for purpose, seconds in whitening.seconds.items()}
        return Report(t, rows, fallback, shares, self._rule.report())

    # The contract of torch.optim --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """As for every optimizer; its numbers are checked."""
        group = self.defaults | dict(param_group)
        for key, below in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            number(key, group[key], 0, below)
        self._rule.check_group(group)
        super().add_param_group(param_group)
        self._whitening.given = set(self._parameters)
        self._recorder.trained = self._whitening.given
        if "_observes" in vars(self):  # not while the optimizer is made
            self._whitening.cover(self._layers())
            self._listen()

    def state_dict(self) -> dict[str, Any]:
        """torch's own state, in which each parameter has an entry of ours (`optim.checkpoint`)."""
        parameters = self._parameters
        layers = self._all_layers()
        whitening = self._whitening
        rule = self._rule.state_dict(parameters)
        entries = packed(parameters, layers, whitening.demoted, whitening.schedule.state_dict(), rule, self._kinds)
        if whitening.layers.sharding is not None:
            entries = exchanged_layers(entries, parameters, layers, whitening.layers.sharding)
        return with_entries(super().state_dict(), entries)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues bit for bit where `state_dict` was taken; the state of another model is refused."""
        parameters = self._parameters
        layers = self._all_layers()
        entries, others = without_entries(state_dict)
        whitening, rule = unpacked(parameters, layers, entries, self._kinds)
        self._whitening.check_state(whitening)
        check_demoted(parameters, layers, whitening["demoted"], others)
        super().load_state_dict(others)
        self._rule.load_state_dict(rule, parameters)
        self._whitening.load_state_dict(whitening)
        self._processes = None  # a checkpoint may have been made by another number of processes
        self._forget()

    @property
    def _kinds(self) -> tuple[str, str]:
        """What a state is refused by, if it is that of another optimizer."""
        return type(self).__name__, self._rule.kind

    def _all_layers(self) -> list[Layer]:
        """All layers that could be whitened: those that are, and those that were left to the fallback rule."""
        demoted = self._layers().values() if self._whitening.demoted else ()
        return [*self._whitening.layers.values(), *(one for one in demoted if one.name in self._whitening.demoted)]

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name_of(self, parameter: Tensor) -> str:
        names = (name for name, p in self._model.named_parameters() if p is parameter)
        return next(names, "a parameter outside the model")

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: torch's own state and ours, without batches."""
        state = {key: value for key, value in self.__dict__.items() if key in _OWN}
        return super().__getstate__() | state | {"_started": None}


_OWN = (
    "_recorder",
    "_head",
    "_loss",
    "_meter",
    "_model",
    "_observes",
    "_options",
    "_processes",
    "_ranks",
    "_refusal",
    "_rule",
    "_sharded",
    "_takes_all",
    "_whitening",
)


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
        name_of: Callable[[Tensor], str],
        undo_: Callable[[Gradients], bool],
        size: float | None = None,
    ) -> bool:
        """Whether gradients are finite and, at the first step, not all zero.

        name_of: the name of a parameter
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
                names.append(name_of(p))
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
