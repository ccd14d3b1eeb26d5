"""The quadratic model of a batch: dᵢᵀ F dⱼ and slopes along a few directions, and the actual change of the loss.

Everything is per target and in nats, whatever multiple of the mean −log p the user's loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.batches import Batch, Subset, copied, examples
from bprong.capture.output import Head
from bprong.errors import WhiteningError
from bprong.likelihood.families import Likelihood
from bprong.linalg.moments import finite
from bprong.optim.auto.linearized import Linearized, curvature, linearized, output_of
from bprong.optim.auto.settings import SETTINGS
from bprong.optim.directions import Direction, gram
from bprong.optim.rules import Group
from bprong.parallel.processes import Ranks


@dataclass(frozen=True)
class Evaluation:
    """The quadratic model of a step along some directions.

    Q         (k, k) dᵢᵀ F dⱼ, float64
    loss      the mean −log p of a target; None: the targets are not known
    slopes    (k,) its derivatives along the directions, on the examples that Q is of; zero if it is not known
    targets   the number of targets of these examples
    part      the part of all examples that they are; `examples` is the number of these
    loss_now  computes the loss again, at the current parameters, on the same examples and random numbers
    weight    of this loss in that of all batches: what multiple of the mean −log p of its targets the user's loss is
    refused   why forward-mode AD was unavailable; None: it was available
    undivided why the model could not be run on a subset of the batch, so that all of it was evaluated; None: it could
    """

    Q: Tensor
    loss: float | None
    slopes: Tensor
    targets: int
    part: float = 1.0
    examples: int = 1
    loss_now: Callable[[], float] = lambda: math.nan
    weight: float = 1.0
    refused: str | None = None
    undivided: str | None = None


def evaluate(
    model: nn.Module,
    batches: Sequence[Batch],
    directions: Sequence[Direction],
    likelihood: Likelihood,
    seed: int,
    *,
    everything: bool,
    forward_mode: bool,
    head: Head | None = None,
    ranks: int = 1,
) -> Evaluation:
    """The quadratic model on the batches of a step.

    everything: on all examples; otherwise on a subset, unless the model cannot be run on one, because states, masks or
    graphs belong to the whole batch
    head: finds the model's output
    ranks: the number of processes that evaluate their own batches
    """
    parts: list[Evaluation] = []
    counts = evaluated_counts(batches, likelihood, everything, ranks)
    for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        if not count and len(batches) > 1:
            continue
        subset = batch.subset(count)
        x = copied(batch.x, subset, next(model.parameters()).dtype)
        reason = None
        try:
            network = linearized(model, x, directions, seed + i, forward_mode, batch.class_dim, head)
            if not subset.everything and not _fits(batch, network.output, subset):
                reason = f"{subset.count} of {subset.whole} examples give the shape {tuple(network.output.shape)}"
        except Exception as error:  # a model may raise anything; it was tried without forward-mode AD too
            if subset.everything:
                raise
            reason = f"{type(error).__name__}: {str(error).split(chr(10), maxsplit=1)[0]}"
        if reason is not None:
            return replace(
                evaluate(
                    model, batches, directions, likelihood, seed, everything=True, forward_mode=forward_mode, head=head,
                    ranks=ranks,
                ),
                undivided=reason,
            )  # fmt: skip
        run = partial(output_of, model, x, seed + i, batch.class_dim, head)
        parts.append(_part(model, x, seed + i, network, batch, subset, likelihood, run))
    total = sum(examples(batch.x) for batch in batches)
    return replace(_merged(parts), part=sum(counts) / total, examples=total)


def why_undivided(
    model: nn.Module, batches: Sequence[Batch], likelihood: Likelihood, head: Head | None, ranks: int = 1
) -> str | None:
    """Why a model cannot be run on a subset of a batch; None: it can.

    In eval mode a subset must give the rows that the whole batch gives. It does not if the first dimension is time.
    """
    batch = batches[0]
    subset = batch.subset(evaluated_counts(batches, likelihood, everything=False, ranks=ranks)[0])
    if subset.everything:
        return None
    training = [module for module in model.modules() if module.training]
    for module in training:  # not eval(), which a module may take as an occasion to change its weights
        module.training = False
    try:
        subsets = (subset, Subset(subset.whole, subset.whole))
        copies = [copied(batch.x, own, next(model.parameters()).dtype) for own in subsets]
        part, whole = (output_of(model, x, 0, batch.class_dim, head) for x in copies)
        if not whole.equal(output_of(model, copies[1], 1, batch.class_dim, head)):
            return None  # the model draws random numbers in eval mode too, so that rows cannot be compared
    except Exception:  # it may return something else in eval mode; the subset itself is tried in training mode next
        return None
    finally:
        for module in training:
            module.training = True
    if subset.divides(whole) and part.shape == subset.rows(whole).shape:
        rows = subset.rows(whole)
        if bool(torch.isclose(part, rows, rtol=0.01, atol=0.01 * float(rows[rows.isfinite()].std())).all()):
            return None
    return "its rows depend on the rest of the batch, or the first dimension is not that of the examples"


def _fits(batch: Batch, output: Tensor, subset: Subset) -> bool:
    """Whether this can be the output on a subset, as far as its shape is known."""
    if batch.output is not None:
        return output.shape == subset.rows(batch.output).shape
    return output.ndim > 0 and (batch.targets is None or len(output) == len(subset.rows(batch.targets.y)))


def _part(
    model: nn.Module, x: Any, seed: int, found: Linearized, batch: Batch, subset: Subset, likelihood: Likelihood,
    run: Callable[[], Tensor],
) -> Evaluation:  # fmt: skip
    """The quadratic model on some examples x of one batch; run: computes the output on them again."""
    is_known = batch.targets is not None and batch.targets.multiple != 0
    targets = batch.targets.select(subset.rows) if is_known else None  # type: ignore[union-attr]
    if targets is not None and batch.output is None:
        likelihood.check_targets(found.output, targets.y)
    counted = None if targets is None else targets.counted
    Q = curvature(model, found, likelihood, seed, counted).cpu()
    if not finite(Q):
        raise WhiteningError("the model's output, or its change along the step, is not finite on this batch")
    number = _counted_targets(likelihood, found.output, counted)
    if targets is None:
        return Evaluation(Q, None, Q.new_zeros(len(Q)), number, refused=found.refused)
    return Evaluation(
        Q,
        targets.mean(found.output),
        Q.new_tensor(targets.slopes(found.output, found.along)),
        number,
        loss_now=lambda: targets.mean(run()),
        weight=targets.multiple,
        refused=found.refused,
    )


def _merged(parts: Sequence[Evaluation]) -> Evaluation:
    """The quadratic model of several batches, weighted as they are in the user's loss."""
    total = sum(part.weight for part in parts)
    weighted = [(part.weight / total, part) for part in parts]
    losses = [weight * part.loss for weight, part in weighted if part.loss is not None]
    return Evaluation(
        Q=torch.stack([weight * part.Q for weight, part in weighted]).sum(dim=0),
        loss=sum(losses) if len(losses) == len(parts) else None,
        slopes=torch.stack([weight * part.slopes for weight, part in weighted]).sum(dim=0),
        targets=sum(part.targets for part in parts),
        weight=total,
        loss_now=lambda: sum(weight * part.loss_now() for weight, part in weighted),
        refused=next((part.refused for part in parts if part.refused is not None), None),
    )


def over_ranks(ranks: Ranks, directions: int, own: Callable[[], Evaluation | None]) -> Evaluation:
    """The quadratic model of the batches of all ranks, from that of each; None: it has no batch."""
    if ranks.size == 1:
        alone = own()
        assert alone is not None
        return alone
    k = directions
    evaluation: Evaluation | None = None

    def numbers() -> list[float]:
        nonlocal evaluation
        evaluation = own()
        if evaluation is None:
            return [0.0] * (k * k + k + 8)
        w = evaluation.weight
        flags = [evaluation.loss is None, evaluation.refused is not None, evaluation.undivided is not None]
        counts = [evaluation.part * evaluation.examples, evaluation.examples, evaluation.targets]
        return [
            w,
            w * (evaluation.loss or 0.0),
            *map(float, flags),
            *counts,
            *(w * evaluation.slopes),
            *(w * evaluation.Q).flatten(),
        ]

    weight, loss, unknown, refused, undivided, evaluated, examples, targets, *rest = ranks.sums(k * k + k + 8, numbers)
    rest = [x / weight for x in rest]

    def own_loss() -> list[float]:
        return [0.0 if evaluation is None else evaluation.weight * evaluation.loss_now()]

    def loss_now() -> float:
        return ranks.sums(1, own_loss)[0] / weight

    other = "on another rank"
    return Evaluation(
        Q=torch.tensor(rest[k:], dtype=torch.float64, device="cpu").view(k, k),
        loss=None if unknown else loss / weight,
        slopes=torch.tensor(rest[:k], dtype=torch.float64, device="cpu"),
        targets=int(targets),
        part=evaluated / examples,
        loss_now=loss_now,
        refused=(evaluation and evaluation.refused) or other if refused else None,
        undivided=(evaluation and evaluation.undivided) or other if undivided else None,
    )


def evaluated_counts(batches: Sequence[Batch], likelihood: Likelihood, everything: bool, ranks: int = 1) -> list[int]:
    """On how many examples of each batch the quadratic model is evaluated: of the first ones, until they are enough.

    Targets are counted, because an example may have many: a sequence has one for each token, an image one for each
    pixel. Never on a single example of several, because BatchNorm needs a variance.
    """
    lengths = [examples(batch.x) for batch in batches]
    total = sum(lengths)
    enough = total
    if not everything:
        targets = sum(_targets_of(batch, likelihood) for batch in batches)
        fewest = math.ceil(SETTINGS.evaluated_least / ranks * total / max(1, targets))
        enough = min(total, max(int(SETTINGS.evaluated_part * total), fewest, 2))
    remaining = [enough - before for before in accumulate(lengths, initial=0)]
    return [
        batch.subset(min(n, length)).count if n > 1 or n == length == 1 else 0
        for batch, n, length in zip(batches, remaining, lengths, strict=False)
    ]


def _targets_of(batch: Batch, likelihood: Likelihood) -> int:
    """The number of targets that the loss counts; of examples, if the output is not known."""
    return examples(batch.x) if batch.output is None else _counted_targets(likelihood, batch.output, batch.counted)


def _counted_targets(likelihood: Likelihood, output: Tensor, counted: Tensor | None) -> int:
    counted = likelihood.counted(output, counted)
    return likelihood.targets(output) if counted is None else int(counted.sum())


def metrics(directions: Mapping[str, Direction], groups: Mapping[Tensor, Group]) -> tuple[Tensor, Tensor]:
    """Two Gram matrices (k, k) of the directions: of their dot products, and in the metric of ½ weight_decay ‖θ‖²."""
    vectors = list(directions.values())
    decay = {p: float(group["weight_decay"]) for p, group in groups.items()}
    products = gram(vectors)
    return products, gram(vectors, decay) if any(decay.values()) else torch.zeros_like(products)
