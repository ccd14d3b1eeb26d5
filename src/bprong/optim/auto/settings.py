"""The constants of lr="auto", and what it remembers from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from bprong.likelihood.loss_scale import Estimate

Parts = dict[str, float]  # by "whitened", "adam", "last": coefficients, slopes


@dataclass(frozen=True)
class AutoSettings:
    """The constants of the rule. All were chosen on the problems of docs/auto.md, seeds 0 and 1.

    When the quadratic model is evaluated:
    early_until           every step up to half of this one, then every second step until this one
    evaluate_every        steps between evaluations thereafter
    evaluated_after_undo  steps that are all evaluated after an update was undone
    early_steps           steps at which statistics are measured again, since the first steps are the largest
    exact_refreshes       further refreshes before low rank is tried: early ones are too close for its search to pay

    Damping:
    initial_lambda, lowest_lambda, highest_lambda
                          λ at the start and its bounds
    predicted_badly, predicted_well
                          ratios of the actual to the predicted decrease below which λ rises, above which it falls
    raise_lambda, lower_lambda, lower_lambda_on_plateau
                          the factors by which it does
    plateau_ratio         if dᵀFd is less than this times λ‖d‖², λ alone limits the step: a plateau
    faint_errors          a lower bound on D's mean eigenvalue, relative to λ, for outputs whose errors vanish
    sampling_damping      times tr/N, added to ε: the sampling error of eigenvalues from N observations
    variance_spread       the ratio of variances above which each input is damped relative to its own

    Averages; each is what an average keeps at an evaluation:
    keep_coefficients     of α, β, μ
    keep_slopes           of the sums behind the slope's trust s
    keep_loss             of the loss; to the power of the steps between two evaluations

    Bounds:
    lowest_trust          the lower bound of s, which is underestimated if an epoch has few batches
    highest_momentum, highest_fallback
                          of μ, and of β
    bound_share, bound_nats, bound_late
                          the bound on ½dᵀFd: bound_share · loss, or min(bound_nats, bound_late · loss) if that is more
    first_step            the part of this bound for the first step; it doubles after each good step
    smallest_step         the least part of this bound, after updates were undone
    highest_promise       α ∇LᵀΔ is at most this times the loss
    highest_surprise      the factor by which α of one evaluation may differ from the average; it is clamped
    blow_up               the loss, relative to the first loss, above which the last update is undone
    """

    early_until: int = 20
    evaluate_every: int = 10
    evaluated_after_undo: int = 20
    early_steps: tuple[int, ...] = (2, 6)
    exact_refreshes: int = 4
    initial_lambda: float = 1e-3
    lowest_lambda: float = 1e-4
    highest_lambda: float = 1.0
    predicted_badly: float = 0.25
    predicted_well: float = 0.75
    raise_lambda: float = 2.0
    lower_lambda: float = 1.1
    lower_lambda_on_plateau: float = 4.0
    plateau_ratio: float = 0.01
    faint_errors: float = 0.01
    sampling_damping: float = 0.1
    variance_spread: float = 1e4
    keep_coefficients: float = 0.7
    keep_slopes: float = 0.8
    keep_loss: float = 0.9
    lowest_trust: float = 0.05
    highest_momentum: float = 0.95
    highest_fallback: float = 10.0
    bound_share: float = 0.05
    bound_nats: float = 0.1
    bound_late: float = 0.25
    first_step: float = 0.25
    smallest_step: float = 1e-6
    highest_promise: float = 2.0
    highest_surprise: float = 4.0
    blow_up: float = 10.0


SETTINGS = AutoSettings()


@dataclass
class AutoState:
    """What outlives a step: plain values, all of them in checkpoints.

    lam                 λ
    slope_kept, slope_promised
                        averages of the decrease along Δ that the next batch showed, and that its own batch promised
    loss                the averaged loss, as mean −log p
    first_loss, last_loss
                        the value of the user's loss divided by its scale, penalties included
    coefficients        α, β and μ
    length              ½dᵀFd of the last step, measured or estimated
    curvature           dᵢᵀFdᵢ of each direction at the last evaluation
    slope               ∇LᵀΔ at the last evaluation
    slope_change        the predicted change of this slope by the step that was made: (Qc)_Δ
    curvature_ratio     dᵀFd / λ‖d‖² of the last evaluated step
    ratio               of the actual to the predicted decrease; None: unknown
    evaluate_until      the step until which all are evaluated
    bound_part          the part of the bound on ½dᵀFd that is allowed; None: all
    badly_scaled        names of layers whose inputs differ so much in scale that each is damped by its own variance
    scale               of the user's loss relative to the mean −log p of a target
    scaled_at           the step that the scale is of: its batches, their targets, their loss divided by the scale, and
                        the factor on its gradients
    scales              the estimates behind the scale
    everything          whether the model cannot be run on a subset of a batch
    forward_mode        whether forward-mode AD is available
    """

    lam: float = SETTINGS.initial_lambda
    slope_kept: float = 1.0
    slope_promised: float = 1.0
    loss: float | None = None
    first_loss: float | None = None
    last_loss: float = 0.0
    coefficients: Parts = field(default_factory=dict)
    length: float = 0.0
    curvature: Parts = field(default_factory=dict)
    slope: float = 0.0
    slope_change: float = 0.0
    curvature_ratio: float = 1.0
    ratio: float | None = None
    evaluate_until: int = 0
    bound_part: float | None = None
    badly_scaled: list[str] = field(default_factory=list)
    scale: float = 1.0
    scaled_at: tuple[int, int, float, float] = (0, 0, 0.0, 1.0)
    scales: list[Estimate] = field(default_factory=list)
    everything: bool = False
    forward_mode: bool = True
