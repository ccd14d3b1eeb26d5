"""The user's loss as a function of the output, read off the gradient G that its backward pass leaves there.

    loss = κ Σ_t w_t (−log p(y_t | f_t))         G = ∂ loss / ∂f

For logits G determines κ, w and y unless all targets are soft (`loss_scale.py`). If they are, and for a Gaussian, where
every κ fits some y, the value of the loss is needed too. κ is then an estimate only, because penalties in the loss
change its value and not G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.linalg.moments import to_float64

if TYPE_CHECKING:
    from bprong.likelihood.families import Likelihood

IGNORED = -100  # the class index that torch's losses ignore by default
NEAR = 0.01  # relative error within which an estimate is rounded to a customary κ
BELOW = 0.25  # how far a lower bound may be below a customary κ, relative to it, to be rounded up to it
TINY = 1e-300  # keeps denominators above zero
VANISHED = 1e-20  # single precision rounds a smaller probability, multiplied by κ, to zero


@dataclass(frozen=True)
class Loss:
    """κ Σ_t w_t (−log p(y_t | f_t)).

    scale     κ
    y         targets: the likelihood's own, or, for classes, distributions q (…, m); float64 if read off a gradient
    weights   (targets,) w, one on average over the targets counted; zero: ignored
    certain   whether κ was read off the gradient; if not, it comes from the loss's value or is a customary one
    at_least  κ from the loss's value alone, which is too small if the loss has a penalty
    """

    likelihood: Likelihood
    scale: float
    y: Tensor
    weights: Tensor
    certain: bool
    at_least: float | None = None

    def mean(self, output: Tensor) -> float:
        """The mean of w_t (−log p) over the targets that count; it does not depend on κ."""
        nll = self._nll(_leaf(self.likelihood, output)).detach()
        return float((self.weights * nll)[self.weights != 0].mean())

    def slopes(self, output: Tensor, along: Sequence[Tensor]) -> list[float]:
        """The derivatives of that mean along changes of the output."""
        counted = self.weights != 0
        with torch.enable_grad():
            leaf = _leaf(self.likelihood, output)
            (g,) = torch.autograd.grad(torch.where(counted, self.weights * self._nll(leaf), 0).sum(), leaf)
        return [float((g * d).sum()) / max(1, int(counted.sum())) for d in along]

    def select(self, rows: Callable[[Tensor], Tensor]) -> Loss:
        """The loss on some of the examples; rows: selects their rows of a tensor."""
        return replace(self, y=rows(self.y), weights=rows(self.weights))

    def _nll(self, output: Tensor) -> Tensor:
        """−log p of each target, (targets,), float64."""
        return to_float64(self.likelihood.nll(output, self.y).flatten())


@dataclass(frozen=True)
class Observation:
    """What the user's backward pass shows of a loss.

    f, G      the output and its gradient, (targets, m), float64
    counted   which targets have a gradient, (targets,)
    eps       the rounding error of the gradient before it was converted to float64
    value     the value of the loss; None: unknown
    """

    likelihood: Likelihood
    output: Tensor
    f: Tensor
    G: Tensor
    counted: Tensor
    eps: float
    value: float | None

    def loss(self, scale: float, y: Tensor, certain: bool = True, weights: Tensor | None = None) -> Loss:
        """The loss of this scale and these targets; weights: one for each target, by default 1 for those counted."""
        return Loss(self.likelihood, scale, y, self.counted.to(self.f.dtype) if weights is None else weights, certain)


def customary_scales(likelihood: Likelihood, output: Tensor, counted: int) -> list[float]:
    """κ of sums, and of means over targets, examples or elements, of −log p or of twice −log p (squared errors).

    counted: the number of targets that the loss counts
    """
    targets = likelihood.targets(output)
    counts = {1, counted, targets, len(output), counted * (output.numel() // targets), output.numel()}
    return sorted({factor / count for factor in (1, 2) for count in counts})


def loss_behind(
    likelihood: Likelihood,
    output: Tensor,
    gradient: Tensor,
    y: Tensor | None = None,
    value: Tensor | float | None = None,
    scale: float | None = None,
) -> Loss | None:
    """The loss that has this gradient at this output; None if what is known does not determine its scale.

    y:     the data's targets, if they are known
    value: the value of the loss, if it is known
    scale: κ, if it is known already

    >>> from bprong.likelihood.families import Categorical
    >>> f = torch.randn(5, 3, requires_grad=True)
    >>> (G,) = torch.autograd.grad(F.cross_entropy(f, torch.tensor([0, 2, 1, 1, 0])), f)
    >>> loss = loss_behind(Categorical(), f, G)
    >>> round(loss.scale, 6), loss.y.tolist()
    (0.2, [0, 2, 1, 1, 0])
    """
    f = to_float64(output.detach()).reshape(likelihood.targets(output), -1)
    G = to_float64(gradient.detach()).reshape(f.shape)
    counted = (G != 0).any(dim=1)
    if not counted.any() or not torch.isfinite(G).all() or not torch.isfinite(f).all():
        return None
    seen = Observation(
        likelihood, output.detach(), f, G, counted,
        eps=torch.finfo(gradient.dtype).eps, value=None if value is None else float(value),
    )  # fmt: skip
    if y is not None and scale is None:
        found = _loss_of_targets(seen, y)
        if found is not None or not likelihood.scale_in_gradient:
            return found
    return likelihood.loss_from_gradient(seen, scale)


def _leaf(likelihood: Likelihood, output: Tensor) -> Tensor:
    """A leaf of a new autograd graph with the values of the output, in float64 if the likelihood accepts that."""
    return (to_float64(output) if likelihood.takes_float64 else output).detach().clone().requires_grad_()


def _loss_of_targets(seen: Observation, y: Tensor) -> Loss | None:
    """The loss with known targets: κ by least squares of G on ∇(−log p(y)); None if that does not explain G.

    If the gradient determines κ, the fit must be exact to rounding, because there may be another explanation (smoothed
    labels). Otherwise it may leave a tenth of G unexplained.
    """
    seen.likelihood.check_targets(seen.output, y)
    with torch.enable_grad():
        leaf = _leaf(seen.likelihood, seen.output)
        (g,) = torch.autograd.grad(seen.likelihood.total_nll(leaf, y), leaf)
    g = to_float64(g).reshape(seen.G.shape)[seen.G != 0]
    G = seen.G[seen.G != 0]
    scale = float((G * g).sum() / g.square().sum().clamp(min=TINY))
    fits = (
        explains(scale * g, G, scale, seen.eps)
        if seen.likelihood.scale_in_gradient
        else float((G - scale * g).norm()) <= 0.1 * float(G.norm())
    )
    return seen.loss(scale, y) if scale > 0 and fits else None


def loss_of_classes(seen: Observation, scale: float | None) -> Loss | None:
    """A cross-entropy of hard, smoothed or weighted labels; if none of these fits, of the distributions q = p − G/κ."""
    p = seen.f.softmax(dim=-1)
    if scale is not None:
        return _loss_of_distributions(seen, p, scale)
    # With smoothed labels G is not least at y if p is nearly one there, but p − G/κ is greatest there for a rough κ.
    bound, _ = lower_bound(seen.G, torch.where(seen.G > 0, p, 1 - p), seen.eps)
    off = (F.one_hot((p - seen.G / bound).argmax(dim=-1), p.shape[1]) == 0) & seen.counted[:, None]
    if float(p[off].max()) < VANISHED:
        return None
    if (slope := slope_of_line(p[off], seen.G[off], seen.eps)) is not None:
        return _loss_of_distributions(seen, p, slope)
    y = seen.G.argmin(dim=-1)
    scales = scale_of_each_target(p[seen.counted], seen.G[seen.counted], y[seen.counted], seen.eps)
    if scales is not None:
        weights = torch.zeros_like(p[:, 0]).masked_scatter_(seen.counted, scales / scales.mean())
        return seen.loss(float(scales.mean()), _labels(seen, y), weights=weights)
    estimate = _estimated_scale(seen, p, 1 - p, [p])
    return None if estimate is None else _loss_of_distributions(seen, p, *estimate)


def _loss_of_distributions(seen: Observation, p: Tensor, scale: float, certain: bool = True) -> Loss:
    """The loss with targets q = p − G/κ, or with class indices if every q is one-hot."""
    q = p - seen.G / scale
    most, y = q.max(dim=-1)
    if bool((most[seen.counted] >= 1 - tolerance(seen.eps)).all()):
        return seen.loss(scale, _labels(seen, y), certain)
    return seen.loss(scale, (q.clamp(min=0) * seen.counted[:, None]).view(seen.output.shape), certain)


def _labels(seen: Observation, y: Tensor) -> Tensor:
    return y.masked_fill(~seen.counted, IGNORED).view(seen.output.shape[:-1])


def loss_of_bits(seen: Observation, scale: float | None) -> Loss | None:
    """A binary cross-entropy with targets y = p − G/κ."""
    p = seen.f.sigmoid()
    rest = (-seen.f).sigmoid()
    estimate = _estimated_scale(seen, p, rest, [p, rest]) if scale is None else (scale, True)
    if estimate is None:
        return None
    y = (p - seen.G / estimate[0]).clamp(0, 1)
    return seen.loss(estimate[0], y.view(seen.output.shape), estimate[1])


def loss_of_numbers(seen: Observation, scale: float | None) -> Loss | None:
    """A squared error: G = κ (f − y) and loss = κ/2 ‖f − y‖², so κ = ‖G‖² / (2 loss); a penalty makes it too small."""
    if scale is not None:
        return seen.loss(scale, (seen.f - seen.G / scale).view(seen.output.shape))
    if seen.value is None or not 0 < seen.value < float("inf"):
        return None
    estimate = float(seen.G.square().sum()) / (2 * seen.value)
    scale = rounded(estimate, customary_scales(seen.likelihood, seen.output, int(seen.counted.sum()))) or estimate
    return replace(
        seen.loss(scale, (seen.f - seen.G / scale).view(seen.output.shape), certain=False), at_least=estimate
    )


def _estimated_scale(seen: Observation, p: Tensor, rest: Tensor, outcomes: list[Tensor]) -> tuple[float, bool] | None:
    """κ of a loss of logits, and whether it is certain; rest: 1 − p, outcomes: the probabilities of all outcomes.

    A lower bound that many elements attain is κ. Otherwise κ comes from the loss's value, since loss − ⟨G, f⟩ =
    κ Σ entropy(p). A penalty makes that an upper bound, so a customary κ between both bounds is preferred. Without a
    value, or with one that contradicts the lower bound, only a customary κ just above the lower bound is left.
    """
    bound, attained = lower_bound(seen.G, torch.where(seen.G > 0, p, rest), seen.eps)
    if attained:
        return bound, True
    known = customary_scales(seen.likelihood, seen.output, int(seen.counted.sum()))
    entropy = sum(float(torch.special.entr(q[seen.counted]).sum()) for q in outcomes)
    estimate = -1.0 if seen.value is None else (seen.value - float((seen.G * seen.f).sum())) / max(entropy, TINY)
    if bound * (1 - tolerance(seen.eps)) <= estimate < float("inf"):
        between = (kappa for kappa in known if bound <= kappa <= estimate)
        return rounded(estimate, known) or max(between, default=estimate), False
    above = rounded(bound, known, BELOW)
    return None if above is None else (above, False)


# κ from probabilities p and the gradient G = κ (p − y) at their logits ------------------------------------------------
# As 0 ≤ y ≤ 1, κ is at least G/p and −G/(1−p) for every element, with equality where y is 0 or 1.


def tolerance(eps: float) -> float:
    """The relative error up to which a gradient of this precision counts as explained."""
    return max(1e-4, 4 * eps)


def explains(explanation: Tensor, G: Tensor, scale: float, eps: float) -> bool:
    """Whether G equals its explanation up to rounding: that of G, and that of κ p and κ y before their difference.

    The latter is float32's even where autocast has rounded G to less, because losses are computed in float32.
    """
    rounding = 4 * min(eps, 1.2e-7) * scale * math.sqrt(G.numel())
    return float((G - explanation).norm()) <= tolerance(eps) * float(G.norm()) + rounding


def slope_of_line(p: Tensor, G: Tensor, eps: float) -> float | None:
    """κ from G = κ (p − q) with one q ≥ 0 for all elements, so that G is a line in p; None if it is not.

    Labels smoothed by ε have q = ε/m for every class but y, and hard labels have q = 0. If p is constant too, as in a
    network whose last layer starts at zero, q cannot be told from a smaller κ; q = 0 is then assumed, as it is for
    three points or fewer.

    >>> p = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
    >>> round(slope_of_line(p, 3 * (p - 0.02), eps=1e-16), 9)
    3.0
    """
    spread = p - p.mean()
    if float(spread.norm()) <= 50 * eps * float(p.norm()) or p.numel() <= 3:
        spread = p
    scale = float((spread * G).sum() / spread.square().sum().clamp(min=TINY))
    q = 0.0 if spread is p else float(p.mean() - G.mean() / (scale or TINY))
    return scale if scale > 0 and q > -tolerance(eps) and explains(scale * (p - q), G, scale, eps) else None


def scale_of_each_target(p: Tensor, G: Tensor, y: Tensor, eps: float) -> Tensor | None:
    """κ of each target, (targets,), if targets have the hard labels y and the loss weights them; else None.

    p, G: (targets, m). With two classes every gradient of one target looks like that of a hard label, so weights are
    required to depend on the class only.
    """
    off = torch.ones_like(G).scatter_(1, y[:, None], 0)
    scales = (G * p * off).sum(dim=1) / (p.square() * off).sum(dim=1).clamp(min=TINY)
    expected = torch.stack([scales[y == k].mean() for k in range(2)])[y] if p.shape[1] == 2 else scales
    return scales if explains(expected[:, None] * p * off, G * off, float(scales.mean()), eps) else None


def lower_bound(G: Tensor, room: Tensor, eps: float) -> tuple[float, bool]:
    """The least κ with |G| ≤ κ · room for all elements, and whether at least a twentieth of the elements attain it.

    room: how far p can move in the direction of −G: p or 1 − p. If many elements attain the bound, their targets are 0
    or 1, and the bound is κ.
    """
    reliable = room > 1e-3  # p − 1 has lost its digits where p is nearly one
    ratio = (G.abs() / room.clamp(min=TINY)).where(reliable | ~reliable.any(), 0)
    rounding = min(4 * eps / 1e-3, 3e-4 + 2 * eps)
    attained = ratio >= (1 - rounding) * ratio.max()
    bound = float(G[attained].abs().sum() / room[attained].sum().clamp(min=TINY))
    return bound, int(attained.sum()) >= max(3, 0.05 * int((ratio > 0).sum()))


def rounded(scale: float, known: Iterable[float], below: float = NEAR) -> float | None:
    """The nearest customary κ, if the estimate is at most `below` under it or a hundredth above it; else None.

    >>> rounded(0.0998, [1.0, 0.1, 0.01]), rounded(0.08, [1.0, 0.1], below=0.25), rounded(0.08, [1.0, 0.1])
    (0.1, 0.1, None)
    """
    near = [kappa for kappa in known if (1 - below) * kappa <= scale <= (1 + NEAR) * kappa]
    return min(near, key=lambda kappa: abs(kappa - scale), default=None)
