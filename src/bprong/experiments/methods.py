"""The methods that the experiment compares: for each, how a plain network is prepared for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bprong
from bprong.experiments.models import with_batch_norm
from bprong.optim.options import Options

Fisher = Literal["sampled", "exact", "empirical"]
Solver = Literal["eigh", "cholesky", "symmetric"]

# The settings below that have no effect in PRONG's network, whose layers have no backward side.
BACKWARD_SETTINGS = ("backward_damping", "backward_every", "backward_offset", "fisher")


@dataclass(frozen=True)
class WhiteningSettings:
    """Hyperparameters of the paper's PRONG and BPRONG networks; docs/sweep.md tells how the defaults were chosen.

    statistics: number of training examples, drawn once, on which the moments are measured; 0: the current minibatch
    average:    weight of the earlier measurements in the running average of the moments; 0: no average
    """

    forward_every: int = 100
    forward_offset: int = 0
    backward_every: int = 100
    backward_offset: int = 50
    forward_damping: float = 0.1
    backward_damping: float = 0.03
    statistics: int = 0
    average: float = 0.0
    fisher: Fisher = "sampled"
    solver: Solver = "eigh"

    def for_epochs_of(self, updates: int) -> WhiteningSettings:
        """These settings; if their period is longer than an epoch, two refreshes of each side in every epoch instead.

        Otherwise a quick look at a small data set would whiten nothing. Two did as well as three or six on the digits.
        """
        if updates >= self.forward_every:
            return self
        every = max(1, updates // 2)
        return replace(self, forward_every=every, backward_every=every, backward_offset=every // 2)


@dataclass
class TrainingState:
    """Everything that changes while a network is trained, and that a checkpoint saves.

    sample: of the training set, measured instead of each batch; the same in every run, so that no checkpoint has it
    """

    model: nn.Module
    optimizer: Optimizer
    rewhitening: bprong.Rewhitening | None = None
    sample: tuple[Tensor, Tensor] | None = None
    scheduler: LRScheduler | None = None
    average: AveragedModel | None = None

    def deployed(self) -> nn.Module:
        """The network for use after training: with averaged weights if there are any, stock layers, in eval mode."""
        network: nn.Module = self.model if self.average is None else self.average.module
        return bprong.fold(network).eval()

    def after_update(self) -> None:
        """Advance the learning-rate schedule and the average of the weights, if the method has them."""
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if part is not None and name != "sample"}


@dataclass(frozen=True)
class Problem:
    """What a method is given: a plain network, a learning rate, the training data, a seed and whitening settings."""

    plain: nn.Sequential
    lr: float
    x_train: Tensor
    y_train: Tensor
    seed: int
    whitening: WhiteningSettings


@dataclass(frozen=True)
class Recipe:
    """How a method is trained for a low validation loss: its own learning rate, a schedule and averaged weights.

    The learning rate falls to zero along a cosine over the whole run. Losses are those of the averaged weights.

    settings: arguments of the optimizer, by name; --lr does not apply
    average:  the exponential average of the weights spans this share of the updates of the run; 0: no average
    """

    settings: Mapping[str, Any]
    average: float = 0.04

    def apply_(self, state: TrainingState, updates: int) -> None:
        """Add the schedule and the average of a run of so many updates to a state."""
        state.scheduler = CosineAnnealingLR(state.optimizer, T_max=updates)
        if self.average:
            decay = 1 - 1 / max(1.0, self.average * updates)
            # The running statistics of batch normalisation are averaged like the weights.
            rule = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            state.average = AveragedModel(state.model, multi_avg_fn=rule, use_buffers=True)


@dataclass(frozen=True)
class Method:
    """One method of the experiment.

    summary:   one line for the help text
    prepare:   makes the model and the optimizer for a problem
    whitening: the default settings, used only by the paper's whitened networks
    sides:     "forward" or also "backward" for the paper's whitened networks; empty for the others
    defaults:  the settings of the drop-in optimizer, by name; empty for the others
    recipe:    the schedule and the average of the weights; None for a constant learning rate and the last weights
    """

    summary: str
    prepare: Callable[[Problem], TrainingState]
    whitening: WhiteningSettings = WhiteningSettings()
    sides: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None

    def start(self, problem: Problem, updates: int) -> TrainingState:
        """Everything needed to train on a problem for so many updates."""
        state = self.prepare(problem)
        if self.recipe is not None:
            self.recipe.apply_(state, updates)
        return state


def _sgd(problem: Problem) -> TrainingState:
    return TrainingState(problem.plain, SGD(problem.plain.parameters(), lr=problem.lr))


def _batch_norm(problem: Problem) -> TrainingState:
    model = with_batch_norm(problem.plain)
    return TrainingState(model, SGD(model.parameters(), lr=problem.lr))


def _adamw(problem: Problem, **given: Any) -> TrainingState:
    """AdamW with batch normalisation; only matrices decay, as is usual."""
    model = with_batch_norm(problem.plain)
    decay = given.pop("weight_decay")
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return TrainingState(model, AdamW(groups, fused=True, **given))


def _whitened(problem: Problem, backward: bool) -> TrainingState:
    """The paper's network with U, c, W†, b† and R as explicit layers, trained with plain SGD."""
    model = bprong.whiten_(problem.plain, backward=backward)
    optimizer = SGD(model.parameters(), lr=problem.lr)
    unused = {"statistics"} if backward else {"statistics", *BACKWARD_SETTINGS}
    settings = {name: value for name, value in asdict(problem.whitening).items() if name not in unused}
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", seed=problem.seed, **settings)
    return TrainingState(model, optimizer, rewhitening, _sample(problem))


def _sample(problem: Problem) -> tuple[Tensor, Tensor] | None:
    if not problem.whitening.statistics:
        return None
    generator = torch.Generator().manual_seed(problem.seed)
    chosen = torch.randperm(len(problem.x_train), generator=generator)[: problem.whitening.statistics]
    return problem.x_train[chosen], problem.y_train[chosen]


def _drop_in(problem: Problem, lr: Any, **given: Any) -> TrainingState:
    """The drop-in optimizer with its defaults on the plain network; only its random seed is the experiment's."""
    options = {"seed": problem.seed}
    return TrainingState(problem.plain, bprong.BPRONG(problem.plain, "cross_entropy", lr, options=options, **given))


def _drop_in_defaults(**given: Any) -> dict[str, Any]:
    """The settings of `bprong.BPRONG` that the experiment leaves at their defaults, and those given here."""
    defaults = {name: parameter.default for name, parameter in signature(bprong.BPRONG).parameters.items()}
    defaults |= {option.name: option.default for option in fields(Options)}
    left_out = ("model", "lr", "params", "options", "seed")
    settings = {name: value for name, value in defaults.items() if name not in left_out} | given
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}


# Chosen on a split of the training images; docs/reproduction.md tells how.
STRONG = bprong.Damping(10.0, relative_to="mean")
SPECTRAL = Recipe(
    {
        "lr": 0.005,
        "step": "spectral",
        "momentum": 0.95,
        "weight_decay": 0.5,
        "forward_damping": STRONG,
        "backward_damping": STRONG,
    }
)
ADAMW = Recipe({"lr": 0.002, "weight_decay": 1.0})

METHODS: dict[str, Method] = {
    "sgd": Method("stochastic gradient descent on the plain network", _sgd),
    "bn": Method("stochastic gradient descent with batch normalisation", _batch_norm),
    "prong": Method(
        "the paper's whitened network (Algorithm 1)",
        lambda problem: _whitened(problem, backward=False),
        WhiteningSettings(forward_damping=0.01),
        sides=("forward",),
    ),
    "bprong": Method(
        "the paper's bidirectionally whitened network (Algorithm 2)",
        lambda problem: _whitened(problem, backward=True),
        WhiteningSettings(forward_damping=0.2, backward_damping=0.015, average=0.9),
        sides=("forward", "backward"),
    ),
    "bprong-fast": Method(
        "the optimizer bprong.BPRONG(model) with the paper's literal steps (max_step=None)",
        lambda problem: _drop_in(problem, problem.lr, max_step=None),
        defaults=_drop_in_defaults(max_step=None),
    ),
    "bprong-auto": Method(
        'the same with lr="auto": no learning rate, automatic damping',
        lambda problem: _drop_in(problem, "auto"),
        defaults=_drop_in_defaults(lr="auto"),
    ),
    "bprong-recipe": Method(
        "bprong.BPRONG(model) with spectral steps, a cosine schedule and averaged weights",
        lambda problem: _drop_in(problem, **SPECTRAL.settings),
        defaults=_drop_in_defaults(**SPECTRAL.settings),
        recipe=SPECTRAL,
    ),
    "bn-recipe": Method(
        "AdamW with batch normalisation, the same schedule and averaged weights",
        lambda problem: _adamw(problem, **ADAMW.settings),
        recipe=ADAMW,
    ),
}
