"""The rule behind lr="auto", numbers in and numbers out: how far to go, and how much to damp.

    d = α Δ + β Δ_Adam + μ Δ₀       minimises       M(d) = ½ dᵀ (F + λ) d + ∇Lᵀ d

Δ is the whitened direction, Δ_Adam that of parameters no whitener covers, Δ₀ the last update; dᵀFd comes from
forward-mode AD (Martens & Grosse 2015, section 6). These measures make it safe at every batch size (docs/auto.md):

- The slope along Δ is multiplied by a trust s ≤ 1. Δ contains the noise of its own batch, so ∇LᵀΔ promises a larger
  decrease than other data show; the gradient of the next batch tells how much larger.
- The step's ½dᵀFd, by how much the predictions change, is bounded by a share of the loss; and α ∇LᵀΔ by twice the loss,
  since the minimum of a quadratic model decreases it by half of that.
- λ, split between Ž and D by their mean eigenvalues, doubles if the loss fell by less than a quarter of what the model
  predicted, falls slowly if the prediction was good, and stays within bounds. On a plateau, where λ alone limits the
  step, it falls fast and without a lower bound.
- α and μ are averaged over evaluations, which are made at every tenth step after the first twenty.
- If the loss blew up, the last update is undone, the next goes a quarter as far, and twenty steps are all evaluated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bprong.linalg.damped_inverse import Damping
from bprong.linalg.quadratic import minimiser
from bprong.optim.auto.evaluation import ENOUGH_EXAMPLES, Evaluation
from bprong.optim.auto.settings import SETTINGS, AutoSettings, AutoState, Parts
from bprong.whitening.layers import Layer
from bprong.whitening.side import Side


@dataclass
class AutoRule(AutoState):
    """Chooses the coefficients of a step and the damping from measured numbers, and remembers them (`AutoState`).

    damping_given:  the user set the damping, so that λ must not change it
    bound:          the user's max_step, as ½dᵀFd
    nll_bounded:    −log p is known including its constant and not negative, so that a share of it can bound a step
    """

    damping_given: bool = False
    bound: float = math.inf
    nll_bounded: bool = True
    settings: AutoSettings = SETTINGS

    def evaluates(self, t: int) -> bool:
        """Whether the quadratic model is evaluated at step t."""
        early = self.settings.early_until
        return (
            t < max(early // 2, self.evaluate_until)
            or (t < early and t % 2 == 0)
            or t % self.settings.evaluate_every == 0
        )

    @property
    def slope_trust(self) -> float:
        """s: how much of a slope along Δ other data confirm."""
        return min(1.0, max(self.settings.lowest_trust, self.slope_kept / max(self.slope_promised, 1e-300)))

    # Damping ----------------------------------------------------------------------------------------------------------

    def damping(self, layer: Layer, side: Side) -> Damping | None:
        """λ's part in a side: ε₁ε₂ = λ, in the proportion of the sides' mean eigenvalues; more if observations are few.

        None if the user set the damping, or before the side was measured.
        """
        if self.damping_given or side.mean_eigenvalue is None:
            return None
        relative = layer.name in self.badly_scaled
        forward = layer.forward.mean_eigenvalue or 0.0
        backward = layer.backward.mean_eigenvalue
        z = forward if forward > 0 and not relative else 1.0
        d = 1.0 if backward is None else max(backward, self.settings.faint_errors * self.lam)
        observations = side.observations if backward is None else layer.backward.observations
        sampling = self.settings.sampling_damping * side.blocks.size * side.blocks.count / observations
        if not side.of_inputs:
            return Damping(math.sqrt(self.lam * d / z) + sampling * d)
        epsilon = math.sqrt(self.lam * z / d) + (0.0 if layer.linear.one_hot else sampling * z)
        return Damping(epsilon, "variance" if relative else "one")

    def update_damping(self, found: Evaluation, c: Parts, change: float) -> bool:
        """Adapts λ to what the loss did. False: it rose so much, or is not finite, that the step is to be undone."""
        coefficients = torch.tensor(list(c.values()), dtype=torch.float64, device="cpu")
        predicted = float(found.slopes @ coefficients + coefficients @ found.Q @ coefficients / 2)
        self.ratio = change / predicted if predicted < 0 else None
        good = math.isfinite(change) and change <= 2 * self._full_bound()
        if good and self.bound_part is not None:
            self.bound_part = 2 * self.bound_part if self.bound_part < 0.5 else None
        if not good or (self.ratio is not None and self.ratio < self.settings.predicted_badly):
            self.lam = min(self.settings.highest_lambda, self.lam * self.settings.raise_lambda)
        elif self.ratio is not None and self.ratio > self.settings.predicted_well:
            self.lam = self._lowered(self.lam)
        return good

    def _lowered(self, lam: float) -> float:
        """λ after a good prediction. On a plateau it has no lower bound, and returns to it afterwards."""
        if self.curvature_ratio < self.settings.plateau_ratio:
            return lam / self.settings.lower_lambda_on_plateau
        if lam >= self.settings.lowest_lambda:
            return max(self.settings.lowest_lambda, lam / self.settings.lower_lambda)
        return self.settings.raise_lambda * lam if self.curvature_ratio > 1 else lam

    # Coefficients -----------------------------------------------------------------------------------------------------

    def update_slope_trust(self, slope: float) -> None:
        """Compares the next batch's slope along the Δ of the last evaluation with what that batch promised."""
        keep = self.settings.keep_slopes
        self.slope_kept = keep * self.slope_kept + (1 - keep) * (self.slope_change - slope)
        self.slope_promised = keep * self.slope_promised - (1 - keep) * self.slope

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
            self._note_loss(t, found)
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
        names = list(slopes)
        Q = found.Q
        G, penalty = metric
        b = torch.tensor(list(slopes.values()), dtype=torch.float64, device="cpu")
        self.slope = slopes["whitened"]
        self.curvature = dict(zip(names, Q.diagonal().tolist(), strict=True))
        b[0] *= self.slope_trust
        most = {"last": self.settings.highest_momentum, "adam": self.settings.highest_fallback}
        c = minimiser(Q + penalty + self.lam * G, b, [most.get(name, math.inf) for name in names])
        c = c * self._allowed_part(float(c[0]), float(c @ Q @ c) / 2, self.slope)
        if t >= self.settings.early_until:
            c = self._averaged(names, c)
        self.coefficients = dict(zip(names, c.tolist(), strict=True))
        c = c * c.new_tensor([1.0 if name == "last" else lr for name in names])
        c = c * self._allowed_part(float(c[0]), float(c @ Q @ c) / 2, self.slope)
        self.length = float(c @ Q @ c) / 2
        self.slope_change = float((Q + penalty)[0] @ c)
        self.curvature_ratio = 2 * self.length / max(self.lam * float(c @ G @ c), 1e-300)
        return dict(zip(names, c.tolist(), strict=True))

    def _averaged(self, names: list[str], c: Tensor) -> Tensor:
        """The average of c with the coefficients before; α is clamped first, and afterwards at most twice its value."""
        old = c.new_tensor([self.coefficients.get(name, x) for name, x in zip(names, c.tolist(), strict=True)])
        if old[0] > 0:  # α of one batch may be an outlier, for example if the batch is fitted already
            c[0] = c[0].clamp(old[0] / self.settings.highest_surprise, old[0] * self.settings.highest_surprise)
        mean = self.settings.keep_coefficients * old + (1 - self.settings.keep_coefficients) * c
        mean[0] = min(float(mean[0]), 2 * float(c[0]))  # a small α of this batch counts at once
        return mean

    def _note_loss(self, t: int, found: Evaluation) -> None:
        """Averages the loss. Small batches keep more of the average, so that together they count as one large one."""
        if found.loss is None:
            self.ratio = None
            return
        steps = 1 if t < self.settings.early_until else self.settings.evaluate_every
        keep = max(1 - found.examples / ENOUGH_EXAMPLES, self.settings.keep_loss**steps)
        self.loss = found.loss if self.loss is None else keep * self.loss + (1 - keep) * found.loss
        self.bound_part = self.settings.first_step if t == 0 else self.bound_part

    def rescale(self, factor: float) -> None:
        """Corrects what was measured with a scale of the loss that has turned out to be too large by this factor."""
        self.slope *= factor
        self.loss = None if self.loss is None else self.loss * factor**2

    # Bounds -----------------------------------------------------------------------------------------------------------

    def _allowed_part(self, alpha: float, length: float, slope: float) -> float:
        """The part of a step that keeps ½dᵀFd within its bound and α ∇LᵀΔ within what the loss allows.

        F does not contain penalties in the loss, which could make the promised decrease arbitrarily large.
        """
        bound = self._full_bound() * (1.0 if self.bound_part is None else self.bound_part)
        part = math.sqrt(bound / length) if length > bound else 1.0
        if self.loss is None or not self.nll_bounded:
            return part
        loss = self.last_loss if self.last_loss > self.settings.blow_up * self.loss else self.loss
        most = self.settings.highest_promise * loss
        promised = -alpha * part * slope
        return part * most / promised if promised > most else part

    def _full_bound(self) -> float:
        """The bound on ½dᵀFd."""
        own = self.settings.bound_nats
        if self.loss is not None and self.nll_bounded:
            own = max(self.settings.bound_share * self.loss, min(own, self.settings.bound_late * self.loss))
        return min(own, self.bound)

    def _estimated_length(self, c: Parts, slopes: Parts) -> float:
        """½dᵀFd between evaluations: curvature along Δ goes with its slope, along Δ₀ with that of the last step."""
        steeper = max(0.0, slopes["whitened"] / min(self.slope, -1e-300))
        whitened = c.get("whitened", 0.0) ** 2 * (self.curvature.get("whitened", 0.0) * steeper) / 2
        adam = c.get("adam", 0.0) ** 2 * self.curvature.get("adam", 0.0) / 2
        return whitened + c.get("last", 0.0) ** 2 * self.length + adam

    # Undoing ----------------------------------------------------------------------------------------------------------

    def blew_up(self, loss: float) -> bool:
        """Notes the value of the user's loss, and says whether it is far above where it began.

        Evaluations see a part of a batch, not every step, and nothing in a loss beside −log p.
        """
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        return loss > self.settings.blow_up * max(self.first_loss, self.loss or 0.0) and self.first_loss > 0

    def undone(self, t: int) -> None:
        """After step t was undone: the next starts without momentum, goes less far, and more steps are evaluated."""
        bound = self._full_bound()
        self.evaluate_until = t + 1 + self.settings.evaluated_after_undo
        self.bound_part = max(self.settings.smallest_step, self.length / bound / 4 if bound > 0 else 0.25)
        self.coefficients = {name: x / 2 for name, x in self.coefficients.items()}
        self.length = 0.0
