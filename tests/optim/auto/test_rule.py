"""The rule behind lr="auto" by itself: numbers in, numbers out."""

import copy
import logging
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from automatic import auto, bound
from bprong.linalg.moments import Moments
from bprong.optim.auto.rule import SETTINGS, AutoRule, AutoSettings, Evaluation, Progress
from helpers import mlp

NAMES = ("whitened", "adam", "last")
RIDGE = 1e-5  # the minimiser's own is a tenth of it
VARIED = AutoSettings(
    evaluate_every=5, evaluate_share=0.2, evaluated_part=0.5, evaluated_least=48, early_refreshes=(3,),
    initial_lambda=3e-3, well=0.9, raise_lambda=3.0, lower_lambda=1.5, leave_plateau=7.0, plateau=0.1, faint=0.03,
    sampling=0.7, keep=0.4, least_trust=0.1, most_momentum=0.8, most_fallback=0.05, clamp=3.0, bound_share=0.1,
    bound_nats=0.3, bound_late=0.4, first_part=0.2, blow_up=5.0, undone_part=0.125, release=2.5, decay_rate=3e-3,
    low=0.1, low_steps=30, progress_steps=7, little_progress=0.1, enough_progress=0.3, shorten=0.25,
)  # fmt: skip


@pytest.fixture(params=[SETTINGS, VARIED], ids=["settings", "varied"])
def settings(request):
    """The constants as they are, and others: every test must hold for both."""
    return request.param


def rule_of(settings, caution=1.0, **arguments):
    """A rule that allows all of its bound, as after a few good steps."""
    start = {"lam": settings.initial_lambda, "evaluate_until": settings.evaluate_every}
    return AutoRule(settings=settings, caution=caution, **(start | arguments))


def test_the_other_constants_are_all_different():
    assert [f.name for f in fields(AutoSettings) if getattr(SETTINGS, f.name) == getattr(VARIED, f.name)] == []


def found(curvatures, loss, examples=64, slopes=None):
    """An evaluation of directions that are orthogonal in F."""
    zero = np.zeros((len(curvatures), len(curvatures)))
    return Evaluation(np.diag(curvatures), zero, loss, np.array(slopes or zero[0]), examples)


def choose(rule, t, slope, curvature=1.0, loss=1.0, examples=64, product=0.0):
    """α if Δ is the only direction; product: ΔᵀΔ, which λ multiplies."""
    evaluation = replace(found([curvature], loss, examples), G=np.full((1, 1), product))
    return rule.choose(t, {"whitened": slope}, evaluation)["whitened"]


def ask(rule, t, alpha, curvature=1e-6, loss=40.0):
    """The averaged α after an evaluation whose minimum is at α, far within all bounds."""
    choose(rule, t, -alpha * curvature, curvature, loss)
    return rule.coefficients["whitened"]


def longest(rule, t, loss=1.0, **more):
    """½dᵀFd of a step whose minimum is four times as long as the bound allows, but whose slope promises little."""
    slope = -2 * math.sqrt(2 * bound(loss, rule.settings))
    return choose(rule, t, slope, 1.0, loss, **more) ** 2 / 2


def update(rule, ratio, product=0.0):
    """λ after a step of which this part of the predicted decrease came true; product: ΔᵀΔ, as ΔᵀFΔ is 1."""
    evaluation = replace(found([1.0], 1.0, slopes=[-0.2]), G=np.full((1, 1), product))
    assert rule.update_damping(evaluation, {"whitened": 0.2}, -0.02 * ratio)
    return rule.lam


# When the quadratic model is evaluated --------------------------------------------------------------------------------


def test_the_first_ten_steps_are_evaluated_and_then_every_tenth():
    assert [t for t in range(51) if AutoRule().evaluates(t)] == [*range(10), 10, 20, 30, 40, 50]


def test_the_settings_decide_which_steps_are_evaluated(settings):
    every = settings.evaluate_every
    assert [t for t in range(50) if rule_of(settings).evaluates(t)] == [*range(every), *range(every, 50, every)]


def test_every_step_is_evaluated_until_the_whole_bound_is_allowed_again(settings):
    """If the loss is not known, steps cannot be judged, and the bound does not grow."""
    every = settings.evaluate_every
    assert rule_of(settings, caution=0.5, loss=1.0).evaluates(2 * every + 1)
    assert not rule_of(settings, caution=1.0, loss=1.0).evaluates(2 * every + 1)
    assert not rule_of(settings, caution=0.5).evaluates(2 * every + 1)


@pytest.mark.parametrize("period", [1, 7, 37])
def test_after_ten_evaluations_the_period_is_the_one_of_the_share_of_time_if_it_is_longer(period, settings):
    every = settings.evaluate_every
    steps = range(10 * every, 30 * every)
    found = [t for t in steps if rule_of(settings, period=period).evaluates(t)]
    assert found == [t for t in steps if t % max(every, period) == 0]
    before = [t for t in range(10 * every) if rule_of(settings, period=period).evaluates(t)]
    assert before == [*range(every), *range(every, 10 * every, every)]


@pytest.mark.parametrize("t", [0, 3, 15, 33])
def test_all_steps_after_an_undone_update_are_evaluated_for_a_while(t, settings):
    rule = rule_of(settings)
    rule.undone(t)
    end = t + 1 + settings.evaluate_every
    assert all(rule.evaluates(i) for i in range(t + 1, end))
    assert [rule.evaluates(i) for i in range(end, 80)] == [rule_of(settings).evaluates(i) for i in range(end, 80)]


# How far --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [0.02, 0.2, 1.0, 40.0])
def test_predictions_move_by_no_more_than_a_share_of_the_loss(loss, settings):
    rule = rule_of(settings)
    most = bound(loss, settings)
    for t in (3, 4, 20, 30):
        assert longest(rule, t, loss) == pytest.approx(most)
    between = rule.choose(31, {"whitened": -2 * math.sqrt(2 * most)}, None)["whitened"]
    assert between**2 / 2 == pytest.approx(most)
    assert rule.coefficients["whitened"] ** 2 / 2 == pytest.approx(most)  # nor does the average remember more


def test_the_learning_rate_changes_nothing_but_what_the_next_slope_is_compared_with(settings):
    """It multiplies the step that was chosen: the next batch's slope is predicted for the part that is made."""
    whole = rule_of(settings)
    part = rule_of(settings, multiplier=0.1)
    assert choose(part, 3, -1e-3) == choose(whole, 3, -1e-3) == pytest.approx(1e-3, rel=RIDGE)
    assert part.slope_change == pytest.approx(0.1 * whole.slope_change)
    assert part.length == whole.length
    evaluation = found([1.0], 1.0, slopes=[-0.2])
    for rule in (whole, part):
        assert rule.update_damping(evaluation, {"whitened": 0.2}, -0.02)
    assert part.lam == whole.lam


# Learning rates -------------------------------------------------------------------------------------------------------


def multipliers(lrs, planned=0.0, start=0, rule=None):
    rule = rule or AutoRule()
    found = []
    for t, lr in enumerate(lrs, start):
        rule.relate(t, lr, planned)
        found.append(rule.multiplier)
    return found


def test_learning_rates_count_relative_to_the_highest_that_there_was():
    """So a constant one is 1, whatever it is; one that rises is 1 as well, as nobody knows how far it will."""
    assert multipliers([3e-4] * 3) == [1.0] * 3
    assert multipliers([1e-3, 1e-3, 1e-4, 5e-4]) == pytest.approx([1.0, 1.0, 0.1, 0.5])
    assert multipliers([1e-5, 1e-4, 1e-3, 5e-4]) == pytest.approx([1.0, 1.0, 1.0, 0.5])


def test_learning_rates_count_relative_to_what_a_schedule_plans():
    assert multipliers([1e-4, 1e-3, 5e-4], planned=1e-3) == pytest.approx([0.1, 1.0, 0.5])


def test_a_learning_rate_of_zero_is_no_reference():
    assert multipliers([0.0, 0.0, 1e-3, 0.0]) == [0.0, 0.0, 1.0, 0.0]


def test_plans_that_a_schedule_does_not_come_near_stop_counting_after_20_steps(caplog):
    """Noam's schedule multiplies lr=1 by 0.001. What it really reaches is known later, so it rises as 1."""
    rates = [1e-5 * t for t in range(1, 31)] + [2e-4, 1e-4]
    with caplog.at_level(logging.INFO, logger="bprong"):
        found = multipliers(rates, planned=1.0)
    assert found[:20] == pytest.approx(rates[:20])
    assert found[20:] == pytest.approx([1.0] * 10 + [2 / 3, 1 / 3])
    assert len(caplog.records) == 1
    assert "counts as 1" in caplog.text


@pytest.mark.parametrize("high", [0.04, 0.06])
def test_a_schedule_that_once_came_near_its_plan_keeps_it(high, caplog):
    rule = AutoRule()
    assert multipliers([high] + [0.01] * 30, 1.0, rule=rule)[-1] == (0.01 if high > 0.05 else 0.25)
    assert multipliers([0.01], 10.0, start=31, rule=rule) == ([0.001] if high > 0.05 else [0.25])


def test_a_late_start_is_no_reason_to_forget_a_plan_before_there_is_a_learning_rate():
    rule = AutoRule()
    multipliers([0.0] * 30, planned=1.0, rule=rule)
    assert multipliers([1e-3, 2e-3], planned=1.0, start=30, rule=rule) == [1.0, 1.0]


def test_the_users_bound_holds_if_it_is_the_lower_one(settings):
    assert longest(rule_of(settings, most=1e-4), 3) == pytest.approx(1e-4)
    assert longest(rule_of(settings, most=10.0), 3) == pytest.approx(bound(1.0, settings))


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.3, 10.0])
def test_a_step_along_several_directions_is_shortened_to_the_bound_and_never_lengthened(most, settings):
    Q = np.array([[2.0, 0.5], [0.5, 1.0]])
    asked = np.array([0.7, 0.4])
    length = float(asked @ Q @ asked / 2)
    slopes = dict(zip(("whitened", "last"), (-Q @ asked).tolist(), strict=True))
    c = rule_of(settings, most=most).choose(3, slopes, replace(found([2.0, 1.0], 40.0), Q=Q))
    part = math.sqrt(min(length, most) / length)
    assert list(c.values()) == pytest.approx((part * asked).tolist(), rel=RIDGE)


def test_the_first_step_may_go_a_part_of_the_bound_and_good_steps_double_it(settings):
    assert AutoRule().caution == SETTINGS.first_part
    rule = rule_of(settings, caution=settings.first_part)
    lengths = []
    for t in range(5):
        lengths.append(longest(rule, t) / bound(1.0, settings))
        update(rule, 0.5)
    assert lengths == pytest.approx([min(1.0, settings.first_part * 2**t) for t in range(5)])


def undo(rule, t):
    """Undoes step t, which raised the loss much."""
    assert not rule.update_damping(found([1.0], 1.0, slopes=[-1.0]), {"whitened": 1.0}, 1.0)
    rule.undone(t)


def test_after_an_undone_update_a_part_of_its_length_is_allowed(settings):
    """Of its ½dᵀFd, not of the bound; and never nothing. The brake is shown by itself below."""
    rule = rule_of(settings)
    lengths = [longest(rule, 3)]
    for _ in range(2):
        undo(rule, 3)
        rule.brake = 1.0
        lengths.append(longest(rule, 4))
    update(rule, 0.5)
    lengths.append(longest(rule, 5))
    part = settings.undone_part
    assert [x / lengths[0] for x in lengths] == pytest.approx([1, part, part**2, 2 * part**2])
    for _ in range(20):
        undo(rule, 5)
        rule.brake = 1.0
        longest(rule, 6)
    assert longest(rule, 6) == pytest.approx(1e-6 * bound(1.0, settings))
    nowhere = rule_of(settings, most=0.0)
    nowhere.undone(3)
    assert nowhere.caution == settings.undone_part


def test_after_an_undone_update_the_slope_counts_for_less(settings):
    """Also within the bound; each time by the same factor. Until the next evaluation, coefficients are halved."""
    rule = rule_of(settings)
    alphas = [choose(rule, 3, -1e-3)]
    for t in (4, 5):
        undo(rule, t)
        between = rule.choose(t, {"whitened": -1e-3}, None)["whitened"]
        assert between <= alphas[-1] / 2
        assert rule.coefficients["whitened"] == pytest.approx(alphas[-1] / 2)
        alphas.append(choose(rule, t, -1e-3))
    assert alphas == pytest.approx([1e-3 * settings.undone_part**n for n in range(3)], rel=RIDGE)


def test_the_brake_is_released_while_the_next_batch_would_have_gone_further(settings):
    """Fast up to half of what was undone, then slowly, and no further than it was. Every slope is confirmed here."""
    rule = rule_of(settings)
    choose(rule, 3, -0.1)
    undo(rule, 3)
    rule.caution = 1.0
    expected = settings.undone_part
    for t in range(4, 22):
        rule.evaluate_until = t + 1  # nothing is averaged
        alpha = choose(rule, t, -0.1)
        assert alpha == pytest.approx(0.1 * expected, rel=RIDGE)
        rule.choose(t, {"whitened": -0.1}, None)  # a step that is not evaluated changes nothing
        too_far = copy.deepcopy(rule)
        too_far.update_trust(1e-3)
        assert too_far.brake == rule.brake == pytest.approx(expected)
        rule.update_trust(-0.1 + alpha)
        fast = min(settings.release * expected, 0.5)
        expected = min(1.0, max(fast, settings.release**0.25 * expected))
    assert rule.brake == 1.0


@pytest.mark.parametrize("slope", [-1e2, -1e6])
def test_no_slope_is_trusted_to_decrease_the_loss_by_more_than_there_is(slope, settings):
    """Along directions that F does not see no curvature limits the step; at evaluations and between."""
    rule = rule_of(settings)
    most = 2 * 0.7
    assert -slope * choose(rule, 3, slope, 1e-9, 0.7) == pytest.approx(most)
    between = rule.choose(4, {"whitened": 2 * slope}, None)["whitened"]
    assert -2 * slope * between == pytest.approx(most)


def test_a_users_own_nll_may_be_negative(settings):
    """It is known up to a constant only, so no share of it bounds the step; a number of nats does."""
    for loss in (-30.0, 0.0, 1.0, 400.0):
        rule = rule_of(settings, nll_bounded=False)
        assert choose(rule, 3, -1e3, loss=loss) ** 2 / 2 == pytest.approx(settings.bound_nats)


@pytest.mark.parametrize("t", [3, 40])
@pytest.mark.parametrize("examples", [2, 32, 64, 500])
def test_the_loss_is_averaged_over_evaluations_or_over_enough_examples(t, examples, settings):
    """The bound shows the average of the losses 40 and 4."""
    keep = max(settings.keep, 1 - examples / settings.evaluated_least)
    rule = rule_of(settings)
    longest(rule, t, 40.0, examples=examples)
    second = choose(rule, t, -10.0, loss=4.0, examples=examples) ** 2 / 2
    assert second == pytest.approx(bound(keep * 40 + (1 - keep) * 4, settings))


# How much of which direction ------------------------------------------------------------------------------------------


def all_three(rule, t, asked):
    """The coefficients if these minimise the quadratic model."""
    c = [1e-6] * len(asked)
    slopes = {name: -1e-6 * x for name, x in zip(NAMES, asked, strict=False)}
    return list(rule.choose(t, slopes, found(c, 4000.0)).values())


def test_adams_direction_and_the_last_update_have_upper_bounds_and_the_whitened_direction_has_none(settings):
    most = [100, settings.most_fallback, settings.most_momentum]
    assert all_three(rule_of(settings), 3, [100.0, 100.0, 100.0]) == pytest.approx(most, rel=RIDGE)
    within = [0.1, settings.most_fallback / 2, settings.most_momentum / 2]
    assert all_three(rule_of(settings), 3, within) == pytest.approx(within, rel=RIDGE)
    assert all_three(rule_of(settings), 3, [-1.0, -1.0, -1.0]) == [0, 0, 0]


@pytest.mark.parametrize("asked", [1.0, 2.0, 4.0, 400.0, 0.5, 0.45, 0.3, 0.25, 1e-3, -1.0])
def test_one_evaluation_counts_for_a_limited_factor_more_or_less_than_the_average(asked, settings):
    """It is clamped around the average, averaged, and then bounded by twice the clamped value."""
    rule = rule_of(settings)
    assert ask(rule, settings.evaluate_every - 2, 1.0) == pytest.approx(1.0, rel=RIDGE)
    early = copy.deepcopy(rule)
    assert ask(early, settings.evaluate_every - 1, asked) == pytest.approx(max(asked, 0), rel=RIDGE)
    clamped = min(max(asked, 1 / settings.clamp), settings.clamp)
    average = settings.keep + (1 - settings.keep) * clamped
    assert ask(rule, settings.evaluate_every, asked) == pytest.approx(min(average, 2 * clamped), rel=RIDGE)


def test_a_new_direction_is_taken_as_it_is_and_the_others_are_averaged(settings):
    rule = rule_of(settings)
    keep = settings.keep
    beta = settings.most_fallback / 4
    all_three(rule, 20, [1.0, beta])
    expected = [keep * 1 + (1 - keep) * 2, beta * (keep * 1 + (1 - keep) * 2), 0.5]
    assert all_three(rule, 30, [2.0, 2 * beta, 0.5]) == pytest.approx(expected, rel=RIDGE)


def test_all_averages_keep_the_same_part(settings):
    """Coefficients, slopes and the loss of an evaluation that is half of what it was before."""
    rule = rule_of(settings, slope_kept=1e-6, slope_promised=1e-6)
    before = [1.0, settings.most_fallback, 0.5]
    all_three(rule, 20, before)
    rule.update_trust(rule.slope_change - 1e-6)
    slopes = {name: -0.5e-6 * x for name, x in zip(NAMES, before, strict=True)}
    after = rule.choose(30, slopes, found([1e-6] * 3, 2000.0))
    rule.update_trust(rule.slope_change - 0.5e-6)
    part = settings.keep + (1 - settings.keep) / 2
    assert list(after.values()) == pytest.approx([part * x for x in before], rel=RIDGE)
    assert [rule.slope_kept, rule.slope_promised] == pytest.approx([part * 1e-6] * 2, rel=RIDGE)
    assert rule.loss == pytest.approx(part * 4000)


def test_between_evaluations_the_coefficients_stay(settings):
    rule = rule_of(settings)
    before = all_three(rule, 20, [1.0, settings.most_fallback / 2, 0.5])
    for t in (21, 29):
        assert rule.choose(t, {"whitened": -2e-6}, None) == dict(zip(NAMES, before, strict=True))


def test_a_gradient_of_zero_changes_no_coefficient(settings):
    rule = rule_of(settings)
    before = all_three(rule, 20, [1.0, settings.most_fallback / 2, 0.5])
    after = rule.choose(30, dict.fromkeys(NAMES, 0.0), found([0.0] * 3, 4000.0))
    assert list(after.values()) == before
    assert all_three(rule, 40, [1.0, settings.most_fallback / 2, 0.5]) == pytest.approx(before, rel=RIDGE)


@pytest.mark.parametrize("confirmed", [2.0, 1.0, 0.5, 0.0, -3.0])
def test_a_slope_counts_for_as_much_as_the_next_batch_confirms_within_bounds(confirmed, settings):
    """The next batch's slope along Δ is what is true of this one, and what the step itself has changed."""
    rule = rule_of(settings)
    for _ in range(200):
        alpha = choose(rule, 3, -0.1)
        rule.update_trust(-0.1 * confirmed + alpha)
    trust = min(1.0, max(settings.least_trust, confirmed))
    assert rule.trust == pytest.approx(trust, rel=1e-4)
    assert choose(rule, 3, -0.1) == pytest.approx(0.1 * trust, rel=1e-4)


@pytest.mark.parametrize("confirmed", [0.5, 0.9])
def test_the_slopes_trust_is_an_average(confirmed, settings):
    rule = rule_of(settings)
    alpha = choose(rule, 3, -0.1)
    rule.update_trust(-0.1 * confirmed + alpha)
    keep = settings.keep
    expected = (keep + (1 - keep) * 0.1 * confirmed) / (keep + (1 - keep) * 0.1)
    assert rule.trust == pytest.approx(expected, rel=RIDGE)


# Damping --------------------------------------------------------------------------------------------------------------


def test_a_bad_prediction_raises_the_damping_and_a_good_one_lowers_it(settings):
    factors = {}
    for ratio in (-1.0, 0.0, 1 - settings.well - 0.01):
        factors[ratio] = settings.raise_lambda
    for ratio in (1 - settings.well + 0.01, settings.well - 0.01):
        factors[ratio] = 1.0
    for ratio in (settings.well + 0.01, 3.0):
        factors[ratio] = 1 / settings.lower_lambda
    for ratio, factor in factors.items():
        assert update(rule_of(settings), ratio) == pytest.approx(settings.initial_lambda * factor)


def test_damping_has_no_bounds_that_matter(settings):
    rule = rule_of(settings)
    for _ in range(100):
        update(rule, 1)
    assert rule.lam == pytest.approx(settings.initial_lambda / settings.lower_lambda**100)
    for _ in range(100):
        update(rule, 0)
    expected = settings.initial_lambda * (settings.raise_lambda / settings.lower_lambda) ** 100
    assert rule.lam == pytest.approx(expected)


@pytest.mark.rest
@pytest.mark.parametrize("came_true", [0, 1])
def test_damping_neither_vanishes_nor_overflows(came_true, settings):
    rule = rule_of(settings)
    for _ in range(20_000):
        update(rule, came_true)
    assert 0 < rule.lam < math.inf


@pytest.mark.parametrize(("bounds", "good"), [(1.9, True), (2.1, False), (math.nan, False), (math.inf, False)])
def test_a_step_that_raises_the_loss_by_more_than_twice_the_bound_is_to_be_undone(bounds, good, settings):
    rule = rule_of(settings, caution=settings.first_part)
    choose(rule, 3, -0.01)
    evaluation = found([1.0], 1.0, slopes=[-0.2])
    assert rule.update_damping(evaluation, {"whitened": 0.2}, bounds * bound(1.0, settings)) is good
    assert rule.lam == settings.raise_lambda * settings.initial_lambda
    assert rule.caution == (2 if good else 1) * settings.first_part


def test_on_a_plateau_damping_falls_fast(settings):
    """Where dᵀFd is negligible beside λ‖d‖², so that λ alone limits the step; if the prediction was good."""
    rule = rule_of(settings)

    def kept(ratio, came_true=1.0):
        """By how much λ changes if dᵀFd is this times λ‖d‖²."""
        before = rule.lam
        return update(rule, came_true, 1 / (ratio * before)) / before

    fast = 1 / settings.leave_plateau
    assert [kept(0.9 * settings.plateau) for _ in range(10)] == pytest.approx([fast] * 10)
    slowly = [kept(ratio) for ratio in (1.1 * settings.plateau, 0.9, 1.0, 1.1, 1e3)]
    assert slowly == pytest.approx([1 / settings.lower_lambda] * 5)
    assert kept(0.9 * settings.plateau, came_true=0.5) == 1
    assert kept(0.9 * settings.plateau, came_true=0.0) == pytest.approx(settings.raise_lambda)


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
        scatter = observations * value * torch.eye(side.blocks.size, dtype=torch.float64)
        side.moments = Moments(observations, None, scatter)
    return layer


def epsilon(rule, layer, side):
    return float(rule.damping(layer, side).amounts(torch.tensor([side.mean_eigenvalue], dtype=torch.float64)))


def test_a_certain_output_counts_as_a_faint_one(settings):
    """ε₁ε₂ = λ, in the proportion of the mean eigenvalues, but D's counts as at least a part of λ."""
    for d in (1e-300, 1e-9, 1e-5, 1e-3, 10.0):
        rule = rule_of(settings)
        layer = layer_with(4.0, d, 1e12)
        forward = epsilon(rule, layer, layer.forward)
        backward = epsilon(rule, layer, layer.backward)
        assert forward * backward == pytest.approx(settings.initial_lambda)
        assert forward / backward == pytest.approx(4 / max(d, settings.faint * settings.initial_lambda))


def test_few_observations_add_damping(settings):
    rule = rule_of(settings)
    few = layer_with(4.0, 2.0, 10.0)
    many = layer_with(4.0, 2.0, 1e12)
    for side, trace in (("forward", 4.0 * 5), ("backward", 2.0 * 3)):
        with_few, with_many = (epsilon(rule, layer, getattr(layer, side)) for layer in (few, many))
        assert with_few - with_many == pytest.approx(settings.sampling * trace / 10)


def test_damping_that_the_user_set_is_not_chosen(settings):
    layer = layer_with(4.0, 2.0, 10.0)
    assert rule_of(settings, damping_given=True).damping(layer, layer.forward) is None
    layer.forward.moments = None  # nor before a side was measured
    assert rule_of(settings).damping(layer, layer.forward) is None


# Progress -------------------------------------------------------------------------------------------------------------


def gain_after(progress, settings, *means, may_rise=True):
    """The gain after windows of batches with these mean losses."""
    for mean in means:
        for noise in np.linspace(-0.1, 0.1, settings.progress_steps):
            progress.note(float(mean + noise), settings, may_rise)
    return progress.gain


def test_the_gain_falls_while_losses_fall_by_less_than_promised_and_then_rises_again(settings):
    progress = Progress(predicted=1e-3)
    promised = 1e-3 * settings.progress_steps
    assert gain_after(progress, settings, 2.0) == 1, "there is nothing to compare the first window with"
    little = 0.9 * settings.little_progress * promised
    assert gain_after(progress, settings, 2 - little) == settings.shorten
    assert gain_after(progress, settings, 2.5) == settings.shorten**2, "they rise"
    some = (settings.little_progress + settings.enough_progress) / 2 * promised
    assert gain_after(progress, settings, 2.5 - some) == settings.shorten**2
    enough = 1.1 * settings.enough_progress * promised
    assert gain_after(progress, settings, 2.5 - some - enough, may_rise=False) == settings.shorten**2
    assert gain_after(progress, settings, *(2.5 - some - n * enough for n in (2, 3, 4))) == 1


def test_steps_that_promise_nothing_say_nothing_about_progress(settings):
    assert gain_after(Progress(), settings, 2.0, 2.0, 3.0) == 1


def test_the_predicted_decrease_counts_what_other_data_confirm_and_the_step_that_is_made(settings):
    """s ∇LᵀΔ α M + ½ (α M)² ΔᵀFΔ, so that a schedule lowers what is promised too."""
    for multiplier in (1.0, 0.1):
        rule = rule_of(settings, slope_kept=0.6, multiplier=multiplier)
        alpha = choose(rule, 0, -1e-3, 1e-2, loss=40.0)
        assert alpha == pytest.approx(0.6 * 0.1, rel=RIDGE)
        step = multiplier * alpha
        assert rule.predicted == pytest.approx(0.6 * 1e-3 * step - 1e-2 * step**2 / 2, rel=RIDGE)


def test_the_gain_shortens_steps_in_proportion(settings):
    """Of spectral steps. Natural ones, which contain a part of the last update, stay as they are."""
    full, half, natural = (
        choose(rule_of(settings, gain=gain, shortens=shortens), 0, -1e-3, 1e-2, loss=40.0)
        for gain, shortens in ((1.0, True), (0.5, True), (0.5, False))
    )
    assert half == pytest.approx(full / 2, rel=RIDGE)
    assert natural == full
