"""BPRONG and PRONG for unmodified models, as ordinary torch optimizers: arguments, the choice of a step rule, state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.measure import Meter
from bprong.capture.recorder import Recorder
from bprong.capture.tape import Head
from bprong.capture.weights import COVERED, covered_weights
from bprong.checks import number, one_of
from bprong.errors import warn
from bprong.likelihood.declared import ACCEPTED, Declaration, declared_loss
from bprong.linalg.factors import Damping
from bprong.linalg.moments import Limits
from bprong.optim.auto.race import Race
from bprong.optim.auto.step import Automatic, NaturalDirections
from bprong.optim.averaging import AveragedWeights
from bprong.optim.checkpoint import AVERAGES, check_demoted, packed, unpacked, with_entries, without_entries
from bprong.optim.factory import factory
from bprong.optim.fixed_rate import SMALL_RATE, FixedRate
from bprong.optim.options import Options, Setup
from bprong.optim.report import RECENT, Report, layer_row
from bprong.optim.rules import Group
from bprong.optim.spectral import Spectral, SpectralDirections
from bprong.optim.stepping import SteppingOptimizer, name_in
from bprong.parallel.processes import Ranks
from bprong.parallel.slices import unwrapped
from bprong.whitening.layer import Layer, SideName
from bprong.whitening.layers import Layers
from bprong.whitening.refresh import Whitening
from bprong.whitening.schedule import Periods

StepKind = Literal["auto", "natural", "spectral"]


class BPRONG(SteppingOptimizer):
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
    lr                "auto": no learning rate; the step minimises a quadratic model of the loss (docs/auto.md). Of the
                      learning rates that groups have, or that schedulers or you write, only ratios count then. A
                      number: the paper's step at this learning rate, with the gradient of your loss as it is, as for
                      SGD
    params            parameters or parameter groups; by default all parameters of the model that are trainable now. If
                      you unfreeze others later, give model.parameters(), or use add_param_group then
    step              "natural": the paper's step. "spectral": Muon's step in whitened coordinates; lr and weight_decay
                      are then as for AdamW, since each weight's step has a root mean square of 0.2 lr. "auto": natural
                      steps at a given lr; without one both are tried side by side at first, and the better ones go on
                      (docs/races.md)
    momentum          as for SGD; a velocity in ordinary coordinates. Spectral steps average gradients instead, as Muon
                      does. None: 0, and 0.9 for spectral steps
    weight_decay      as for AdamW, on ordinary weights: p ← (1 − lr · weight_decay) p; lr="auto": as at an lr of 0.001
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

    >>> import torch
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

    def __init__(
        self,
        model: nn.Module,
        loss: Declaration | None = None,
        lr: float | Literal["auto"] = "auto",
        *,
        step: StepKind = "auto",
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        forward_damping: float | Damping | None = None,
        backward_damping: float | Damping | None = None,
        every: int | Periods | None = None,
        max_step: float | Literal["auto"] | None = "auto",
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"{name} needs the model itself, not a {type(model).__name__}: give it the model and the loss, not "
                f"model.parameters(). Use params= to select parameters. For a framework that makes the optimizer "
                f"itself, give it {name}.factory(model, loss) in place of an optimizer's class"
            )
        if isinstance(lr, str) and lr != "auto":
            raise ValueError(f'lr must be a number or "auto", not {lr!r}')
        if loss is None and (self._whitens_backward or lr == "auto"):
            raise TypeError(f"{name} needs the loss that you minimise: {ACCEPTED}")
        wrapped = model
        model = unwrapped(wrapped, fully_sharded=True)
        self._ranks = Ranks.of(wrapped)
        self._options = Options.of(options)
        self._loss = declared_loss(loss)
        self._model = getattr(model, "_orig_mod", model)  # a compiled model is measured as it was written
        head = Head(self._options.output, self._loss.functions)
        dampings: dict[SideName, float | Damping] = {}
        if forward_damping is not None:
            dampings["forward"] = forward_damping
        if backward_damping is not None:
            dampings["backward"] = backward_damping
        setup = Setup(
            self._model, self._loss, head, self._options, dampings, max_step, self._whitens_backward, self._ranks
        )  # fmt: skip
        is_spectral = one_of("step", step, get_args(StepKind)) == "spectral"
        if lr == "auto":
            if step == "auto":
                self._race = Race.of(setup)
                is_spectral = self._race is None
            self._rule = Automatic(setup, SpectralDirections if is_spectral else NaturalDirections)
        else:
            self._rule = Spectral(setup) if is_spectral else FixedRate(setup)
        defaults = {
            "lr": 1.0 if lr == "auto" else lr,
            "momentum": self._rule.momentum if momentum is None else momentum,
            "weight_decay": weight_decay,
        }
        is_small = lr != "auto" and 0 < lr < SMALL_RATE
        if is_small and isinstance(self._rule, FixedRate) and self._rule.checks and not self._loss.sums:
            warn(f"lr={lr:g} is small for natural steps: try 0.01 to 0.1, or leave out lr for steps that need none")
        self._whitening = self._whitening_of(every)
        self._meter = Meter(
            self._model, self._loss, head, self._whitening.request, self._whitening.seconds, self._ranks
        )
        self._recorder = Recorder(model, self._meter, self._rule.reads_every_batch, self._rule.reruns(0))
        self._takes_all = params is None  # so that parameters without a group are worth a warning
        super().__init__([p for p in model.parameters() if p.requires_grad] if params is None else params, defaults)
        self._listen()

    @classmethod
    def factory(
        cls, model: nn.Module | type[nn.Module], loss: Declaration | None = None, **arguments: Any
    ) -> type[Optimizer]:
        """A class for frameworks that make the optimizer themselves: `Class(params, **settings)`, as torch's.

            Learner(…, opt_func=partial(OptimWrapper, opt=BPRONG.factory(model, criterion)))    # fastai
            DQN(…, policy_kwargs={"optimizer_class": PRONG.factory(QNetwork)})                  # Stable-Baselines3

        model      the module that is called in training; or its class, if the framework makes or copies the model: the
                   module that has the parameters is then looked for
        loss, arguments
                   as for the optimizer, but for `params`

        A learning rate that the framework fills in is that of the parameter groups: without an lr among the arguments
        of BPRONG.factory only its ratios count. A parameter that is not the model's is an error.
        """
        return factory(cls, model, loss, arguments)

    def _whitening_of(self, every: int | Periods | None) -> Whitening:
        layers = self._layers()
        if not layers:
            raise ValueError(f"{type(self._model).__name__} has no layer that could be whitened; {COVERED}")
        schedule = self._options.schedule(layers, every, self._whitens_backward, self._rule)
        return Whitening(self._loss.likelihood, layers, schedule, self._ranks)

    def _layers(self) -> Layers:
        """All layers of the model that can be whitened."""
        weights = covered_weights(self._model, Limits(self._options.max_dim))
        return Layers(Layer(weight, self._options.solver, backward=self._whitens_backward) for weight in weights)

    # Statistics -------------------------------------------------------------------------------------------------------

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """Gives the batch to measure at the next step, instead of what the model was called with.

        For training in eval mode, for models that are called through a wrapper, and for fisher="empirical", which
        needs y.
        """
        if self._observes:
            self._recorder.observed.append((x, y))

    def recording(self) -> AbstractContextManager[Callable[..., None]]:
        """For models that are not called as model(x): measures a forward pass of your own.

            with optimizer.recording() as record:
                output = model.head(model.body(x))
                record(output)

        If the loss ignores some targets, give them too: `record(output, y)`.
        """
        return self._meter.recording()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has the average of its weights over the run, for evaluation.

            with optimizer.averaged():
                evaluate(model)

        The first call begins the average, so call it once before training. Later steps count more in it
        (`optim.averaging`). It is a part of `state_dict`: call this before `load_state_dict` too. If spectral steps win
        a race (docs/races.md), the average begins again with the weights that they have led to.
        """
        if self._averages is None:
            self._averages = AveragedWeights(self._model)
            t = self._whitening.schedule.t
            if t:
                warn(f"averaging begins after {t} steps: call optimizer.averaged() before training or load_state_dict")
        return self._averages.in_the_model(self)

    def report(self) -> Report:
        """The state of each layer, the parameters that are not whitened, the shares of time, and the step rule."""
        whitening = self._whitening
        total = math.inf if self._started is None else time.perf_counter() - self._started
        t = whitening.schedule.t
        reasons = {name_in(self._model, p): reason for p, reason in self._fallback_reasons().items()}
        rows = [layer_row(layer, t, self._rule.damping) for layer in whitening.layers.values()]
        shares = {purpose: seconds / total for purpose, seconds in whitening.seconds.items()}
        undone = sum(t - step < RECENT for step in self._rule.undone_at)
        return Report(t, rows, reasons, shares, self._rule.report(), self._race.history if self._race else (), undone)

    # The contract of torch.optim --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self._rule}, loss: {self._loss.name}", 1)

    def add_param_group(self, param_group: Group) -> None:
        """As for every optimizer; its numbers are checked."""
        group = self.defaults | dict(param_group)
        for key, below in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            group[key] = number(key, group[key], 0, below)
        (self._race or self._rule).check_group(group)
        super().add_param_group(group)
        self._whitening.given = set(self._parameters)
        self._recorder.trained = self._whitening.given
        if "_observes" in vars(self):  # not while the optimizer is made
            self._whitening.cover(self._layers())
            self._listen()

    def state_dict(self) -> dict[str, Any]:
        """torch's own state, in which each parameter has an entry of ours (`optim.checkpoint`)."""
        entries = packed(type(self).__name__, self._parameters, self._whitening, self._rule)
        if self._averages is not None:
            entries[0][AVERAGES] = self._averages.state_dict(self._parameters)
        state = with_entries(super().state_dict(), entries)
        return state if self._race is None else state | {"race": self._race.state_dict(self._parameters)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues bit for bit where `state_dict` was taken; the state of another model is refused."""
        parameters = self._parameters
        whitening = self._whitening
        entries, others = without_entries(state_dict)
        if self._race is not None and "race" in state_dict:
            self._rule = self._race.load_state_dict(state_dict["race"], parameters, whitening.layers)
        schedule, rule, layers = unpacked(type(self).__name__, parameters, whitening, self._rule, entries)
        check_demoted(
            [layer for layer in whitening.layers.values() if layers.get(layer.name) == {}], parameters, others
        )
        super().load_state_dict(others)
        self._rule.load_state_dict(rule, parameters)
        whitening.load_state_dict(schedule, layers)
        if self._averages is not None:
            self._averages.load_state_dict(entries[0].get(AVERAGES, {}), parameters)
        self._ranks.before = None  # a checkpoint may have been made by another number of processes
        self._forget()


class PRONG(BPRONG):
    """Natural-gradient descent by forward whitening alone (Desjardins et al., 2015; Fujimoto & Ohira's Algorithm 1).

    It measures no errors, so that it needs no loss at a fixed lr. It tolerates, and benefits from, less damping than
    BPRONG. The arguments are BPRONG's, but for `backward_damping`.
    """

    _whitens_backward = False

    def __init__(
        self,
        model: nn.Module,
        loss: Declaration | None = None,
        lr: float | Literal["auto"] = 0.01,
        *,
        step: StepKind = "natural",
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        forward_damping: float | Damping | None = None,
        every: int | Periods | None = None,
        max_step: float | Literal["auto"] | None = "auto",
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model, loss, lr, step=step, params=params, momentum=momentum, weight_decay=weight_decay,
            forward_damping=forward_damping, every=every, max_step=max_step, options=options,
        )  # fmt: skip
