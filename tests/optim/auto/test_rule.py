"""The rule behind lr="auto" by itself: numbers in, numbers out."""

import copy
import math

import pytest
import torch

from automatic import auto, bound
from bprong.optim.auto.evaluation import ENOUGH_EXAMPLES, Evaluation
from bprong.optim.auto.rule import AutoRule
from bprong.optim.auto.settings import SETTINGS, AutoSettings
from helpers import mlp

NAMES = ("whitened", "adam", "last")
RIDGE = 1e-5  # the minimiser's own is a tenth of it
VARIED = AutoSettings(
    early_until=8, evaluate_every=5, evaluated_after_undo=7, initial_lambda=3e-3, lowest_lambda=4e-4,
    highest_lambda=0.5, predicted_badly=0.4, predicted_well=0.9, raise_lambda=3.0, lower_lambda=1.5,
    lower_lambda_on_plateau=8.0, plateau_ratio=0.1, faint_errors=0.05, sampling_damping=0.3, keep_coefficients=0.4,
    keep_slopes=0.5, keep_loss=0.8, lowest_trust=0.1, highest_momentum=0.8, highest_fallback=5.0, bound_share=0.1,
    bound_nats=0.3, bound_late=0.5, first_step=0.125, smallest_step=1e-4, highest_promise=3.0, highest_surprise=6.0,
    blow_up=5.0,
)  # fmt: skip


@pytest.fixture(params=[SETTINGS, VARIED], ids=["settings", "varied"])
def settings(request):
    """The constants as they are, and others: every test must hold for both."""
    return request.param


def rule_of(settings, **arguments):
    return AutoRule(settings=settings, lam=settings.initial_lambda, **arguments)


def found(curvatures, loss, examples=64, slopes=None):
    """An evaluation of directions that are orthogonal in F."""
    Q = torch.tensor(curvatures, dtype=torch.float64).diag()
    slopes = torch.tensor(slopes or [0.0] * len(curvatures), dtype=torch.float64)
    return Evaluation(Q, loss, slopes, examples)


def choose(rule, t, slope, curvature=1.0, loss=1.0, examples=64, lr=1.0, product=0.0):
    """α if Δ is the only direction; product: ΔᵀΔ, which λ multiplies."""
    metric = (torch.full((1, 1), product, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    return rule.choose(t, {"whitened": slope}, found([curvature], loss, examples), metric, lr)["whitened"]


def ask(rule, t, alpha, curvature=1e-6, loss=40.0):
    """The averaged α after an evaluation whose minimum is at α, far within all bounds."""
    choose(rule, t, -alpha * curvature, curvature, loss)
    return rule.coefficients["whitened"]


def longest(rule, t, loss=1.0, lr=1.0, **more):
    """½dᵀFd of a step whose minimum is four times as long as the bound allows, but whose slope promises little."""
    slope = -2 * math.sqrt(2 * bound(loss, rule.settings))
    return choose(rule, t, slope, 1.0, loss, lr=lr, **more) ** 2 / 2


def update(rule, ratio):
    """λ after a step of which this part of the predicted decrease came true."""
    assert rule.update_damping(found([1.0], 1.0, slopes=[-0.2]), {"whitened": 0.2}, -0.02 * ratio)
    return rule.lam


# When the quadratic model is evaluated --------------------------------------------------------------------------------


def test_every_step_is_evaluated_at_first_then_every_second_then_every_tenth():
    assert [t for t in range(51) if AutoRule().evaluates(t)] == [*range(10), 10, 12, 14, 16, 18, 20, 30, 40, 50]


def test_the_settings_decide_which_steps_are_evaluated(settings):
    half = settings.early_until // 2
    every_second = range(half + half % 2, settings.early_until, 2)
    every_tenth = [t for t in range(half, 50) if t % settings.evaluate_every == 0]
    expected = sorted({*range(half), *every_second, *every_tenth})
    assert [t for t in range(50) if rule_of(settings).evaluates(t)] == expected


@pytest.mark.parametrize("t", [0, 3, 15, 33])
def test_all_steps_after_an_undone_update_are_evaluated_for_a_while(t, settings):
    rule = rule_of(settings)
    rule.undone(t)
    end = t + 1 + settings.evaluated_after_undo
    assert all(rule.evaluates(i) for i in range(t + 1, end))
    assert [rule.evaluates(i) for i in range(end, 80)] == [rule_of(settings).evaluates(i) for i in range(end, 80)]


# How far --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1.0, 50.0])
@pytest.mark.parametrize("loss", [0.02, 0.2, 1.0, 40.0])
def test_predictions_move_by_no_more_than_a_share_of_the_loss_whatever_the_learning_rate(loss, lr, settings):
    rule = rule_of(settings)
    most = bound(loss, settings)
    for t in (3, 4, 20, 30):
        assert longest(rule, t, loss, lr) == pytest.approx(most)
    between = rule.choose(31, {"whitened": -2 * math.sqrt(2 * most)}, None, None, lr)["whitened"]
    assert between**2 / 2 == pytest.approx(most)
    assert rule.coefficients["whitened"] ** 2 / 2 == pytest.approx(most)  # nor does the average remember more


def test_within_the_bound_the_learning_rate_multiplies_the_step(settings):
    rule = rule_of(settings)
    for lr in (0.1, 1.0, 7.0):
        assert choose(rule, 3, -1e-3, lr=lr) == pytest.approx(lr * 1e-3, rel=RIDGE)
        between = rule.choose(4, {"whitened": -1e-3}, None, None, lr)["whitened"]
        assert between == pytest.approx(lr * 1e-3, rel=RIDGE)


def test_the_users_bound_holds_if_it_is_the_lower_one(settings):
    assert longest(rule_of(settings, bound=1e-4), 3) == pytest.approx(1e-4)
    assert longest(rule_of(settings, bound=10.0), 3) == pytest.approx(bound(1.0, settings))


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.3, 10.0])
def test_a_step_along_several_directions_is_shortened_to_the_bound_and_never_lengthened(most, settings):
    Q = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    asked = torch.tensor([0.7, 0.4], dtype=torch.float64)
    length = float(asked @ Q @ asked / 2)
    slopes = dict(zip(("whitened", "last"), (-Q @ asked).tolist(), strict=True))
    zero = torch.zeros(2, 2, dtype=torch.float64)
    c = rule_of(settings, bound=most).choose(3, slopes, Evaluation(Q, 40.0, zero[0], 64), (zero, zero))
    part = math.sqrt(min(length, most) / length)
    assert list(c.values()) == pytest.approx((part * asked).tolist(), rel=RIDGE)


def test_the_first_step_may_go_a_part_of_the_bound_and_good_steps_double_it(settings):
    rule = rule_of(settings)
    lengths = []
    for t in range(5):
        lengths.append(longest(rule, t) / bound(1.0, settings))
        update(rule, 0.5)
    assert lengths == pytest.approx([min(1.0, settings.first_step * 2**t) for t in range(5)])


def test_after_an_undone_update_the_next_step_is_half_as_long(settings):
    """½dᵀFd is a quarter of what it was, not of the bound; and never zero."""
    rule = rule_of(settings)
    lengths = [longest(rule, 3)]
    for _ in range(2):
        assert not rule.update_damping(found([1.0], 1.0, slopes=[-1.0]), {"whitened": 1.0}, 1.0)
        rule.undone(3)
        lengths.append(longest(rule, 4))
    update(rule, 0.5)
    lengths.append(longest(rule, 5))
    assert [x / lengths[0] for x in lengths] == pytest.approx([1, 1 / 4, 1 / 16, 1 / 8])
    for _ in range(20):
        rule.undone(5)
        longest(rule, 6)
    assert longest(rule, 6) == pytest.approx(settings.smallest_step * bound(1.0, settings))


@pytest.mark.parametrize("slope", [-1e2, -1e6])
def test_no_slope_is_trusted_to_decrease_the_loss_by_more_than_there_is(slope, settings):
    """Along directions that F does not see no curvature limits the step; at evaluations and between, for every lr."""
    rule = rule_of(settings)
    most = settings.highest_promise * 0.7
    for lr in (1.0, 50.0):
        assert -slope * choose(rule, 3, slope, 1e-9, 0.7, lr=lr) == pytest.approx(most)
        between = rule.choose(4, {"whitened": 2 * slope}, None, None, lr)["whitened"]
        assert -2 * slope * between == pytest.approx(most)


def test_a_users_own_nll_may_be_negative(settings):
    """It is known up to a constant only, so no share of it bounds the step; a number of nats does."""
    for loss in (-30.0, 0.0, 1.0, 400.0):
        rule = rule_of(settings, nll_bounded=False)
        assert choose(rule, 3, -1e3, loss=loss) ** 2 / 2 == pytest.approx(settings.bound_nats)


@pytest.mark.parametrize("t", [5, 19, 20, 40])
@pytest.mark.parametrize("examples", [2, 32, 64, 500])
def test_the_loss_is_averaged_over_steps_or_over_enough_examples(t, examples, settings):
    """The bound shows the average of the losses 40 and 4. Late evaluations are several steps apart."""
    steps = 1 if t < settings.early_until else settings.evaluate_every
    keep = max(settings.keep_loss**steps, 1 - examples / ENOUGH_EXAMPLES)
    rule = rule_of(settings)
    longest(rule, t, 40.0, examples=examples)
    second = choose(rule, t, -10.0, loss=4.0, examples=examples) ** 2 / 2
    assert second == pytest.approx(bound(keep * 40 + (1 - keep) * 4, settings))


# How much of which direction ------------------------------------------------------------------------------------------


def all_three(rule, t, asked):
    """The coefficients if these minimise the quadratic model."""
    c = [1e-6] * len(asked)
    slopes = {name: -1e-6 * x for name, x in zip(NAMES, asked, strict=False)}
    zero = torch.zeros(len(c), len(c), dtype=torch.float64)
    return list(rule.choose(t, slopes, found(c, 4000.0), (zero, zero)).values())


def test_adams_direction_and_the_last_update_have_upper_bounds_and_the_whitened_direction_has_none(settings):
    most = [100, settings.highest_fallback, settings.highest_momentum]
    assert all_three(rule_of(settings), 3, [100.0, 100.0, 100.0]) == pytest.approx(most, rel=RIDGE)
    assert all_three(rule_of(settings), 3, [0.1, 4.0, 0.7]) == pytest.approx([0.1, 4, 0.7], rel=RIDGE)
    assert all_three(rule_of(settings), 3, [-1.0, -1.0, -1.0]) == [0, 0, 0]


@pytest.mark.parametrize("asked", [1.0, 2.0, 4.0, 400.0, 0.5, 0.45, 0.3, 0.25, 1e-3, -1.0])
def test_one_evaluation_counts_for_a_limited_factor_more_or_less_than_the_average(asked, settings):
    """It is clamped around the average, averaged, and then bounded by twice the clamped value."""
    rule = rule_of(settings)
    assert ask(rule, settings.early_until - 2, 1.0) == pytest.approx(1.0, rel=RIDGE)
    early = copy.deepcopy(rule)
    assert ask(early, settings.early_until - 1, asked) == pytest.approx(max(asked, 0), rel=RIDGE)
    clamped = min(max(asked, 1 / settings.highest_surprise), settings.highest_surprise)
    average = settings.keep_coefficients + (1 - settings.keep_coefficients) * clamped
    assert ask(rule, settings.early_until, asked) == pytest.approx(min(average, 2 * clamped), rel=RIDGE)


def test_a_new_direction_is_taken_as_it_is_and_the_others_are_averaged(settings):
    rule = rule_of(settings)
    keep = settings.keep_coefficients
    all_three(rule, 20, [1.0, 2.0])
    expected = [keep * 1 + (1 - keep) * 2, keep * 2 + (1 - keep) * 4, 0.5]
    assert all_three(rule, 30, [2.0, 4.0, 0.5]) == pytest.approx(expected, rel=RIDGE)


def test_between_evaluations_the_coefficients_stay(settings):
    rule = rule_of(settings)
    before = all_three(rule, 20, [1.0, 2.0, 0.5])
    for t in (21, 29):
        assert rule.choose(t, {"whitened": -2e-6}, None, None) == dict(zip(NAMES, before, strict=True))


def test_a_gradient_of_zero_changes_no_coefficient(settings):
    rule = rule_of(settings)
    before = all_three(rule, 20, [1.0, 2.0, 0.5])
    zero = torch.zeros(3, 3, dtype=torch.float64)
    after = rule.choose(30, dict.fromkeys(NAMES, 0.0), found([0.0] * 3, 4000.0), (zero, zero))
    assert list(after.values()) == before
    assert all_three(rule, 40, [1.0, 2.0, 0.5]) == pytest.approx(before, rel=RIDGE)


@pytest.mark.parametrize("confirmed", [2.0, 1.0, 0.5, 0.0, -3.0])
def test_a_slope_counts_for_as_much_as_the_next_batch_confirms_within_bounds(confirmed, settings):
    """The next batch's slope along Δ is what is true of this one, and what the step itself has changed."""
    rule = rule_of(settings)
    for _ in range(60):
        alpha = choose(rule, 3, -0.1)
        rule.update_slope_trust(-0.1 * confirmed + alpha)
    trust = min(1.0, max(settings.lowest_trust, confirmed))
    assert rule.slope_trust == pytest.approx(trust, rel=1e-4)
    assert choose(rule, 3, -0.1) == pytest.approx(0.1 * trust, rel=1e-4)


@pytest.mark.parametrize("confirmed", [0.5, 0.9])
def test_the_slopes_trust_is_an_average(confirmed, settings):
    rule = rule_of(settings)
    alpha = choose(rule, 3, -0.1)
    rule.update_slope_trust(-0.1 * confirmed + alpha)
    keep = settings.keep_slopes
    expected = (keep + (1 - keep) * 0.1 * confirmed) / (keep + (1 - keep) * 0.1)
    assert rule.slope_trust == pytest.approx(expected, rel=RIDGE)


# Damping --------------------------------------------------------------------------------------------------------------


def test_a_bad_prediction_raises_the_damping_and_a_good_one_lowers_it(settings):
    factors = {}
    for ratio in (-1.0, 0.0, settings.predicted_badly - 0.01):
        factors[ratio] = settings.raise_lambda
    for ratio in (settings.predicted_badly + 0.01, settings.predicted_well - 0.01):
        factors[ratio] = 1.0
    for ratio in (settings.predicted_well + 0.01, 3.0):
        factors[ratio] = 1 / settings.lower_lambda
    for ratio, factor in factors.items():
        assert update(rule_of(settings), ratio) == pytest.approx(settings.initial_lambda * factor)


def test_damping_stays_within_its_bounds(settings):
    rule = rule_of(settings)
    assert [update(rule, 0) for _ in range(20)][-2:] == [settings.highest_lambda] * 2
    assert [update(rule, 1) for _ in range(200)][-2:] == [settings.lowest_lambda] * 2


@pytest.mark.parametrize(("bounds", "good"), [(1.9, True), (2.1, False), (math.nan, False), (math.inf, False)])
def test_a_step_that_raises_the_loss_by_more_than_twice_the_bound_is_to_be_undone(bounds, good, settings):
    rule = rule_of(settings)
    choose(rule, 3, -0.1)
    evaluation = found([1.0], 1.0, slopes=[-0.2])
    assert rule.update_damping(evaluation, {"whitened": 0.2}, bounds * bound(1.0, settings)) is good
    assert rule.lam == settings.raise_lambda * settings.initial_lambda


def test_on_a_plateau_damping_falls_below_its_bound_and_returns_to_it_afterwards(settings):
    """On a plateau λ alone limits the step. It stays if F and λ count about equally, and rises again if F counts more,
    up to its lower bound."""
    rule = rule_of(settings)

    def kept(curvature):
        before = rule.lam
        choose(rule, 3, -1e-3 * curvature, curvature, product=1.0)
        return update(rule, 1.0) / before

    assert [kept(1e-12) for _ in range(10)] == [1 / settings.lower_lambda_on_plateau] * 10
    lam = rule.lam
    assert lam < settings.lowest_lambda / 100
    assert kept(2 * settings.plateau_ratio * lam) == kept(0.9 * lam) == 1
    assert [kept(1.0) for _ in range(8)] == pytest.approx([settings.raise_lambda] * 8)
    for _ in range(40):
        kept(1.0)
    assert rule.lam == settings.lowest_lambda


def test_the_loss_blows_up_relative_to_where_it_began(settings):
    rule = rule_of(settings)
    assert not rule.blew_up(2.0)
    assert not rule.blew_up(1.99 * settings.blow_up)
    assert rule.blew_up(2.01 * settings.blow_up)
    unknown = rule_of(settings)
    assert not unknown.blew_up(0.0)
    assert not unknown.blew_up(1e9)


def layer_with(forward, backward, observations):
    """A layer of five inputs and three outputs whose sides have these mean eigenvalues."""
    layer = auto(mlp(5, 3))._whitening.layers["0"]
    for side, value in ((layer.forward, forward), (layer.backward, backward)):
        side.mean_eigenvalue = value
        side.observations = observations
    return layer


def test_a_certain_output_counts_as_a_faint_one(settings):
    """ε₁ε₂ = λ, in the proportion of the mean eigenvalues, but D's counts as at least a part of λ."""
    for d in (1e-300, 1e-9, 1e-5, 1e-3, 10.0):
        rule = rule_of(settings)
        layer = layer_with(4.0, d, 1e12)
        forward = rule.damping(layer, layer.forward).value
        backward = rule.damping(layer, layer.backward).value
        assert forward * backward == pytest.approx(settings.initial_lambda)
        assert forward / backward == pytest.approx(4 / max(d, settings.faint_errors * settings.initial_lambda))


def test_few_observations_add_damping(settings):
    rule = rule_of(settings)
    few = layer_with(4.0, 2.0, 10.0)
    many = layer_with(4.0, 2.0, 1e12)
    for side, trace in (("forward", 4.0 * 5), ("backward", 2.0 * 3)):
        with_few, with_many = (rule.damping(layer, getattr(layer, side)).value for layer in (few, many))
        assert with_few - with_many == pytest.approx(settings.sampling_damping * trace / 10)


def test_damping_that_the_user_set_is_not_chosen(settings):
    layer = layer_with(4.0, 2.0, 10.0)
    assert rule_of(settings, damping_given=True).damping(layer, layer.forward) is None
    layer.forward.mean_eigenvalue = None  # nor before a side was measured
    assert rule_of(settings).damping(layer, layer.forward) is None
