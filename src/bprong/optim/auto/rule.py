"""The rule behind lr="auto", numbers in and numbers out: how far to go, and how much to damp.

    d = α Δ + β Δ_Adam + μ Δ₀       minimises       M(d) = ½ dᵀ (F + λ) d + ∇Lᵀ d

Δ is the whitened direction, Δ_Adam that of parameters no whitener covers, Δ₀ the last update; dᵀFd comes from
forward-mode AD (Martens & Grosse 2015, section 6). These measures make it safe at every batch size (docs/auto.md):

- Trust: the slope along Δ is multiplied by s ≤ 1. Δ contains the noise of its own batch, so ∇LᵀΔ promises a larger
  decrease than other data show; the gradient of the next batch tells how much larger.
- Bounds: ½dᵀFd, the change of the predictions, is at most a part of the loss, and −α ∇LᵀΔ at most twice the loss.
- Damping: λ, split between Ž and D by their mean eigenvalues, rises if the loss fell by much less than the model
  predicted, and falls slowly if the prediction was good; on a plateau, where λ alone limits the step, fast.
- Averages: α, β and μ are averaged over evaluations: the first ten steps, every tenth, later as run time allows.
- Progress: spectral steps are halved while losses fall by much less than steps promise, which is what noise does to
  steps that each go as far as they can.
- Undo: if the loss blew up, the last update is undone, and the next ones go less far.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bprong.linalg.factors import Damping
from bprong.linalg.quadratic import Array, minimiser
from bprong.whitening.layer import Layer, Side

LOG = logging.getLogger("bprong")
Parts = dict[str, float]  # by "whitened", "adam", "last": coefficients, slopes


@dataclass(frozen=True)
class AutoSettings:
    """The constants of the rule; docs/auto.md shows what happens without the mechanisms they belong to.

    evaluate_every    the quadratic model is evaluated at this many steps at the start and after an undone update, and
                      then once in as many steps
    evaluate_share    the share of run time that evaluations may take after ten times as many steps: they are made less
                      often if they would take more
    evaluated_part    the part of a batch that an evaluation is made on,
    evaluated_least   and its least number of targets; the loss of fewer targets counts less in its average
    early_refreshes   steps at which statistics are measured again, since the first steps are the largest
    initial_lambda    λ at the start
    well              the ratio of the actual to the predicted decrease above which λ falls; it rises below 1 − well
    raise_lambda      the factor by which λ rises
    lower_lambda      the factor by which λ falls; `leave_plateau` is that on a plateau:
    plateau           where dᵀFd / λ‖d‖² is below this, so that λ alone limits a step
    faint             a lower bound on D's mean eigenvalue, relative to λ, for outputs whose errors vanish
    sampling          times tr/N, added to ε: the sampling error of eigenvalues from N observations
    keep              what averages keep at an evaluation: of α, β and μ, of slopes, of the loss
    least_trust       the lower bound of s, which is underestimated if an epoch has few batches
    most_momentum     the upper bound of μ
    most_fallback     the upper bound of β, the learning rate of Adam's direction
    clamp             the factor by which α of one evaluation may differ from its average
    bound_share, bound_nats, bound_late
                      the bound on ½dᵀFd: bound_share · loss, or min(bound_nats, bound_late · loss) if that is more
    first_part        the part of this bound that is allowed at first
    blow_up           the loss, relative to the first loss, above which the last update is undone
    undone_part       how much less ½dᵀFd, and how much less of the slope, is allowed after an undone update
    progress_steps    steps over which the mean loss of batches is compared with that of as many steps before, where
                      progress counts
    little_progress   the part of the predicted decrease below which steps are shortened,
    enough_progress   and above which they are made longer again,
    shorten           by this factor
    decay_rate        η of weight decay at M = 1: AdamW's default lr. A decay is set by the number of steps that weights
                      remember, 1/(η · weight_decay) (Wang & Aitchison 2024), and not by the length of the steps
    low, low_steps    planned learning rates stop counting if M was never above `low` in this many steps
    release           the factor by which the slope counts for more again while the next batch would have gone further,
                      up to half of what was undone; beyond, its fourth root
    """

    evaluate_every: int = 10
    evaluate_share: float = 0.05
    evaluated_part: float = 0.25
    evaluated_least: int = 64
    early_refreshes: tuple[int, ...] = (2, 6)
    initial_lambda: float = 1e-3
    well: float = 0.75
    raise_lambda: float = 2.0
    lower_lambda: float = 1.1
    leave_plateau: float = 4.0
    plateau: float = 0.01
    faint: float = 0.01
    sampling: float = 0.2
    keep: float = 0.8
    least_trust: float = 0.05
    most_momentum: float = 0.95
    most_fallback: float = 0.01
    clamp: float = 4.0
    bound_share: float = 0.05
    bound_nats: float = 0.1
    bound_late: float = 0.25
    first_part: float = 0.25
    blow_up: float = 10.0
    undone_part: float = 0.25
    release: float = 2.0
    progress_steps: int = 20
    little_progress: float = 0.03
    enough_progress: float = 0.1
    shorten: float = 0.5
    decay_rate: float = 1e-3
    low: float = 0.05
    low_steps: int = 20


SETTINGS = AutoSettings()


@dataclass(frozen=True)
class Evaluation:
    """What was measured of a step along some directions, of which Δ is the first.

    Q, G      (k, k) dᵢᵀ F dⱼ and dᵢᵀ dⱼ, which λ multiplies
    loss      the mean −log p of a target; NaN: none of these targets counts
    slopes    (k,) its derivatives along the directions
    targets   the number of targets of the examples that this is of, which are this `part` of all examples
    loss_now  computes the loss at the current parameters, on the same examples and random numbers
    """

    Q: Array
    G: Array
    loss: float
    slopes: Array
    targets: int
    part: float = 1.0
    loss_now: Callable[[], float] = lambda: math.nan

    def curvature(self, lam: float = 0.0) -> Array:
        """dᵢᵀ (F + λ) dⱼ, which a loss with other parts than −log p adds to."""
        return self.Q + lam * self.G


@dataclass
class Progress:
    """Compares the losses of batches with the decrease that steps have promised.

    A step that is as long as its quadratic model and its trust allow lowers the loss of the next batch. Where gradients
    are mostly noise, such steps undo each other: each goes back what the one before went too far aside.

    gain          falls while losses fall by much less than promised, and rises to one again when they do not
    predicted     the decrease of the loss by the last evaluated step, as far as other data confirm it
    steps, total  the number of steps in the present window, and the sum of their losses
    mean_before   the mean loss of the window before; None: there was none
    """

    gain: float = 1.0
    predicted: float = 0.0
    steps: int = 0
    total: float = 0.0
    mean_before: float | None = None

    def note(self, loss: float, settings: AutoSettings, may_rise: bool) -> None:
        """Takes in the loss of the batch of a step; may_rise: whether the gain may rise."""
        self.steps += 1
        self.total += loss
        if self.steps < settings.progress_steps:
            return
        mean = self.total / self.steps
        promised = self.predicted * self.steps
        if self.mean_before is not None and promised > 0:
            progress = (self.mean_before - mean) / promised
            if progress < settings.little_progress:
                self.gain *= settings.shorten
            elif progress > settings.enough_progress and may_rise:
                self.gain = min(1.0, self.gain / settings.shorten)
        self.mean_before = mean
        self.steps = 0
        self.total = 0.0


@dataclass
class AutoState(Progress):
    """What outlives a step: plain values, all of them in checkpoints.

    lam              λ
    slope_kept, slope_promised
                     averages of the decrease along Δ that the next batch showed, and that its own batch promised
    caution          the part of the bound on ½dᵀFd that is allowed; it doubles with each good step
    brake            times s: below one after an undone update, until the next batch would have gone further
    brake_safe       half of the brake at which an update was last undone, up to which the brake is released fast
    loss             the averaged loss, as mean −log p of a target; None before the first evaluation
    first_loss       the first loss of a whole batch; zero before
    coefficients     α, β and μ
    length           ½dᵀFd of the last step, measured or estimated
    curvature        dᵢᵀFdᵢ of each direction at the last evaluation
    slope            ∇LᵀΔ at the last evaluation
    slope_change     the predicted change of this slope by the step that was made: (Qc)_Δ
    ratio            of the actual to the predicted decrease; None: unknown
    evaluate_until   the step until which all are evaluated
    period           steps between evaluations that `evaluate_share` asks for; None: not known yet
    scale            of the user's loss relative to the mean −log p of a target
    highest_lr       the highest learning rate of all groups and steps
    plan_counts      whether what schedules start from or plan to reach counts too; not if they do not come near it
    multiplier       M: the highest learning rate of the last step, relative to these
    highest_multiplier
                     the highest M of all steps
    """

    lam: float = SETTINGS.initial_lambda
    slope_kept: float = 1.0
    slope_promised: float = 1.0
    caution: float = SETTINGS.first_part
    brake: float = 1.0
    brake_safe: float = 1.0
    loss: float | None = None
    first_loss: float = 0.0
    coefficients: Parts = field(default_factory=dict)
    length: float = 0.0
    curvature: Parts = field(default_factory=dict)
    slope: float = 0.0
    slope_change: float = 0.0
    ratio: float | None = None
    evaluate_until: int = SETTINGS.evaluate_every
    period: int | None = None
    scale: float = 1.0
    highest_lr: float = 0.0
    plan_counts: bool = True
    multiplier: float = 1.0
    highest_multiplier: float = 0.0


@dataclass
class AutoRule(AutoState):
    """Chooses the coefficients of a step and the damping from measured numbers, and remembers them (`AutoState`).

    damping_given:  the user set the damping, so that λ must not change it
    most:           the user's max_step, as ½dᵀFd
    shortens:       steps are multiplied by the gain, because they contain no part of the last update
    nll_bounded:    −log p is known including its constant and not negative, so that a share of it can bound a step
    """

    damping_given: bool = False
    most: float = math.inf
    shortens: bool = False
    nll_bounded: bool = True
    settings: AutoSettings = SETTINGS

    def evaluates(self, t: int) -> bool:
        """Whether the quadratic model is evaluated at step t: always while less than the whole bound is allowed."""
        every = self.settings.evaluate_every
        period = every if t < 10 * every else max(every, self.period or 0)
        cautious = self.caution < 1 and self.loss is not None
        return t < self.evaluate_until or cautious or t % period == 0

    # Learning rates ---------------------------------------------------------------------------------------------------

    def relate(self, t: int, lr: float, planned: float) -> None:
        """M of step t.

        lr:       the highest of all groups
        planned:  the highest that schedules start from or plan to reach
        """
        self.highest_lr = max(self.highest_lr, lr)
        reference = max(self.highest_lr, planned) if self.plan_counts else self.highest_lr
        self.multiplier = lr and lr / reference
        self.highest_multiplier = max(self.highest_multiplier, self.multiplier)
        if t >= self.settings.low_steps and 0 < self.highest_multiplier <= self.settings.low:
            LOG.info('lr="auto": learning rates do not come near %.2g; the highest so far counts as 1 now', planned)
            self.plan_counts = False
            self.multiplier /= self.highest_multiplier
            self.highest_multiplier = 1.0

    # Damping ----------------------------------------------------------------------------------------------------------

    def damping(self, layer: Layer, side: Side) -> Damping | None:
        """ε₁ or ε₂: ε₁ε₂ = λ, in the proportion of the sides' mean eigenvalues, and more if observations are few.

        ε₁ is in units of its own for each feature of the data.

        None if the user set the damping, or before the side was measured.
        """
        if self.damping_given or side.mean_eigenvalue is None:
            return None
        z = layer.forward.mean_eigenvalue or 1.0
        d = 1.0
        observations = side.observations
        if layer.backward.mean_eigenvalue is not None:
            d = max(layer.backward.mean_eigenvalue, self.settings.faint * self.lam)
            observations = layer.backward.observations
        sampling = self.settings.sampling * side.blocks.size * side.blocks.count / observations
        if side.of_inputs and layer.linear.one_hot:
            sampling = 0.0
        relative = math.sqrt(self.lam / (z * d)) + sampling
        return Damping(relative, "variance") if side.of_inputs else Damping(relative * d)

    def update_damping(self, evaluation: Evaluation, c: Parts, change: float) -> bool:
        """Adapts λ to the change of the loss by the whole d, whatever part of it is made, so that M does not change λ.

        False: the loss rose so much, or is not finite, that the step is to be undone.
        """
        settings = self.settings
        x = np.array(list(c.values()))
        predicted = float(evaluation.slopes @ x + x @ evaluation.curvature() @ x / 2)
        ratio = change / predicted if predicted < 0 else math.nan
        self.ratio = None if math.isnan(ratio) else ratio
        good = math.isfinite(change) and change <= 2 * self._bound()
        if good:
            self.caution = min(1.0, 2 * self.caution)
        if not good or ratio < 1 - settings.well:
            self.lam *= settings.raise_lambda
        elif ratio > settings.well:
            is_plateau = x @ evaluation.Q @ x < settings.plateau * self.lam * (x @ evaluation.G @ x)
            self.lam /= settings.leave_plateau if is_plateau else settings.lower_lambda
        self.lam = min(max(self.lam, 1e-30), 1e30)  # far beyond what matters: it must not vanish in long runs
        return good

    # Coefficients -----------------------------------------------------------------------------------------------------

    def update_trust(self, slope: float) -> None:
        """Compares the next batch's slope along the Δ of the last evaluation with what that batch promised."""
        keep = self.settings.keep
        release = self.settings.release
        self.slope_kept = keep * self.slope_kept + (1 - keep) * (self.slope_change - slope)
        self.slope_promised = keep * self.slope_promised - (1 - keep) * self.slope
        if slope < 0:  # the next batch would have gone further
            fast = min(release * self.brake, self.brake_safe)
            self.brake = min(1.0, max(fast, release**0.25 * self.brake))

    @property
    def trust(self) -> float:
        """s: how much of a slope along Δ other data confirm."""
        return min(1.0, max(self.settings.least_trust, self.slope_kept / max(self.slope_promised, 1e-300)))

    def choose(self, t: int, slopes: Parts, evaluation: Evaluation | None) -> Parts:
        """The coefficients of d, of which M is made; between evaluations those of the last one hold.

        slopes:  of the loss along the directions; between evaluations that of Δ is enough
        """
        slope = slopes["whitened"]
        if evaluation is not None:
            self._note_loss(evaluation)
            if any(slopes.values()):
                self._minimise(t, slopes, evaluation)
            else:  # a gradient of zero says nothing
                evaluation = None
        if not self.coefficients:
            return {}
        c = self.coefficients
        x = np.array(list(c.values()))
        length = self._estimated_length(c, slope) if evaluation is None else float(x @ evaluation.Q @ x) / 2
        part = self._allowed_part(c["whitened"], length, slope)
        self.length = length * part**2
        if evaluation is not None:
            step = self.multiplier * part * x
            slope_of_step = np.array(list(slopes.values())) @ step - (1 - self.trust) * slope * step[0]
            self.slope_change = float(evaluation.curvature()[0] @ step)
            self.predicted = -float(slope_of_step + step @ evaluation.Q @ step / 2)
        return {name: x * part for name, x in c.items()}

    def _minimise(self, t: int, slopes: Parts, evaluation: Evaluation) -> None:
        """Takes the coefficients that minimise the quadratic model, within the bounds, into the averages."""
        Q = evaluation.Q
        self.slope = slopes["whitened"]
        self.curvature = dict(zip(slopes, Q.diagonal().tolist(), strict=True))
        b = np.array(list(slopes.values()))
        b[0] *= self.trust * self.brake * (self.gain if self.shortens else 1.0)
        limits = {"last": self.settings.most_momentum, "adam": self.settings.most_fallback}
        c = minimiser(evaluation.curvature(self.lam), b, [limits.get(name, math.inf) for name in slopes])
        c = c * self._allowed_part(float(c[0]), float(c @ Q @ c) / 2, self.slope)
        coefficients = dict(zip(slopes, c.tolist(), strict=True))
        self.coefficients = coefficients if t < self.evaluate_until else self._averaged(coefficients)

    def _averaged(self, c: Parts) -> Parts:
        """The average of c with the coefficients before. α is clamped first, and afterwards at most twice its value."""
        keep = self.settings.keep
        clamp = self.settings.clamp
        before = c | self.coefficients
        alpha = before["whitened"]
        if alpha > 0:  # α of one batch may be an outlier, for example if the batch is fitted already
            c["whitened"] = min(max(c["whitened"], alpha / clamp), alpha * clamp)
        mean = {name: keep * before[name] + (1 - keep) * x for name, x in c.items()}
        mean["whitened"] = min(mean["whitened"], 2 * c["whitened"])  # a small α of this batch counts at once
        return mean

    def _note_loss(self, evaluation: Evaluation) -> None:
        """Averages the loss. Small batches keep more of the average, so that together they count as one large one."""
        loss = evaluation.loss
        if not math.isfinite(loss):
            self.ratio = None
            return
        keep = max(1 - evaluation.targets / self.settings.evaluated_least, self.settings.keep)
        self.loss = loss if self.loss is None else keep * self.loss + (1 - keep) * loss

    # Bounds -----------------------------------------------------------------------------------------------------------

    def _allowed_part(self, alpha: float, length: float, slope: float) -> float:
        """The part of a step that keeps ½dᵀFd within its bound, and −α ∇LᵀΔ within twice the loss.

        The minimum of a quadratic model lies half of that lower, and the loss cannot fall below zero: a slope that
        promises more comes from something that F does not describe.
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
        """The averaged loss; infinite if it, or its least value, is unknown."""
        return self.loss if self.loss is not None and self.loss >= 0 and self.nll_bounded else math.inf

    def _estimated_length(self, c: Parts, slope: float) -> float:
        """½dᵀFd between evaluations: curvature along Δ goes with its slope, along Δ₀ with that of the last step."""
        steeper = max(0.0, slope / min(self.slope, -1e-300))
        along_new = self.curvature["whitened"] * steeper
        curvature = {**self.curvature, "whitened": along_new, "last": 2 * self.length}
        return sum(x**2 * curvature[name] for name, x in c.items()) / 2

    # Undoing ----------------------------------------------------------------------------------------------------------

    def blew_up(self, loss: float) -> bool:
        """Whether the loss of the whole batch, which evaluations do not see at every step, is far above the first."""
        self.first_loss = self.first_loss or loss
        return loss > self.settings.blow_up * max(self.first_loss, self.loss or 0.0) and self.first_loss > 0

    def undone(self, t: int) -> None:
        """After step t was undone: the next starts without momentum and goes less far, and more steps are evaluated."""
        bound = self._bound()
        part = self.settings.undone_part
        self.evaluate_until = t + 1 + self.settings.evaluate_every
        self.caution = max(1e-6, part * self.length / bound) if bound > 0 else part
        self.brake_safe = self.brake / 2
        self.brake *= part
        self.coefficients = {name: x / 2 for name, x in self.coefficients.items()}
        self.length = 0.0
