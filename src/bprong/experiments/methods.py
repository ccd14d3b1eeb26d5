"""The methods compared, one entry each: how a plain network is prepared and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import bprong
from bprong.errors import Fisher
from bprong.experiments.models import with_batch_norm
from bprong.expert import Expert
from bprong.whitening import Factorisation

__all__ = ["METHODS", "Method", "Trainee", "Whitening"]


@dataclass(frozen=True)
class Whitening:
    """Hyperparameters of the paper's PRONG and BPRONG; defaults from the sweep in docs/sweep.md.

    statistics: how many training examples, drawn once, the moments are measured on; 0 measures each refresh's own batch
    average:    what a running average over refreshes keeps of the earlier ones at each new one; 0: no average
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
    factorisation: Factorisation = "eigh"


@dataclass
class Trainee:
    """A network in training: what is stepped, and what is saved to go on later."""

    model: nn.Module
    optimizer: Optimizer
    rewhitening: bprong.Rewhitening | None = None

    def deployed(self) -> nn.Module:
        """The network as it would be used: stock layers, eval mode, the same function."""
        return bprong.fold(self.model).eval()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "rewhitening": self.rewhitening}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class Problem:
    """What a method is given: the plain network, the rate, the training data, a seed, and how to whiten."""

    plain: nn.Sequential
    lr: float
    x_train: Tensor
    y_train: Tensor
    seed: int
    whitening: Whitening


@dataclass(frozen=True)
class Method:
    """A row of the experiment."""

    summary: str
    prepare: Callable[[Problem], Trainee]
    whitening: Whitening = Whitening()
    sides: tuple[str, ...] = ()  # which of its settings mean anything to this method
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of an optimizer that has settings of its own instead


def _sgd(problem: Problem) -> Trainee:
    return Trainee(problem.plain, SGD(problem.plain.parameters(), lr=problem.lr))


def _batch_norm(problem: Problem) -> Trainee:
    model = with_batch_norm(problem.plain)
    return Trainee(model, SGD(model.parameters(), lr=problem.lr))


def _whitened(problem: Problem, backward: bool) -> Trainee:
    """The paper's literal network: U, c, W†, b†, R as layers, trained by plain SGD."""
    how = problem.whitening
    model = bprong.whiten_(problem.plain, backward=backward)
    optimizer = SGD(model.parameters(), lr=problem.lr)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "categorical", fisher=how.fisher, samples=_samples(problem), average=how.average,
        forward_every=how.forward_every, forward_offset=how.forward_offset,
        backward_every=how.backward_every, backward_offset=how.backward_offset,
        forward_damping=how.forward_damping, backward_damping=how.backward_damping,
        factorisation=how.factorisation, seed=problem.seed,
    )  # fmt: skip
    return Trainee(model, optimizer, rewhitening)


def _samples(problem: Problem) -> tuple[Tensor, Tensor] | None:
    if not problem.whitening.statistics:
        return None
    generator = torch.Generator().manual_seed(problem.seed)
    chosen = torch.randperm(len(problem.x_train), generator=generator)[: problem.whitening.statistics]
    return problem.x_train[chosen], problem.y_train[chosen]


def _drop_in(problem: Problem, lr: Any = None) -> Trainee:
    """The optimizer as a user has it, on the plain network; only its random numbers follow the experiment's seed."""
    optimizer = bprong.BPRONG(problem.plain, lr=problem.lr if lr is None else lr, options={"seed": problem.seed})
    return Trainee(problem.plain, optimizer)


def drop_in_defaults(**given_by_us: Any) -> dict[str, Any]:
    """Every setting of `bprong.BPRONG` that the experiment leaves alone, as plain values, and those it gives itself."""
    found = {name: parameter.default for name, parameter in signature(bprong.BPRONG).parameters.items()}
    found |= {setting.name: setting.default for setting in fields(Expert)}
    given = ("model", "lr", "params", "options", "seed")
    plain = (bool, int, float, str, type(None))
    left = {n: value if isinstance(value, plain) else str(value) for n, value in found.items() if n not in given}
    return left | given_by_us


METHODS: dict[str, Method] = {
    "sgd": Method("stochastic gradient descent", _sgd),
    "bn": Method("the same with Batch Normalisation", _batch_norm),
    "prong": Method(
        "whitened network, Algorithm 1",
        lambda problem: _whitened(problem, backward=False),
        Whitening(forward_damping=0.01),
        sides=("forward",),
    ),
    "bprong": Method(
        "whitened in both directions, Algorithm 2",
        lambda problem: _whitened(problem, backward=True),
        Whitening(forward_damping=0.2, backward_damping=0.015, average=0.9),
        sides=("forward", "backward"),
    ),
    "bprong-fast": Method(
        "the drop-in optimizer bprong.BPRONG with its own defaults, on the plain network",
        _drop_in,
        defaults=drop_in_defaults(),
    ),
    "bprong-auto": Method(
        'the same with lr="auto": no learning rate, its own damping',
        lambda problem: _drop_in(problem, "auto"),
        defaults=drop_in_defaults(lr="auto"),
    ),
}
