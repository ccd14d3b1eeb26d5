"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and the actual change of the loss.

Everything is per target and in nats, whatever multiple of the mean −log p the user's loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch, Subset, copied, examples
from bprong.capture.output import Head
from bprong.errors import WhiteningError, warn
from bprong.likelihood.families import Likelihood
from bprong.linalg.moments import finite
from bprong.optim.auto.linearized import Rerun, curvature, linearized
from bprong.optim.auto.settings import SETTINGS
from bprong.optim.rules import Direction, Group, dot
from bprong.parallel.processes import ALONE, Ranks
from bprong.parallel.slices import gathered, whole


@dataclass(frozen=True)
class Evaluation:
    """The quadratic model of a step along some directions.

    Q         (k, k) dᵢᵀ F dⱼ, float64
    loss      the mean −log p of a target; None: the targets are not known
    slopes    (k,) its derivatives along the directions, on the examples that Q is of; zero if it is not known
    targets   the number of targets of these examples
    part      the part of all examples that they are
    loss_now  computes the loss again, at the current parameters, on the same examples and random numbers
    """

    Q: Tensor
    loss: float | None
    slopes: Tensor
    targets: int
    part: float = 1.0
    loss_now: Callable[[], float] = lambda: math.nan


class BatchNumbers(NamedTuple):
    """Numbers of a batch that are added up over batches and over processes.

    weight:  what multiple of the mean −log p of its targets the user's loss is, which Q, loss and slopes are times
    unknown, refused: whether its targets are not known, and forward-mode AD was unavailable
    evaluated: the number of examples that were evaluated; targets: of their targets
    """

    weight: float
    loss: float
    unknown: float
    refused: float
    evaluated: float
    targets: float


class LossModel:
    """Quadratic models of the loss on the batches of a step.

    everything:    whether all of a batch is evaluated, because the model cannot be run on a subset: states, masks or
                   graphs belong to the whole batch
    forward_mode:  whether forward-mode AD is available
    """

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, head: Head | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.everything = False
        self.forward_mode = True
        self._model = model
        self._likelihood = likelihood
        self._head = head
        self._ranks = ranks
        self._is_divisible = False  # not known yet
        self._warned: set[str] = set()

    def evaluate(self, directions: Sequence[Direction], batches: Sequence[Batch], seed: int) -> Evaluation:
        """The quadratic model on the batches of all processes; seed: of this process."""
        k = len(directions)
        parts: list[_Part] = []
        reasons: list[str] = []  # why batches were not divided here

        def numbers() -> list[float]:
            if batches:
                self._evaluate_here(in_parameters, batches, seed, parts, reasons)
            rows = [part.numbers for part in parts] or [[0.0] * (len(BatchNumbers._fields) + k + k * k)]
            totals = torch.tensor(rows, dtype=torch.float64, device="cpu").sum(dim=0)
            return [float(bool(reasons)), float(sum(examples(batch.x) for batch in batches)), *totals.tolist()]

        with whole(self._model) as parameters:
            in_parameters = [self._in_whole(parameters, direction) for direction in directions]
            undivided, count, *rest = self._ranks.sums(2 + len(BatchNumbers._fields) + k + k * k, numbers)
        totals = BatchNumbers(*rest[: len(BatchNumbers._fields)])
        along = torch.tensor(rest[len(BatchNumbers._fields) :], dtype=torch.float64, device="cpu") / totals.weight
        if undivided:
            self.everything = True
            reason = next(iter(reasons), "on another rank")
            self._warn(f"the model cannot be run on a subset of a batch, so all of it is evaluated: {reason}")
        if totals.refused and self.forward_mode:
            self.forward_mode = False
            reason = next((part.refused for part in parts if part.refused is not None), "on another rank")
            self._warn(f"forward-mode AD is unavailable for this model; using finite differences: {reason}")
        if totals.unknown and any(batch.targets is None for batch in batches):
            self._warn(
                "the targets are not known, so damping will not adapt. Declare the loss module that you call, or call "
                "optimizer.observe(x, y) before step()"
            )

        def loss_now() -> float:
            with whole(self._model):
                return self._ranks.sums(1, lambda: [sum(part.loss_now() for part in parts)])[0] / totals.weight

        loss = None if totals.unknown else totals.loss / totals.weight
        Q = along[k:].view(k, k)
        return Evaluation(Q, loss, along[:k], int(totals.targets), totals.evaluated / count, loss_now)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(f'lr="auto": {message}')

    def _in_whole(self, parameters: Mapping[Tensor, Tensor], direction: Direction) -> Direction:
        """The direction in the whole parameters of a sharded model; without any, as it is."""
        if not parameters:
            return direction
        return {parameters[p]: d for p, d in gathered(direction).items()}

    def _evaluate_here(
        self,
        directions: Sequence[Direction],
        batches: Sequence[Batch],
        seed: int,
        parts: list[_Part],
        reasons: list[str],
    ) -> None:
        """Adds the batches of this process: subsets of them, unless the model cannot be run on one."""
        if not self.everything and not self._is_divisible:
            reason = self._why_undivided(batches)
            self._is_divisible = reason is None
            reasons += [] if reason is None else [reason]
        if not (self.everything or reasons):
            try:
                parts += self._parts(directions, batches, seed, everything=False)
                return
            except _UndividedError as error:
                reasons.append(str(error))
        parts += self._parts(directions, batches, seed, everything=True)

    def _parts(
        self, directions: Sequence[Direction], batches: Sequence[Batch], seed: int, everything: bool
    ) -> list[_Part]:
        counts = evaluated_counts(batches, self._likelihood, everything, self._ranks.size)
        parts = []
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            if count or len(batches) == 1:
                parts.append(self._part(directions, batch, batch.subset(count), seed + i))
        return parts

    def _part(self, directions: Sequence[Direction], batch: Batch, subset: Subset, seed: int) -> _Part:
        """The quadratic model on a subset of the examples of a batch."""
        run = self._rerun(batch, subset, seed)
        try:
            network = linearized(run, directions, self.forward_mode)
        except Exception as error:  # a model may raise anything; it was tried without forward-mode AD too
            if subset.everything:
                raise
            first_line = str(error).split(chr(10), maxsplit=1)[0]
            raise _UndividedError(f"{type(error).__name__}: {first_line}") from error
        output = network.output
        if not subset.everything and not _fits(batch, output, subset):
            raise _UndividedError(f"{subset.count} of {subset.whole} examples give the shape {tuple(output.shape)}")
        targets = None
        if batch.targets is not None and batch.targets.multiple != 0:
            targets = batch.targets.select(subset.rows)
            if batch.output is None:
                self._likelihood.check_targets(output, targets.y)
        counted = None if targets is None else targets.counted
        Q = curvature(network, run, self._likelihood, counted).cpu()
        if not finite(Q):
            raise WhiteningError("the model's output, or its change along the step, is not finite on this batch")
        number = _counted_targets(self._likelihood, output, counted)
        w = 1.0 if targets is None else targets.multiple
        loss = 0.0 if targets is None else targets.mean(output)
        slopes = [0.0] * len(Q) if targets is None else targets.slopes(output, network.along)
        sums = BatchNumbers(w, w * loss, targets is None, network.refused is not None, subset.count, number)
        numbers = [*map(float, sums), *(w * slope for slope in slopes), *(w * Q).flatten().tolist()]

        def loss_now() -> float:
            return math.nan if targets is None else w * targets.mean(run())

        return _Part(numbers, loss_now, network.refused)

    def _rerun(self, batch: Batch, subset: Subset, seed: int) -> Rerun:
        x = copied(batch.x, subset, next(self._model.parameters()).dtype)
        return Rerun(self._model, x, seed, batch.class_dim, self._head)

    def _why_undivided(self, batches: Sequence[Batch]) -> str | None:
        """Why a model cannot be run on a subset of a batch; None: it can.

        In eval mode a subset must give the rows that the whole batch gives. It does not if the first dimension is time.
        """
        batch = batches[0]
        subset = batch.subset(evaluated_counts(batches, self._likelihood, False, self._ranks.size)[0])
        if subset.everything:
            return None
        training = [module for module in self._model.modules() if module.training]
        for module in training:  # not eval(), which a module may take as an occasion to change its weights
            module.training = False
        try:
            run = self._rerun(batch, Subset(subset.whole, subset.whole), 0)
            part = self._rerun(batch, subset, 0)()
            rows_of_all = run()
            if not rows_of_all.equal(replace(run, seed=1)()):
                return None  # the model draws random numbers in eval mode too, so that rows cannot be compared
        except Exception:  # it may return something else in eval mode; the subset is tried in training mode next
            return None
        finally:
            for module in training:
                module.training = True
        if subset.divides(rows_of_all) and part.shape == subset.rows(rows_of_all).shape:
            rows = subset.rows(rows_of_all)
            if bool(torch.isclose(part, rows, rtol=0.01, atol=0.01 * float(rows[rows.isfinite()].std())).all()):
                return None
        return "its rows depend on the rest of the batch, or the first dimension is not that of the examples"


class _UndividedError(Exception):
    """The model cannot be run on a subset of a batch."""


class _Part(NamedTuple):
    """A batch: its `BatchNumbers`, slopes and Q, times its weight, one after the other.

    loss_now:  its loss at the current parameters, times its weight
    refused:   why forward-mode AD was unavailable
    """

    numbers: list[float]
    loss_now: Callable[[], float]
    refused: str | None


def _fits(batch: Batch, output: Tensor, subset: Subset) -> bool:
    """Whether this can be the output on a subset, as far as its shape is known."""
    if batch.output is not None:
        return output.shape == subset.rows(batch.output).shape
    return output.ndim > 0 and (batch.targets is None or len(output) == len(subset.rows(batch.targets.y)))


def evaluated_counts(batches: Sequence[Batch], likelihood: Likelihood, everything: bool, ranks: int = 1) -> list[int]:
    """On how many examples of each batch the quadratic model is evaluated: of the first ones, until they are enough.

    Targets are counted, because an example may have many: a sequence has one for each token, an image one for each
    pixel. Never on a single example of several, because BatchNorm needs a variance.
    """
    lengths = [examples(batch.x) for batch in batches]
    total = sum(lengths)
    enough = total
    if not everything:
        targets = 0
        for batch, length in zip(batches, lengths, strict=True):
            is_known = batch.output is not None
            targets += _counted_targets(likelihood, batch.output, batch.counted) if is_known else length  # type: ignore[arg-type]
        fewest = math.ceil(SETTINGS.evaluated_least / ranks * total / max(1, targets))
        enough = min(total, max(int(SETTINGS.evaluated_part * total), fewest, 2))
    remaining = [enough - before for before in accumulate(lengths, initial=0)]
    return [
        batch.subset(min(n, length)).count if n > 1 or n == length == 1 else 0
        for batch, n, length in zip(batches, remaining, lengths, strict=False)
    ]


def _counted_targets(likelihood: Likelihood, output: Tensor, counted: Tensor | None) -> int:
    return likelihood.targets(output) if counted is None else int(counted.sum())


def metrics(directions: Mapping[str, Direction], groups: Mapping[Tensor, Group]) -> tuple[Tensor, Tensor]:
    """Two Gram matrices (k, k) of the directions: of their dot products, and in the metric of ½ weight_decay ‖θ‖²."""
    vectors = list(directions.values())
    decay = {p: float(group["weight_decay"]) for p, group in groups.items() if group["weight_decay"]}
    penalties = [{p: d[p] * rate for p, rate in decay.items() if p in d} for d in vectors]
    return _gram(vectors, vectors), _gram(vectors, penalties)


def _gram(left: Sequence[Direction], right: Sequence[Direction]) -> Tensor:
    """The symmetric matrix of their products: (k, k), float64."""
    matrix = torch.zeros(len(left), len(left), dtype=torch.float64, device="cpu")
    for i, x in enumerate(left):
        for j, y in enumerate(right[: i + 1]):
            matrix[i, j] = matrix[j, i] = dot(x, y)
    return matrix
