"""The targets that a loss was given, from the gradient G that the user's backward pass leaves at the output.

    G = r ∂(declared loss) / ∂f

Targets are known if the loss is a module or if they were observed; r is then found by least squares. Otherwise hard
labels are read off the signs of G, and r again by least squares. If hard labels do not explain G, targets are the
distributions (for a Gaussian, the numbers) that explain it at an assumed r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bprong.likelihood.families import nontrivial
from bprong.likelihood.loss import Loss
from bprong.linalg.moments import to_float64


@dataclass(frozen=True)
class Targets:
    """The user's loss as a function of the output.

    y          targets, laid out like the output
    counted    which of them the loss counts, without the output's last dimension; None: all
    ratio      r, the user's gradient as a multiple of that of the declared loss
    residual   the part of G that y does not explain, relative to G
    effective  y are distributions in which the weights and the smoothing of the loss are contained
    """

    loss: Loss
    y: Tensor
    counted: Tensor | None = None
    ratio: float = 1.0
    residual: float = 0.0
    effective: bool = False

    def mean(self, output: Tensor) -> float:
        """The mean −log p of a target, weighted as in the loss."""
        return float(self._mean(self._exact(output)))

    def slopes(self, output: Tensor, along: Sequence[Tensor]) -> list[float]:
        """The derivatives of that mean along changes of the output."""
        with torch.enable_grad():
            leaf = self._exact(output).requires_grad_()
            (g,) = torch.autograd.grad(self._mean(leaf), leaf)
        return [float((g * d).sum()) for d in along]

    def multiple(self) -> float:
        """The user's loss as a multiple of the mean −log p of a target; it depends on the number of targets alone."""
        output = self.y if self.y.is_floating_point() else self.y.unsqueeze(-1)
        return self.ratio * self.loss.multiple(self._part(output), self._part(self.y))

    def select(self, rows: Callable[[Tensor], Tensor]) -> Targets:
        """The targets of some of the examples; rows: selects their rows of a tensor."""
        return replace(self, y=rows(self.y), counted=None if self.counted is None else rows(self.counted))

    def _mean(self, output: Tensor) -> Tensor:
        f, y = map(self._part, (output, self.y))
        loss = Loss(self.loss.name, self.loss.likelihood) if self.effective else self.loss
        return loss.value(f, y) / loss.multiple(f, y)

    def _part(self, tensor: Tensor) -> Tensor:
        """The rows of the targets that count."""
        return tensor if self.counted is None else tensor[self.counted]

    def _exact(self, output: Tensor) -> Tensor:
        """The values of the output, in float64 if the likelihood accepts that."""
        return to_float64(output.detach()) if self.loss.likelihood.takes_float64 else output.detach()

    def fitted(self, f: Tensor, G: Tensor) -> Targets:
        """These targets with r by least squares, and what they leave unexplained beyond rounding."""
        f, y, G = map(self._part, (f, self.y, G))
        E = self.loss.gradient(f, y)
        unit = E / E.abs().max().clamp(min=torch.finfo(E.dtype).tiny)  # the square of E may underflow
        ratio = float((G * unit).sum()) / max(float((E * unit).sum()), 1e-300)
        # Rounding: that of κ p and κ y before their difference, which is float32's even if G was rounded further.
        kappa = abs(ratio) * self.loss.multiple(f, y) / self.loss.likelihood.targets(f)
        rounding = 5e-7 * kappa * G.numel() ** 0.5
        residual = max(0.0, float((G - ratio * E).norm()) - rounding) / max(float(G.norm()), 1e-30)
        return replace(self, ratio=ratio, residual=residual if ratio > 0 else 1.0)


def read_targets(
    loss: Loss, output: Tensor, gradient: Tensor, given: Iterable[Tensor] = (), assumed: Sequence[float] = (1.0,)
) -> Targets | None:
    """The targets behind the gradient that a loss leaves at an output; None: they cannot be read.

    given:    targets that the loss may have been given
    assumed:  what r may be where targets do not tell, the most likely first

    >>> from bprong.likelihood.loss import declared_loss
    >>> f = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    >>> loss = declared_loss("cross_entropy")
    >>> found = read_targets(loss, f, 3 * loss.gradient(f, torch.tensor([2, 0])))
    >>> found.y.tolist(), round(found.ratio, 4)
    ([2, 0], 3.0)
    """
    likelihood = loss.likelihood
    tolerance = max(1e-4, 4 * torch.finfo(gradient.dtype).eps)
    f = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    G = gradient.detach().to(f.dtype)
    laid_out = [likelihood.laid_out(y, output) for y in given]
    known = [
        Targets(loss, y, nontrivial(mask), assumed[0])
        for y in laid_out
        if y is not None and ((mask := likelihood.not_ignored(y)) is None or bool(mask.any()))
    ]
    if not bool(G.any()):  # nothing can be read off zeros: no target counts, or all are predicted with certainty
        return known[0] if known else None
    found = [targets.fitted(f, G) for targets in known]
    if not any(one.residual <= tolerance for one in found):
        found += _hard_targets(loss, f, G, tolerance)
    best = min(found, key=lambda one: one.residual, default=None)
    if best is not None and (best.residual <= tolerance or loss.weighted):
        return best
    return _soft_targets(loss, f, G, assumed, 10 * tolerance) or best


def _hard_targets(loss: Loss, f: Tensor, G: Tensor, tolerance: float) -> list[Targets]:
    """Hard labels from the signs of G, without what label smoothing adds to G."""
    y = loss.likelihood.hard_targets(f, G)
    if y is None:
        return []
    first = Targets(loss, y, nontrivial(loss.likelihood.counted_in(f, G))).fitted(f, G)
    smoothing = loss.smoothing(f, y)
    if first.residual <= tolerance or smoothing is None:
        return [first]
    # Smoothing adds r times this, and r is not known before y is; but labels need r within a factor of two only.
    least = float(G.abs().max() / loss.gradient(f, y).abs().max())
    labels = [loss.likelihood.hard_targets(f, G - least * 2.0**i * smoothing) for i in range(8)]
    return [first, *(replace(first, y=y).fitted(f, G) for y in labels if y is not None)]


def _soft_targets(loss: Loss, f: Tensor, G: Tensor, assumed: Sequence[float], tolerance: float) -> Targets | None:
    """The targets y at which ∂(−log p) / ∂f is G / (r κ), for the first assumed r at which there are any."""
    counted = loss.likelihood.counted_in(f, G)
    part = f[counted]
    for ratio in assumed:
        kappa = ratio * loss.multiple(part, part) / loss.likelihood.targets(part)
        y = loss.likelihood.targets_behind(f, G / kappa, tolerance)
        if y is not None:
            return Targets(loss, y, nontrivial(counted), ratio, effective=True)
    return None
