"""BPRONG and PRONG for unmodified models: the paper's trajectory as an ordinary torch optimizer.

What SGD does in whitened coordinates is, in ordinary ones, a preconditioned step (`preconditioner.py`), so the user's
model, loop and checkpoints stay as they are. Statistics come from a pass of their own when a refresh is due
(`statistics.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.auto import EARLY, Auto
from bprong.auto_step import AutoStep
from bprong.carry import rate_ratio
from bprong.checks import number, positive, refuse_distributed
from bprong.expert import Expert
from bprong.likelihood import Bernoulli, Categorical, Gaussian, Likelihood, likelihood_of
from bprong.moves import LearningRateStep, sizes_of, without_autocast
from bprong.preconditioner import Layer
from bprong.reporting import Report
from bprong.schedule import PATIENCE, WhiteningWarning
from bprong.statistics import Recorder, Statistics
from bprong.units import Limits
from bprong.whitening import Damping

__all__ = ["BPRONG", "PRONG"]

Group = dict[str, Any]


class BPRONG(Optimizer):
    """Natural-gradient descent by bidirectional whitening, for any model and an unchanged training loop.

        ΔW = −η (D+ε₂)⁻¹ (g_W − g_b cᵀ) (Ž+ε₁)⁻¹,   Δb = −η (D+ε₂)⁻¹ g_b − ΔW c

    for every linear layer, convolution, attention projection, embedding and recurrent cell, which is SGD in the
    coordinates of Fujimoto & Ohira's Algorithm 2. Other parameters, and tied ones, follow Adam's rule at a tenth of lr.
    `bprong.coverage(model)` says beforehand what becomes of which, `report()` what became of it.

    model             the module that is called in training; what it is called with is remembered until the step
    lr                as for SGD; "auto": no learning rate, the step comes from a quadratic model of the loss
                      (`auto.py`), and the group's lr, then 1, is a multiplier on it
    momentum, nesterov
                      as for SGD; momentum is a velocity in ordinary coordinates
    likelihood        "categorical", "bernoulli", "gaussian" or your own `bprong.Likelihood`
    params            parameters or parameter groups; by default all trainable parameters of the model
    weight_decay      decoupled, of ordinary weights: p ← (1 − lr · weight_decay) p; lr="auto": a penalty beside −log p
    forward_damping, backward_damping
                      ε₁ of Ž and ε₂ of D: numbers, or `bprong.Damping`; the defaults are docs/sweep.md's; lr="auto":
                      chosen along with the step, unless they are given
    every             steps between refreshes of the statistics; None: as they drift, within a tenth of all time
    max_step          a bound on the length of each step in the Fisher metric, momentum apart unless lr="auto"
    options           expert settings: see `bprong.expert.Expert`

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> optimizer = BPRONG(model, lr=0.1)
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    """

    _backward = True
    _damping = (0.2, 0.015)  # ε₁, ε₂ where none are given: docs/sweep.md's

    def __init__(
        self,
        model: nn.Module,
        lr: float | Literal["auto"] = 0.01,
        likelihood: str | Likelihood = "categorical",
        *,
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        forward_damping: float | Damping | None = None,
        backward_damping: float | Damping | None = None,
        every: int | None = None,
        max_step: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"BPRONG takes the model itself, to measure it, not a {type(model).__name__}")
        refuse_distributed(model)
        if isinstance(lr, str) and lr != "auto":
            raise ValueError(f'lr must be a number or "auto", not {lr!r}')
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        defaults = {
            "lr": 1.0 if lr == "auto" else number("lr", lr, 0), "momentum": number("momentum", momentum, 0, 1),
            "nesterov": nesterov, "weight_decay": number("weight_decay", weight_decay, 0),
        }  # fmt: skip
        self._max_step = None if max_step is None else positive("max_step", max_step)
        expert = Expert.of(options)
        self._rule = self._chosen(lr, likelihood_of(likelihood), momentum, forward_damping, backward_damping)
        settings = expert.settings(
            every, _given(forward_damping, self._damping[0]), _given(backward_damping, self._damping[1])
        )
        settings = replace(settings, early=EARLY) if lr == "auto" else settings
        limits = Limits(expert.max_dim, expert.channels)
        self.statistics = Statistics(
            model, likelihood, settings,
            examples=expert.examples, limits=limits, solver=expert.solver, backward=self._backward,
            auto=self._rule.auto if isinstance(self._rule, AutoStep) else None,
        )  # fmt: skip
        self._refused = 0
        super().__init__([p for p in model.parameters() if p.requires_grad] if params is None else params, defaults)
        if isinstance(self._rule, AutoStep):
            self._rule.attach(self._parameters)

    def _chosen(
        self, lr: object, likelihood: Likelihood, momentum: float, *damping: float | Damping | None
    ) -> LearningRateStep | AutoStep:
        """The rule that makes the steps."""
        if lr != "auto":
            return LearningRateStep(self._max_step)
        if momentum:
            raise ValueError(f'lr="auto" chooses how much of the last update to keep; leave out momentum={momentum}')
        bound = None if self._max_step is None else self._max_step**2 / 2
        free = not isinstance(likelihood, (Bernoulli, Categorical, Gaussian))
        return AutoStep(Auto(any(given is not None for given in damping), bound, free))

    # A step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step down the gradients in `.grad`; returns the closure's loss, if there is a closure.

        Gradients that are not finite are refused with a warning, nothing changed, and raise after several in a row. On
        a fresh optimizer gradients that are all zero do nothing and do not count.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        if not self._acceptable(groups) or self._turns_back(groups):
            self.statistics.forget()
            return loss
        with without_autocast(next(iter(groups)).device.type):
            if self.statistics.due or self.statistics.woken:
                self.statistics.refresh(self._centred(), self._carry)
            with self.statistics.watch.on("step"):
                self._rule.step_(groups, self.state, self.statistics)
        self.statistics.advance()
        return loss

    def _acceptable(self, groups: Mapping[Tensor, Group]) -> bool:
        gradients = [p.grad for p in groups if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise TypeError("sparse gradients are not supported; use sparse=False in the embedding")
        if not gradients:
            return False
        sizes = sizes_of(gradients)
        if math.isfinite(sum(sizes)):
            self._refused = 0
            return any(sizes) or self.statistics.schedule.t > 0
        bad = [self.statistics.name_of(p) for p, g in zip(groups, gradients, strict=True) if not g.isfinite().all()]
        if not bad:  # finite, with a square beyond the largest number
            return True
        self._refused += 1
        message = f"step {self.statistics.schedule.t} refused: the gradient of {', '.join(bad)} is not finite"
        if self._refused >= PATIENCE:
            raise FloatingPointError(f"{message} ({PATIENCE} times in a row)")
        if self._refused == PATIENCE - 1 and isinstance(self._rule, AutoStep):  # not one bad batch: a bad step
            self._rule.undo_(groups, self.state, self.statistics.schedule.t)
        # past torch's two wrappers of step(), to the line that called it
        warnings.warn(f"{message}; nothing was changed", WhiteningWarning, stacklevel=5)
        return False

    def _turns_back(self, groups: Mapping[Tensor, Group]) -> bool:
        """Whether lr="auto" takes back the last update instead of making another."""
        return isinstance(self._rule, AutoStep) and self._rule.takes_back_(groups, self.state, self.statistics)

    def _carry(self, layer: Layer, c_before: Tensor | None) -> None:
        """A new centre c: the bias's velocity as seen from it, so that its velocity as such stays what it is."""
        W, b = layer.weight, layer.bias
        buffers = [self.state.get(p, {}).get("momentum_buffer") for p in (W, b) if p is not None]
        if b is None or any(buffer is None for buffer in buffers):
            return
        moved = (0 if layer.c is None else layer.c) - (0 if c_before is None else c_before)
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        if isinstance(moved, Tensor):
            unit = layer.unit
            seen = unit.times(unit.own(buffers[0]), moved.to(buffers[0]))
            unit.vector(buffers[1]).add_(seen, alpha=rate_ratio(rates[W], rates[b]))

    def _centred(self) -> dict[str, bool]:
        """The layers this optimizer trains, and whether their inputs are centred.

        Without a bias that is trained nothing is: training W would grow one.
        """
        trained = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        layers = self.statistics.layers.items()
        return {n: layer.bias in trained for n, layer in layers if layer.weight in trained or layer.bias in trained}

    def add_param_group(self, param_group: Group) -> None:
        """As for every optimizer; its numbers are checked."""
        for key, below in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            number(key, param_group.get(key, self.defaults[key]), 0, below)
        super().add_param_group(param_group)

    # Statistics -------------------------------------------------------------------------------------------------------

    def observe(self, x: Any, y: Tensor | None = None) -> None:
        """The batch to measure at the next step, instead of what the model was called with.

        For training in eval mode, for models wrapped beyond recognition, and for fisher="empirical", which needs y.
        """
        self.statistics.observe(x, y)

    def recording(self) -> AbstractContextManager[Recorder]:
        """For models that are not called as model(x): measures a forward pass of your own.

        with optimizer.recording() as record:
            output = model.head(model.body(x))
            record(output)
        """
        return self.statistics.recording(self._centred())

    def report(self) -> Report:
        """Per layer: ranks, damping, age, distance from white, length of the last step; fallbacks; shares of time."""
        return self.statistics.report(self._parameters)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's own with the key "whitening": everything that shapes the path, tensors and plain values only."""
        state = super().state_dict() | {"whitening": self.statistics.state_dict()}
        rule = self._rule
        return state | {"auto": rule.state_dict(self._parameters)} if isinstance(rule, AutoStep) else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues bit for bit where `state_dict` was taken; a state of another model is refused."""
        state = dict(state_dict)
        whitening, auto = state.pop("whitening", None), state.pop("auto", None)
        if whitening is None:
            warnings.warn("this state has no whitening: its statistics begin anew", WhiteningWarning, stacklevel=2)
        else:
            self.statistics.check_state(whitening)
        super().load_state_dict(state)
        if auto is not None and isinstance(self._rule, AutoStep):
            self._rule.load_state_dict(auto, self._parameters)
        if whitening is not None:
            self.statistics.load_state_dict(whitening)

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: all but hooks, which belong to this very object."""
        kept = super().__getstate__()
        return kept | {
            "statistics": self.statistics,
            "_max_step": self._max_step,
            "_refused": self._refused,
            "_rule": self._rule,
        }


class PRONG(BPRONG):
    """The same with forward whitening alone (Desjardins et al., 2015; Algorithm 1 of Fujimoto & Ohira).

    It draws no targets, so the likelihood does not matter, and it stands and wants less damping.
    """

    _backward = False
    _damping = (0.01, 0.015)

    def __init__(
        self,
        model: nn.Module,
        lr: float | Literal["auto"] = 0.01,
        *,
        forward_damping: float | Damping | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(model, lr, forward_damping=forward_damping, **arguments)


def _given(value: float | Damping | None, otherwise: float) -> float | Damping:
    return otherwise if value is None else value
