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
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.batches import Batch
from bprong.capture.coverage import fallback_reasons
from bprong.capture.output import Head
from bprong.capture.passes import Batches
from bprong.capture.weights import COVERED, covered_weights
from bprong.checks import number, one_of, positive, takes_loss, unwrapped
from bprong.contexts import Uninterrupted, without_autocast
from bprong.errors import warn
from bprong.likelihood.loss import ACCEPTED, Declaration, declared_loss
from bprong.linalg.blocks import Limits
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.factors import Factor
from bprong.linalg.moments import Moments
from bprong.optim.advice import check_model, not_called, not_seen, warn_of_fallback, warn_of_untrained
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
from bprong.optim.rules import GivenDamping, Gradients, Group, NotFiniteError, StepRule
from bprong.optim.spectral import Spectral, SpectralDirection
from bprong.parallel.processes import ALIKE, Ranks
from bprong.parallel.slices import is_sharded, local, reshard, summed
from bprong.whitening.layer import PATIENCE, Layer
from bprong.whitening.layers import Layers
from bprong.whitening.refresh import Whitening
from bprong.whitening.schedule import Periods, Schedule
from bprong.whitening.side import SIDES, Side, SideName

StepKind = Literal["natural", "spectral"]
SPECTRAL_DAMPING: Mapping[SideName, float | Damping] = dict.fromkeys(SIDES, Damping(1.0, "mean"))  # docs/spectral.md
SPECTRAL_MOMENTUM = 0.9
MAX_STEP = 0.1  # of natural steps at a fixed lr; docs/spectral.md has the rates that were tried
LONG_GRADIENT = 2**14  # entries from which on a dot product is faster than a norm
MOST_FALLBACK = 0.01  # of Adam's learning rate where natural steps are bounded, as at lr="auto"


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
        wrapped = model
        model = unwrapped(wrapped, fully_sharded=True)
        self._ranks = Ranks.of(wrapped)
        self._sharded = is_sharded(model)
        if isinstance(lr, str) and lr != "auto":
            raise ValueError(f'lr must be a number or "auto", not {lr!r}')
        spectral = one_of("step", step, get_args(StepKind)) == "spectral"
        self._options = Options.of(options)
        if loss is None and (self._whitens_backward or lr == "auto"):
            raise TypeError(f"{type(self).__name__} needs the loss that you minimise: {ACCEPTED}")
        self._loss = declared_loss(loss)
        dampings = [Damping.of(value) for value in (forward_damping, backward_damping) if value is not None]
        if self._options.solver == "low-rank" and any(damping.relative_to == "variance" for damping in dampings):
            raise ValueError('solver="low-rank" needs damping that is equal in all directions, not "variance"')
        usual_momentum = SPECTRAL_MOMENTUM if spectral else 0.0
        defaults = {
            "lr": 1.0 if lr == "auto" else number("lr", lr, 0),
            "momentum": number("momentum", usual_momentum if momentum is None else momentum, 0, 1),
            "weight_decay": number("weight_decay", weight_decay, 0),
        }
        self._model = getattr(model, "_orig_mod", model)  # a compiled model is measured as it was written
        self._head = Head(self._options.output, self._loss.functions)
        self._rule = self._rule_of(lr == "auto", spectral, (forward_damping, backward_damping), max_step)
        self._whitening = self._whitening_of(every)
        self._batches = Batches(
            model, self._loss, self._head, self._whitening,
            self._rule.reads_every_batch, self._rule.reruns(0),
        )  # fmt: skip
        self._refused = 0
        self._loss_was_seen = False  # or what is to be said of it was said
        self._processes: int | None = None  # that made the steps so far
        self._started: float | None = None
        self._takes_all = params is None  # so that parameters without a group are worth a warning
        super().__init__([p for p in model.parameters() if p.requires_grad] if params is None else params, defaults)
        self._attend()

    def _rule_of(
        self,
        automatic: bool,
        spectral: bool,
        dampings: tuple[float | Damping | None, float | Damping | None],
        max_step: float | Literal["auto"] | None,
    ) -> StepRule:
        """The step rule; dampings: those of both sides, None where the default holds."""
        defaults = SPECTRAL_DAMPING if spectral else self._default_damping
        damping = {
            name: Damping.of(default if value is None else value)
            for (name, default), value in zip(defaults.items(), dampings, strict=True)
        }
        all_default = dampings == (None, None)
        if spectral and not automatic and max_step not in (None, "auto"):
            raise ValueError("max_step would have no effect: the length of spectral steps depends on lr alone")
        bound = MAX_STEP if self._whitens_backward and not (automatic or spectral) else None
        if isinstance(max_step, str) and max_step != "auto":
            raise ValueError(f'max_step must be a number above 0, "auto" or None, not {max_step!r}')
        if max_step != "auto":
            bound = None if max_step is None else positive("max_step", max_step)
        options = self._options
        direction = SpectralDirection(options.fallback(1.0), options.power) if spectral else None
        if automatic:
            likelihood = self._loss.likelihood
            fixed = spectral or not all_default
            return Automatic(
                self._model, likelihood, options, damping, fixed, bound, self._head, direction, self._ranks,
                self._loss.sums,
            )  # fmt: skip
        if direction is not None:
            return Spectral(GivenDamping(damping, few=all_default), direction)
        bounded_damping = GivenDamping(damping, few=all_default and bound is not None)
        return FixedRate(bounded_damping, bound, options.fallback(0.1), MOST_FALLBACK)

    def _whitening_of(self, every: int | Periods | None) -> Whitening:
        rule = self._rule
        settings = self._options.settings(every, self._whitens_backward, rule.early_steps, rule.early_parts)
        layers = self._layers()
        if not layers:
            raise ValueError(f"{type(self._model).__name__} has no layer that could be whitened; {COVERED}")
        schedule = Schedule(settings, layers)
        return Whitening(self._model, self._loss, layers, schedule, self._head, self._ranks)

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
            self._batches.observed.clear()  # given although nothing was due
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
                if not (checks or self._acceptable(gradients)):
                    return False
                self._rule.step_(replace(gradients, checked=False) if checks else gradients, whitening.layers)
            except NotFiniteError:
                if not self._acceptable(gradients):
                    return False
                self._rule.step_(gradients, whitening.layers)
        self._refused = 0
        whitening.seconds["step"] += time.perf_counter() - start
        return True

    def _observed_step(self, gradients: Gradients) -> None:
        """A step for which something is measured, or whose batches the rule needs."""
        self._batches.stop_watching()
        size = None
        if self._rule.reads_every_batch and self._ranks.size == 1 and gradients.values:
            size, factor = self._batches.scale.compare(gradients.values)
            gradients = replace(gradients, factor=factor)
        if not self._acceptable(gradients, size):
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
            measures = whitening.measures if shared else whitening.due or whitening.unused or whitening.recorded
            if measures:
                whitening.refresh(gradients.batches, self._rule.damping, _take)
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
            self._batches.forget()
            self._wait()

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
        if self._rule.reads_every_batch and self._batches.scale.is_comparable is None and not self._sharded:
            # Whoever averages gradients by hand does so after the norms were noted, which then differ between ranks.
            sizes = self._ranks.table(1, lambda: [self._batches.scale.size()])
            self._batches.scale.is_comparable = torch.allclose(sizes, sizes[:1], rtol=ALIKE)
        if self._rule.reads_every_batch:
            ranks = self._ranks if self._sharded else None
            gradients = replace(gradients, factor=self._batches.scale.factor(gradients.values, ranks))
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
        batches = self._batches.seen()
        due = self._whitening.due and not self._whitening.recorded
        reads = self._rule.reads_every_batch
        if not batches and (reads or due):
            raise TypeError(self._batches.unread) if self._batches.unread else RuntimeError(not_called(self._model))
        batches = [batch for batch in batches if batch.output is None or batch.output.numel()]  # without empty ones
        if (due or reads) and not self._loss_was_seen:
            self._check_loss(batches)
        shared = self._ranks.size > 1
        if due or self._loss.sums:  # a mean of nothing is not finite
            batches = [batch for batch in batches if batch.counts] or ([] if shared else batches)
        if any(batch.targets is None or batch.targets.total is None for batch in batches):
            # Without the call of the loss, a scale that is divided out again cannot be told from clipping.
            gradients = replace(gradients, factor=1.0)
        return replace(gradients, batches=batches)

    def _check_loss(self, batches: Sequence[Batch]) -> None:
        """If no call of the declared loss was seen: raises where its targets are needed, and otherwise warns, once."""
        unknown = any(batch.targets is None and batch.output is not None for batch in batches)
        reads = self._rule.reads_every_batch
        # At a fixed rate targets are not needed, and a mean of −log p may be computed by hand.
        expected = self._loss.functions if reads else self._loss.kind and not self._batches.observed
        if unknown and expected:
            message = not_seen(self._loss.name, self._batches.functions)
            if reads:
                raise RuntimeError(message)
            warn(message)
        self._loss_was_seen = True

    def _acceptable(self, gradients: Gradients, size: float | None = None) -> bool:
        """Whether gradients are finite and, at the first step, not all zero; size: the sum of their norms, if known."""
        values = list(gradients.values.values())
        if not values:
            return False
        if size is None:
            size = float(_size([local(g) for g in values] if self._sharded else values))
        if math.isfinite(summed(size, values) if self._sharded else size):
            self._refused = 0
            return gradients.t > 0 or summed(any(bool(local(g).any()) for g in values), values) > 0
        bad = [
            self._name_of(p) for p, g in gradients.values.items() if summed(float(not local(g).isfinite().all()), [g])
        ]
        if not bad:  # every number is finite, but the square of one overflows
            return True
        self._refused += 1
        message = f"step {gradients.t} refused: the gradient of {', '.join(bad)} is not finite"
        if self._refused >= PATIENCE:
            raise FloatingPointError(f"{message}, {PATIENCE} times in a row; lower the learning rate or check the data")
        # Two in a row are not one bad batch but a bad step.
        undone = self._refused == PATIENCE - 1 and self._rule.undo_(gradients)
        warn(f"{message}; {'the last update was undone' if undone else 'nothing was changed'}")
        return False

    def _fallback(self) -> dict[Tensor, str]:
        """The parameters that are not whitened, with the reason."""
        whitening = self._whitening
        reasons = fallback_reasons(self._model, [p for p in self._parameters if p not in whitening.covered])
        return reasons | {p: reason for p, reason in whitening.reasons.items() if p in reasons}

    def _forget(self) -> None:
        """After a step, whether it was made, undone or refused: forgets its batches, and prepares for the next."""
        self._batches.forget()
        self._whitening.recorded.clear()
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
        self._observes = whitening.due or bool(whitening.unused) or self._rule.reads_every_batch
        if self._rule.reads_every_batch:
            self._batches.keeps = self._rule.reruns(whitening.schedule.t)
        listener = self._batches.listener
        if listener.wanted != self._observes:
            listener.listen(self._observes)

    # Statistics -------------------------------------------------------------------------------------------------------

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Gives the batch to measure at the next step, instead of what the model was called with.

        For training in eval mode, for models that are called through a wrapper, and for fisher="empirical", which
        needs y.
        """
        self._batches.observe(x, y)

    def recording(self) -> AbstractContextManager[Callable[..., None]]:
        """For models that are not called as model(x): measures a forward pass of your own.

            with optimizer.recording() as record:
                output = model.head(model.body(x))
                record(output)

        If the loss ignores some targets, give them too: `record(output, y)`.
        """
        return self._whitening.recording()

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
    "_batches",
    "_head",
    "_loss",
    "_loss_was_seen",
    "_model",
    "_observes",
    "_options",
    "_processes",
    "_ranks",
    "_refused",
    "_rule",
    "_sharded",
    "_takes_all",
    "_whitening",
)


def _take(layer: Layer, side: Side, moments: Moments, damping: Damping, factor: Factor | None) -> None:
    """Puts a new factor into force."""
    layer.take(side, moments, factor or side.solve(moments, damping, layer.like))


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
