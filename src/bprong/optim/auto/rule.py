"""The rule behind lr="auto", numbers in and numbers out: how far to go, and how much to damp.

    d = α Δ + β Δ_Adam + μ Δ₀       minimises       M(d) = ½ dᵀ (F + λ) d + ∇Lᵀ d

Δ is the whitened direction, Δ_Adam that of parameters no whitener covers, Δ₀ the last update; dᵀFd comes from
forward-mode AD (Martens & Grosse 2015, section 6). These measures make it safe at every batch size (docs/auto.md):

- Trust: the slope along Δ is multiplied by s ≤ 1. Δ contains the noise of its own batch, so ∇LᵀΔ promises a larger
  decrease than other data show; the gradient of the next batch tells how much larger.
- Bounds: the step's ½dᵀFd, by how much the predictions change, is at most a part of the loss; −α ∇LᵀΔ is at most twice
  the loss.
- Damping: λ, split between Ž and D by their mean eigenvalues, doubles if the loss fell by less than a quarter of what
  the model predicted, and falls slowly if the prediction was good; on a plateau, where λ alone limits the step, fast.
- Averages: α, β and μ are averaged over evaluations: at the first ten steps, at every tenth, later as run time allows.
- Undo: if the loss blew up, the last update is undone, and the next ones go less far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bprong.linalg.factors import Damping
from bprong.linalg.quadratic import Array, minimiser
from bprong.optim.auto.evaluation import Evaluation
from bprong.optim.auto.settings import SETTINGS, AutoSettings, AutoState, Parts
from bprong.whitening.layer import Layer, Side


@dataclass
class AutoRule(AutoState):
    """Chooses the coefficients of a step and the damping from measured numbers, and remembers them (`AutoState`).

    damping_given:  the user set the damping, so that λ must not change it
    most:           the user's max_step, as ½dᵀFd
    nll_bounded:    −log p is known including its constant and not negative, so that a share of it can bound a step
    """

    damping_given: bool = False
    most: float = math.inf
    nll_bounded: bool = True
    settings: AutoSettings = SETTINGS

    def evaluates(self, t: int) -> bool:
        """Whether the quadratic model is evaluated at step t: always while less than the whole bound is allowed."""
        every = self.settings.evaluate_every
        period = every if self.period is None or t < 10 * every else max(every, self.period)
        cautious = self.caution < 1 and self.loss is not None
        return t < self.evaluate_until or cautious or t % period == 0

    # Damping ----------------------------------------------------------------------------------------------------------

    def damping(self, layer: Layer, side: Side) -> Damping | None:
        """λ's part in a side: ε₁ε₂ = λ, in the proportion of the sides' mean eigenvalues; more if observations are few.

        None if the user set the damping, or before the side was measured.
        """
        if self.damping_given or side.mean_eigenvalue is None:
            return None
        forward = layer.forward.mean_eigenvalue or 0.0
        backward = layer.backward.mean_eigenvalue
        z = forward if forward > 0 else 1.0
        d = 1.0 if backward is None else max(backward, self.settings.negligible * self.lam)
        observations = side.observations if backward is None else layer.backward.observations
        sampling = self.settings.sampling * side.blocks.size * side.blocks.count / observations
        if not side.of_inputs:
            return Damping(math.sqrt(self.lam * d / z) + sampling * d)
        epsilon = math.sqrt(self.lam * z / d) + (0.0 if layer.linear.one_hot else sampling * z)
        return Damping(epsilon)

    def update_damping(self, found: Evaluation, c: Parts, change: float) -> bool:
        """Adapts λ to what the loss did. False: it rose so much, or is not finite, that the step is to be undone."""
        coefficients = np.array(list(c.values()))
        Q = np.asarray(found.Q)
        predicted = float(np.asarray(found.slopes) @ coefficients + coefficients @ Q @ coefficients / 2)
        self.ratio = change / predicted if predicted < 0 else None
        good = math.isfinite(change) and change <= 2 * self._bound()
        self.caution = min(1.0, 2 * self.caution) if good else self.caution
        if not good or (self.ratio is not None and self.ratio < 1 - self.settings.well):
            self.lam *= self.settings.raise_lambda
        elif self.ratio is not None and self.ratio > self.settings.well:
            plateau = self.curvature_ratio < self.settings.negligible
            self.lam /= self.settings.raise_lambda**2 if plateau else self.settings.lower_lambda
        self.lam = min(max(self.lam, 1e-30), 1e30)  # far beyond what matters: it must not vanish in long runs
        return good

    # Coefficients -----------------------------------------------------------------------------------------------------

    def update_trust(self, slope: float) -> None:
        """Compares the next batch's slope along the Δ of the last evaluation with what that batch promised."""
        keep = self.settings.keep
        self.slope_kept = keep * self.slope_kept + (1 - keep) * (self.slope_change - slope)
        self.slope_promised = keep * self.slope_promised - (1 - keep) * self.slope
        if slope < 0:  # the next batch would have gone further
            fast = min(self.settings.raise_lambda * self.brake, self.brake_safe)
            self.brake = min(1.0, max(fast, self.settings.raise_lambda**0.25 * self.brake))

    @property
    def trust(self) -> float:
        """s: how much of a slope along Δ other data confirm."""
        return min(1.0, max(self.settings.least_trust, self.slope_kept / max(self.slope_promised, 1e-300)))

    def choose(
        self, t: int, slopes: Parts, found: Evaluation | None, metric: tuple[Tensor, Tensor] | None, lr: float = 1.0
    ) -> Parts:
        """The coefficients of a step.

        slopes: of the loss along the directions, penalty included; between evaluations that of Δ alone is needed
        found:  the evaluation of this step; None: the coefficients of the last one hold
        metric: (k, k) the products of the directions, which λ multiplies, and the curvature of the penalty
        lr:     the group's lr, a multiplier on α and β
        """
        if found is not None:
            self._note_loss(found)
        if found is not None and metric is not None and any(slopes.values()):
            return self._evaluated(t, slopes, found, metric, lr)
        # Between evaluations, or at a gradient of zero, which says nothing.
        c = {name: x * (1.0 if name == "last" else lr) for name, x in self.coefficients.items()}
        length = self._estimated_length(c, slopes)
        part = self._allowed_part(c.get("whitened", 0.0), length, slopes["whitened"])
        self.length = length * part**2
        return {name: x * part for name, x in c.items()}

    def _evaluated(self, t: int, slopes: Parts, found: Evaluation, metric: tuple[Tensor, Tensor], lr: float) -> Parts:
        """The coefficients that minimise the quadratic model, averaged and within the bounds."""
        Q = np.asarray(found.Q)
        G, penalty = (np.asarray(products) for products in metric)
        self.slope = slopes["whitened"]
        b = np.array(list(slopes.values()))
        b[0] *= self.trust * self.brake
        limits = {"last": self.settings.most_momentum, "adam": self.settings.most_fallback}
        upper_bounds = [limits.get(name, math.inf) for name in slopes]
        c = self._allowed(minimiser(Q + penalty + self.lam * G, b, upper_bounds), Q)
        if t >= self.evaluate_until:
            c = self._averaged(list(slopes), c)
        self.coefficients = dict(zip(slopes, c.tolist(), strict=True))
        c = self._allowed(c * np.array([1.0 if name == "last" else lr for name in slopes]), Q)
        self.curvature = dict(zip(slopes, Q.diagonal().tolist(), strict=True))
        self.length = float(c @ Q @ c) / 2
        self.slope_change = float((Q + penalty)[0] @ c)
        self.curvature_ratio = 2 * self.length / max(self.lam * float(c @ G @ c), 1e-300)
        return dict(zip(slopes, c.tolist(), strict=True))

    def _averaged(self, names: list[str], c: Array) -> Array:
        """The average of c with the coefficients before. α is clamped first, and afterwards at most twice its value."""
        before = np.array([self.coefficients.get(name, x) for name, x in zip(names, c.tolist(), strict=True)])
        if before[0] > 0:  # α of one batch may be an outlier, for example if the batch is fitted already
            c[0] = min(max(c[0], self.settings.cautious * before[0]), before[0] / self.settings.cautious)
        mean = self.settings.keep * before + (1 - self.settings.keep) * c
        mean[0] = min(float(mean[0]), 2 * float(c[0]))  # a small α of this batch counts at once
        return mean

    def _note_loss(self, found: Evaluation) -> None:
        """Averages the loss. Small batches keep more of the average, so that together they count as one large one."""
        if found.loss is None or not math.isfinite(found.loss):
            self.ratio = None
            return
        keep = max(1 - found.targets / self.settings.evaluated_least, self.settings.keep)
        self.loss = found.loss if self.loss is None else keep * self.loss + (1 - keep) * found.loss

    # Bounds -----------------------------------------------------------------------------------------------------------

    def _allowed(self, c: Array, Q: Array) -> Array:
        return c * self._allowed_part(float(c[0]), float(c @ Q @ c) / 2, self.slope)

    def _allowed_part(self, alpha: float, length: float, slope: float) -> float:
        """The part of a step that keeps ½dᵀFd within its bound, and −α ∇LᵀΔ within twice the loss.

        The minimum of a quadratic model decreases it by half of −α ∇LᵀΔ, and the loss cannot fall below zero. A slope
        that promises more comes from something that F does not describe.
        """
        bound = self._bound() * self.caution
        part = math.sqrt(bound / length) if length > bound else 1.0
        promised = -alpha * part * slope
        loss = self._bounding_loss()
        return part * 2 * loss / promised if promised > 2 * loss else part

    def _bound(self) -> float:
        """The bound on ½dᵀFd."""
        loss = self._bounding_loss()
        bound = self.settings.bound_nats
        if math.isfinite(loss):
            bound = max(self.settings.bound_share * loss, min(bound, self.settings.bound_late * loss))
        return min(bound, self.most)

    def _bounding_loss(self) -> float:
        """The averaged loss; infinite if it is unknown, or if its least value is."""
        return self.loss if self.loss is not None and self.loss >= 0 and self.nll_bounded else math.inf

    def _estimated_length(self, c: Parts, slopes: Parts) -> float:
        """½dᵀFd between evaluations: curvature along Δ goes with its slope, along Δ₀ with that of the last step."""
        steeper = max(0.0, slopes["whitened"] / min(self.slope, -1e-300))
        whitened = c.get("whitened", 0.0) ** 2 * (self.curvature.get("whitened", 0.0) * steeper) / 2
        adam = c.get("adam", 0.0) ** 2 * self.curvature.get("adam", 0.0) / 2
        return whitened + c.get("last", 0.0) ** 2 * self.length + adam

    # Undoing ----------------------------------------------------------------------------------------------------------

    def blew_up(self, loss: float) -> bool:
        """Whether the loss of the whole batch, which evaluations do not see at every step, is far above the first."""
        self.first_loss = loss if self.first_loss is None else self.first_loss
        return loss > self.settings.blow_up * max(self.first_loss, self.loss or 0.0) and self.first_loss > 0

    def undone(self, t: int) -> None:
        """After step t was undone: the next starts without momentum and goes less far, and more steps are evaluated."""
        bound = self._bound()
        part = self.settings.cautious
        self.evaluate_until = t + 1 + self.settings.evaluate_every
        self.caution = max(1e-6, part * self.length / bound) if bound > 0 else part
        self.brake_safe = self.brake / 2
        self.brake *= part
        self.coefficients = {name: x / 2 for name, x in self.coefficients.items()}
        self.length = 0.0
