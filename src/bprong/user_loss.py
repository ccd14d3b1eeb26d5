"""The user's loss as a function of the output, from the gradient G that its backward pass leaves there.

    loss = κ Σ_t w_t (−log p(y_t | f_t))         G = ∂ loss / ∂f

For logits κ, w and y can be read off G unless targets are soft throughout (`loss_scale.py`); then, and for a Gaussian,
where any κ fits some y, the loss's value is needed besides. That gives an estimate only: penalties in the loss are in
its value, and not in G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.cut import Cut
from bprong.likelihood import IGNORED, Bernoulli, Categorical, Gaussian, Likelihood
from bprong.loss_scale import (
    BELOW,
    TINY,
    VANISHED,
    customary,
    explains,
    line,
    lower_bound,
    of_each_target,
    rounded,
    tolerance,
)
from bprong.moments import widened

__all__ = ["Loss", "loss_behind"]


@dataclass(frozen=True)
class Loss:
    """κ Σ_t w_t (−log p(y_t | f_t)).

    scale     κ
    y         targets: the likelihood's own, or, for classes, distributions q (…, m); float64 where read off a gradient
    weights   w, one for each target and laid out as they are, one on average over those that count; zero: left out
    certain   whether κ was read off the gradient; if not, it rests on the loss's value or on what is customary
    at_least  κ by the loss's value alone, where a penalty in that makes it too small
    """

    likelihood: Likelihood
    scale: float
    y: Tensor
    weights: Tensor
    certain: bool
    at_least: float | None = None

    def change(self, before: Tensor, after: Tensor) -> Tensor:
        """By how much the loss changes when the output does, a penalty in it apart: one number, float64."""
        difference, w = self._nll(after) - self._nll(before), self.weights.flatten()
        return self.scale * torch.where(w == 0, 0, w * difference).sum()

    def mean(self, output: Tensor) -> float:
        """−log p of a target that counts, on average, weighted as in the loss; κ does not enter."""
        w = self.weights.flatten()
        return float((w * self._nll(output))[w != 0].mean())

    def slopes(self, output: Tensor, along: Sequence[Tensor]) -> list[float]:
        """The derivatives of that mean, weights included, when the output moves so."""
        counts = max(1, int((self.weights != 0).sum()))
        with torch.enable_grad():
            leaf = widened(output.detach()).requires_grad_()
            w = self.weights.flatten()
            (g,) = torch.autograd.grad(torch.where(w == 0, 0, w * self._each(leaf)).sum(), leaf)
        return [float((g * d).sum()) / counts for d in along]

    def cut(self, cut: Cut) -> Loss:
        """Of the examples chosen alone."""
        return replace(self, y=cut.rows(self.y), weights=cut.rows(self.weights))

    def _nll(self, output: Tensor) -> Tensor:
        return self._each(output.detach()).detach()

    def _each(self, output: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical) and self.y.is_floating_point():
            return -(self.y * widened(output).log_softmax(dim=-1)).sum(dim=-1).flatten()
        return widened(self.likelihood.nll(_precise(self.likelihood, output), self.y).flatten())


def loss_behind(
    likelihood: Likelihood,
    output: Tensor,
    gradient: Tensor,
    y: Tensor | None = None,
    value: Tensor | float | None = None,
    scale: float | None = None,
) -> Loss | None:
    """The loss that left this gradient at this output; None where too little is known to tell its scale.

    y: the data's targets, if they are known; value: the loss's, if it is; scale: κ, if it is known already

    >>> f, y = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2, 1, 1, 0])
    >>> (G,) = torch.autograd.grad(F.cross_entropy(f, y), f)
    >>> loss = loss_behind(Categorical(), f, G)
    >>> round(loss.scale, 6), loss.y.tolist()
    (0.2, [0, 2, 1, 1, 0])
    """
    f, G = (widened(t.detach()).reshape(likelihood.targets(output), -1) for t in (output, gradient))
    counted = (G != 0).any(dim=1)
    if not counted.any() or not torch.isfinite(G).all() or not torch.isfinite(f).all():
        return None
    eps, value = torch.finfo(gradient.dtype).eps, None if value is None else float(value)
    seen = _Seen(likelihood, output.detach(), f, G, counted, eps, value)
    if y is not None and scale is None:
        told = _by_targets(seen, y)
        if told is not None or not isinstance(likelihood, (Categorical, Bernoulli)):
            return told
    if isinstance(likelihood, Categorical):
        return _of_classes(seen, scale)
    if isinstance(likelihood, Bernoulli):
        return _of_bits(seen, scale)
    return _of_numbers(seen, scale) if isinstance(likelihood, Gaussian) else None


@dataclass(frozen=True)
class _Seen:
    """What there is to tell a loss by: f, G (targets, m) in float64, G rounded to eps; which targets are counted."""

    likelihood: Likelihood
    output: Tensor
    f: Tensor
    G: Tensor
    counted: Tensor
    eps: float
    value: float | None

    @property
    def customary(self) -> list[float]:
        n, m = int(self.counted.sum()), self.f.shape[1]
        return customary([n, len(self.f), len(self.output), n * m, self.f.numel()])

    def loss(self, scale: float, y: Tensor, certain: bool = True, weights: Tensor | None = None) -> Loss:
        w = self.counted.to(self.f.dtype) if weights is None else weights
        rows = self.output.ndim > 1 and self.output[..., 0].numel() == len(w)
        shape = self.output.shape[:-1] if rows else self.output.shape[:1]
        return Loss(self.likelihood, scale, y, w.view(shape), certain)


def _precise(likelihood: Likelihood, output: Tensor) -> Tensor:
    """The output in float64, unless the likelihood is the user's own, which may not know of that."""
    return widened(output) if isinstance(likelihood, (Categorical, Bernoulli, Gaussian)) else output


def _by_targets(seen: _Seen, y: Tensor) -> Loss | None:
    """κ by least squares of G on ∇(−log p(y)); None where that is not what G is made of.

    Logits leave no doubt, and may have another explanation (smoothed labels); of others it is asked to come near.
    """
    seen.likelihood.check_targets(seen.output, y)
    with torch.enable_grad():
        leaf = _precise(seen.likelihood, seen.output).clone().requires_grad_()
        (g,) = torch.autograd.grad(seen.likelihood.total_nll(leaf, y), leaf)
    counts = seen.G != 0
    g, G = widened(g).reshape(seen.G.shape)[counts], seen.G[counts]
    scale = float((G * g).sum() / g.square().sum().clamp(min=TINY))
    if isinstance(seen.likelihood, (Categorical, Bernoulli)):
        is_it = explains(scale * g, G, scale, seen.eps)
    else:
        is_it = float((G - scale * g).norm()) <= 0.1 * float(G.norm())
    return seen.loss(scale, y) if scale > 0 and is_it else None


def _of_classes(seen: _Seen, scale: float | None) -> Loss | None:
    """Hard labels, smoothed ones, weighted ones; else whatever distributions q = p − G/κ there may be."""
    p, counted = seen.f.softmax(dim=-1), seen.counted
    if scale is not None:
        return _of_distributions(seen, p, scale)
    # Of smoothed labels G itself is not least at y if p is nearly one there; p − G/κ is greatest, if κ is about right.
    bound, _ = lower_bound(seen.G, torch.where(seen.G > 0, p, 1 - p), seen.eps)
    off = (F.one_hot((p - seen.G / bound).argmax(dim=-1), p.shape[1]) == 0) & counted[:, None]
    if float(p[off].max()) < VANISHED:
        return None
    if (found := line(p[off], seen.G[off], seen.eps)) is not None:
        return _of_distributions(seen, p, found[0])
    y = seen.G.argmin(dim=-1)
    if (scales := of_each_target(p[counted], seen.G[counted], y[counted], seen.eps)) is not None:
        mean = float(scales.mean())
        weights = torch.zeros_like(p[:, 0]).masked_scatter_(counted, scales / mean)
        return seen.loss(mean, _labels(seen, y), weights=weights)
    estimate = _between(seen, p, 1 - p, [p])
    return None if estimate is None else _of_distributions(seen, p, *estimate)


def _of_distributions(seen: _Seen, p: Tensor, scale: float, certain: bool = True) -> Loss:
    """The targets q = p − G/κ, or the labels that they are."""
    q = p - seen.G / scale
    most, y = q.max(dim=-1)
    if bool((most[seen.counted] >= 1 - tolerance(seen.eps)).all()):
        return seen.loss(scale, _labels(seen, y), certain)
    return seen.loss(scale, (q.clamp(min=0) * seen.counted[:, None]).view(seen.output.shape), certain)


def _labels(seen: _Seen, y: Tensor) -> Tensor:
    return y.masked_fill(~seen.counted, IGNORED).view(seen.output.shape[:-1])


def _of_bits(seen: _Seen, scale: float | None) -> Loss | None:
    p, certain = seen.f.sigmoid(), True
    if scale is None:
        rest = (-seen.f).sigmoid()
        estimate = _between(seen, p, rest, [p, rest])
        if estimate is None:
            return None
        scale, certain = estimate
    return seen.loss(scale, (p - seen.G / scale).clamp(0, 1).view(seen.output.shape), certain)


def _of_numbers(seen: _Seen, scale: float | None) -> Loss | None:
    """G = κ (f − y), loss = κ/2 ‖f − y‖², so κ = ‖G‖² / (2 loss); a penalty in the loss makes that too small."""
    certain, estimate = scale is not None, None
    if scale is None:
        if seen.value is None or not 0 < seen.value < float("inf"):
            return None
        estimate = float(seen.G.square().sum()) / (2 * seen.value)
        scale = rounded(estimate, seen.customary) or estimate
    loss = seen.loss(scale, (seen.f - seen.G / scale).view(seen.output.shape), certain)
    return replace(loss, at_least=estimate)


def _between(seen: _Seen, p: Tensor, rest: Tensor, outcomes: list[Tensor]) -> tuple[float, bool] | None:
    """κ of a loss of logits, and whether it is certain; rest = 1 − p, outcomes: the probabilities of all there are.

    A lower bound that many elements share is κ. Otherwise it comes from the loss's value, since loss − ⟨G, f⟩ = κ Σ
    entropy(p); with a penalty that is an upper bound, so what is customary between the two bounds is preferred. Without
    a value, or with one that contradicts the bound, there is but what is customary just above it.
    """
    bound, shared = lower_bound(seen.G, torch.where(seen.G > 0, p, rest), seen.eps)
    if shared:
        return bound, True
    known, entropy = seen.customary, sum(float(torch.special.entr(q[seen.counted]).sum()) for q in outcomes)
    estimate = -1.0 if seen.value is None else (seen.value - float((seen.G * seen.f).sum())) / max(entropy, TINY)
    if bound * (1 - tolerance(seen.eps)) <= estimate < float("inf"):
        between = [kappa for kappa in known if bound <= kappa <= estimate]
        return rounded(estimate, known) or (between[-1] if between else estimate), False
    above = rounded(bound, known, BELOW)
    return None if above is None else (above, False)
