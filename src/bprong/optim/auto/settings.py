"""The constants of lr="auto", and what it remembers from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

Parts = dict[str, float]  # by "whitened", "adam", "last": coefficients, slopes


@dataclass(frozen=True)
class AutoSettings:
    """The constants of the rule; docs/auto.md shows what happens without the mechanisms they belong to.

    evaluate_every    the quadratic model is evaluated at this many steps at the start and after an undone update, and
                      then once in as many steps
    evaluate_share    the share of run time that evaluations may take after ten times as many steps: they are made less
                      often if they would take more
    evaluated_part    the part of a batch that an evaluation is made on,
    evaluated_least   and its least number of targets
    early_refreshes   steps at which statistics are measured again, since the first steps are the largest
    initial_lambda    λ at the start
    well              the ratio of the actual to the predicted decrease above which λ falls; it rises below 1 − well
    raise_lambda      the factor by which λ rises
    lower_lambda      the factor by which λ falls
    negligible        relative to λ: a lower bound on D's mean eigenvalue, for outputs whose errors vanish; and the
                      dᵀFd / ‖d‖² below which λ alone limits a step, so that λ falls by the square of raise_lambda
    sampling          times tr/N, added to ε: the sampling error of eigenvalues from N observations
    keep              what averages keep at an evaluation: of α, β and μ, of slopes, of the loss
    least_trust       the lower bound of s, which is underestimated if an epoch has few batches
    most_momentum     the upper bound of μ
    most_fallback     the upper bound of β, the learning rate of Adam's direction
    bound_share, bound_nats, bound_late
                      the bound on ½dᵀFd: bound_share · loss, or min(bound_nats, bound_late · loss) if that is more
    cautious          the part of this bound that is allowed at first; also how much less is allowed after an undone
                      update, and how far α of one evaluation may be below its average, or its inverse above
    blow_up           the loss, relative to the first loss, above which the last update is undone
    """

    evaluate_every: int = 10
    evaluate_share: float = 0.1
    evaluated_part: float = 0.25
    evaluated_least: int = 64
    early_refreshes: tuple[int, ...] = (2, 6)
    initial_lambda: float = 1e-3
    well: float = 0.75
    raise_lambda: float = 2.0
    lower_lambda: float = 1.1
    negligible: float = 0.01
    sampling: float = 0.2
    keep: float = 0.8
    least_trust: float = 0.05
    most_momentum: float = 0.95
    most_fallback: float = 0.01
    bound_share: float = 0.05
    bound_nats: float = 0.1
    bound_late: float = 0.25
    cautious: float = 0.25
    blow_up: float = 10.0


SETTINGS = AutoSettings()


@dataclass
class AutoState:
    """What outlives a step: plain values, all of them in checkpoints.

    lam              λ
    slope_kept, slope_promised
                     averages of the decrease along Δ that the next batch showed, and that its own batch promised
    caution          the part of the bound on ½dᵀFd that is allowed; it doubles with each good step
    brake            times s: below one after an undone update, until the next batch would have gone further
    brake_safe       half of the brake at which an update was last undone: up to there the brake is released fast, and
                     beyond it slowly
    loss             the averaged loss, as mean −log p of a target; `first_loss` is the first one
    coefficients     α, β and μ
    length           ½dᵀFd of the last step, measured or estimated
    curvature        dᵢᵀFdᵢ of each direction at the last evaluation
    slope            ∇LᵀΔ at the last evaluation
    slope_change     the predicted change of this slope by the step that was made: (Qc)_Δ
    curvature_ratio  dᵀFd / λ‖d‖² of the last evaluated step
    ratio            of the actual to the predicted decrease; None: unknown
    evaluate_until   the step until which all are evaluated
    period           steps between evaluations that `evaluate_share` asks for; None: not known yet
    scale            of the user's loss relative to the mean −log p of a target
    """

    lam: float = SETTINGS.initial_lambda
    slope_kept: float = 1.0
    slope_promised: float = 1.0
    caution: float = SETTINGS.cautious
    brake: float = 1.0
    brake_safe: float = 1.0
    loss: float | None = None
    first_loss: float | None = None
    coefficients: Parts = field(default_factory=dict)
    length: float = 0.0
    curvature: Parts = field(default_factory=dict)
    slope: float = 0.0
    slope_change: float = 0.0
    curvature_ratio: float = 1.0
    ratio: float | None = None
    evaluate_until: int = SETTINGS.evaluate_every
    period: int | None = None
    scale: float = 1.0
