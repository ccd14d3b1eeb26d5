"""The targets of a step's batches, and whether they fit the loss that was declared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from bprong.capture.batches import Batch
from bprong.errors import warn
from bprong.likelihood.loss import Loss

TOLERANCE = 0.1  # relative, within which a loss is what was declared; which targets count may be inferred
MOST_CLIPPED = 64  # gradients that shrank by more were scaled for mixed precision, and perhaps clipped
UNEXPLAINED = 0.1  # the part of a gradient that may come from something other than the declared loss


def possible_ratios(calls: int, factor: float) -> list[float]:
    """What r of each batch may be if the loss is as declared, the most likely first.

    A loss is commonly divided by the number of batches that a step accumulates. factor: what `.grad` was multiplied by
    since. Clipping comes after the backward pass; but mixed precision multiplies the loss by a power of two, and
    divides `.grad` by it afterwards, which may be clipped then.
    """
    power = -math.log2(factor)
    scales = [1.0, 1 / factor, *(2.0**n for n in range(int(power), 0, -1))]
    if abs(power - round(power)) < 1e-3:
        scales = [1 / factor, 1.0]
    elif power > math.log2(MOST_CLIPPED):
        scales = [*scales[2:], *scales[:2]]
    return [scale * ratio for scale in scales for ratio in (1 / calls, 1.0)]


class DeclaredLoss:
    """Reads the targets of batches, and warns once if they contradict the declared loss."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.warned = False

    def read(self, batches: Sequence[Batch], factor: float, alone: bool = True) -> list[Batch]:
        """The batches of a step with their targets, without those of which the loss counts none.

        factor: what `.grad` was multiplied by since the backward pass
        alone:  whether there is one process, which needs a batch even if the loss counts none of its targets
        """
        ratios = possible_ratios(max(1, len(batches)), factor)
        found = [batch.read(self.loss, ratios) for batch in batches]
        message = None if self.warned else self._message(found, ratios)
        if message is not None:
            self.warned = True
            warn(message)
        counted = [batch for batch in found if batch.counts(self.loss.likelihood)]
        return counted or (found if alone else [])

    def _message(self, batches: Sequence[Batch], ratios: Sequence[float]) -> str | None:
        """What is to be said of a step's batches; None: nothing."""
        read = [batch for batch in batches if batch.left is not None and bool(batch.left.gradient.any())]
        if reason := self._contradiction(read, ratios, len(batches)):
            return f"your loss is not what was declared, {self.loss.name}: {reason}"
        if self.loss.needs_its_call and isinstance(self.loss.given, nn.Module) and not all(b.given for b in read):
            return (
                f"your loss cannot be checked: the {self.loss.name} that was declared was not called, so that a factor "
                f"on the loss, a sum or another loss is not noticed. Call the module that you declare. If your loss is "
                f"the mean of squared errors, declaring F.mse_loss does as well"
            )
        return None

    def _contradiction(self, read: Sequence[Batch], ratios: Sequence[float], count: int) -> str | None:
        """How the batches whose gradients could be read contradict the declared loss; count: of all batches."""
        if not all(self.loss.fits(batch.left.output) for batch in read if batch.left is not None):
            return "the model does not return log-probabilities. Declare nn.CrossEntropyLoss(), or add nn.LogSoftmax"
        known = [batch.targets for batch in read if batch.targets is not None]
        unread = len(known) < len(read)
        if any(targets.residual > UNEXPLAINED for targets in known) or (unread and self.loss.likelihood.hint):
            return (
                f"the gradient at the model's output is not that of such a loss. {self.loss.likelihood.hint}. If the "
                f"loss has weights for single examples or further terms, nothing needs to be done. If it is computed "
                f"from something else that the model returns, name that with options={{'output': …}}"
            )
        total = sum(targets.ratio for targets in known)
        # A batch in which no target counts has no ratio, but the loss may have been divided as if it had one.
        factors = [total / (n * ratio) for ratio in ratios for n in {len(known), count} if known]
        if any(math.isclose(factor, 1, rel_tol=TOLERANCE) for factor in factors) or not known:
            return None
        other = "mean" if self.loss.sums else "sum"
        return (
            f"the gradient at the model's output is {min(factors, key=lambda x: abs(math.log(x))):.4g} times as large. "
            f'If your loss is a {other} over the batch, declare it with reduction="{other}". If a factor on the loss '
            f'is intended, nothing needs to be done: lr="auto" takes it into account; a fixed lr is multiplied by it'
        )
