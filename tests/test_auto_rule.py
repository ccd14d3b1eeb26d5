"""The rule behind lr="auto" by itself: numbers in, numbers out."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from automatic import auto
from bprong.auto import Auto
from bprong.evaluation import Evaluation
from helpers import mlp

NAMES, RIDGE = ("whitened", "adam", "last"), 1e-5  # the minimiser's own is a tenth of it


def found(curvatures, loss, examples=64, slopes=None):
    """An evaluation of directions that are orthogonal in F."""
    Q = torch.tensor(curvatures, dtype=torch.float64).diag()
    slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float64)
    return Evaluation(Q, loss, slopes, None, [SimpleNamespace(x=torch.zeros(examples, 1))])


def choose(rule, t, slope, curvature=1.0, loss=1.0, examples=64, rate=1.0, product=0.0):
    """α where Δ is the only direction. product: ΔᵀΔ, which λ multiplies"""
    metric = torch.full((1, 1), product, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    return rule.choose(t, {"whitened": slope}, found([curvature], loss, examples), metric, rate)["whitened"]


def ask(rule, t, alpha, curvature=1e-6, loss=40.0):
    """The average after an evaluation whose minimum is at α, far within all bounds."""
    choose(rule, t, -alpha * curvature, curvature, loss)
    return rule.told()["alpha"]


def bound(loss):
    return max(0.05 * loss, min(0.1, 0.25 * loss))


def longest(rule, t, loss=1.0, rate=1.0, **more):
    """½dᵀFd of a step that would rather be four times as long, and promises little."""
    return choose(rule, t, -2 * math.sqrt(2 * bound(loss)), 1.0, loss, rate=rate, **more) ** 2 / 2


def learn(rule, ratio):
    """λ after a step of which this part of the decrease promised came true."""
    assert rule.learn(found([1.0], 1.0, slopes=[-0.2]), {"whitened": 0.2}, -0.02 * ratio)
    return rule.told()["lambda"]


# When -------------------------------------------------------------------------------------------------------------


def test_evaluations_are_at_first_all_then_every_second_then_every_tenth():
    assert [t for t in range(51) if Auto().evaluates(t)] == [*range(10), 10, 12, 14, 16, 18, 20, 30, 40, 50]


@pytest.mark.parametrize("t", [0, 3, 15, 33])
def test_the_twenty_after_a_step_taken_back_are_all_evaluated(t):
    rule = Auto()
    rule.undone(t)
    assert all(rule.evaluates(t + i) for i in range(1, 21))
    assert [rule.evaluates(i) for i in range(t + 21, 80)] == [Auto().evaluates(i) for i in range(t + 21, 80)]


# How far ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 50.0])
@pytest.mark.parametrize("loss", [0.02, 0.2, 1.0, 40.0])
def test_predictions_move_by_no_more_than_a_part_of_the_loss_whatever_the_learning_rate(loss, rate):
    rule = Auto()
    for t in (3, 4, 20, 30):
        assert longest(rule, t, loss, rate) == pytest.approx(bound(loss))
    between = rule.choose(31, {"whitened": -2 * math.sqrt(2 * bound(loss))}, None, None, rate)["whitened"]
    assert between**2 / 2 == pytest.approx(bound(loss))
    assert rule.told()["alpha"] ** 2 / 2 == pytest.approx(bound(loss))  # nor is more remembered, for the average


def test_within_the_bound_the_learning_rate_multiplies_the_step():
    rule = Auto()
    for rate in (0.1, 1.0, 7.0):
        assert choose(rule, 3, -1e-3, rate=rate) == pytest.approx(rate * 1e-3, rel=RIDGE)
        assert rule.choose(4, {"whitened": -1e-3}, None, None, rate)["whitened"] == pytest.approx(
            rate * 1e-3, rel=RIDGE
        )


def test_a_given_bound_holds_where_it_is_the_lower_one():
    assert longest(Auto(bound=1e-4), 3) == pytest.approx(1e-4)
    assert longest(Auto(bound=10.0), 3) == pytest.approx(bound(1.0))


def test_the_first_step_may_go_a_quarter_of_the_bound_and_good_ones_double_it():
    rule, lengths = Auto(), []
    for t in range(5):
        lengths.append(longest(rule, t) / bound(1.0))
        learn(rule, 0.5)
    assert lengths == pytest.approx([0.25, 0.5, 1, 1, 1])


def test_after_a_step_taken_back_the_next_is_half_as_long():
    """In ½dᵀFd a quarter, of what it was and not of the bound; never nothing."""
    rule = Auto()
    lengths = [longest(rule, 3)]
    for _ in range(2):
        assert not rule.learn(found([1.0], 1.0, slopes=[-1.0]), {"whitened": 1.0}, 1.0)
        rule.undone(3)
        lengths.append(longest(rule, 4))
    learn(rule, 0.5)
    lengths.append(longest(rule, 5))
    assert [x / lengths[0] for x in lengths] == pytest.approx([1, 1 / 4, 1 / 16, 1 / 8])
    for _ in range(20):
        rule.undone(5)
        longest(rule, 6)
    assert longest(rule, 6) == pytest.approx(1e-6 * bound(1.0))


@pytest.mark.parametrize("slope", [-1e2, -1e6])
def test_no_slope_is_believed_that_promises_more_than_twice_the_loss(slope):
    """What F does not see has no curvature to end it; at evaluations and between them, a higher lr or not."""
    rule = Auto()
    for rate in (1.0, 50.0):
        assert -slope * choose(rule, 3, slope, 1e-9, 0.7, rate=rate) == pytest.approx(1.4)
        assert -2 * slope * rule.choose(4, {"whitened": 2 * slope}, None, None, rate)["whitened"] == pytest.approx(1.4)


def test_a_likelihood_of_your_own_may_be_negative():
    """It is known but for a constant: no part of it bounds the step, which may move predictions by 0.1 nats."""
    for loss in (-30.0, 0.0, 1.0, 400.0):
        rule = Auto(free=True)
        assert choose(rule, 3, -1e3, loss=loss) ** 2 / 2 == pytest.approx(0.1)


AVERAGED = [(5, 64, 0.9), (5, 500, 0.9), (5, 2, 62 / 64), (19, 64, 0.9)]
AVERAGED += [(20, 64, 0.9**10), (40, 500, 0.9**10), (40, 2, 62 / 64), (40, 32, 0.5)]


@pytest.mark.parametrize(("t", "examples", "keep"), AVERAGED)
def test_the_loss_is_averaged_over_ten_steps_or_over_as_many_examples_as_are_enough(t, examples, keep):
    """The bound shows it: losses of 40, then 4. From step 20 on ten steps lie between two evaluations."""
    rule = Auto()
    longest(rule, t, 40.0, examples=examples)
    second = choose(rule, t, -3.0, loss=4.0, examples=examples) ** 2 / 2
    assert second == pytest.approx(bound(keep * 40 + (1 - keep) * 4))


# How much of which direction --------------------------------------------------------------------------------------


def all_three(rule, t, asked):
    """Coefficients where the quadratic model's minimum is at these."""
    c = [1e-6] * len(asked)
    slopes = {name: -1e-6 * x for name, x in zip(NAMES, asked, strict=False)}
    zero = torch.zeros(len(c), len(c), dtype=torch.float64)
    return list(rule.choose(t, slopes, found(c, 4000.0), (zero, zero)).values())


def test_adams_direction_and_the_last_update_have_their_most_and_the_whitened_one_has_none():
    assert all_three(Auto(), 3, [100.0, 100.0, 100.0]) == pytest.approx([100, 10, 0.95], rel=RIDGE)
    assert all_three(Auto(), 3, [0.1, 9.0, 0.9]) == pytest.approx([0.1, 9, 0.9], rel=RIDGE)
    assert all_three(Auto(), 3, [-1.0, -1.0, -1.0]) == [0, 0, 0]


AVERAGES = {1.0: 1.0, 2.0: 1.3, 4.0: 1.9, 400.0: 1.9, 0.5: 0.85, 0.45: 0.835, 0.3: 0.6, 0.25: 0.5, 1e-3: 0.5, -1.0: 0.5}


@pytest.mark.parametrize("asked", AVERAGES)
def test_one_evaluation_is_believed_four_times_more_or_less_than_the_average(asked):
    """By 0.3 of it, with 0.7 of the average; but no more than twice what it is believed to ask for."""
    rule = Auto()
    assert ask(rule, 18, 1.0) == pytest.approx(1.0, rel=RIDGE)
    early = copy.deepcopy(rule)
    assert ask(early, 19, asked) == pytest.approx(max(asked, 0), rel=RIDGE)
    assert ask(rule, 20, asked) == pytest.approx(AVERAGES[asked], rel=RIDGE)


def test_a_direction_that_is_new_is_taken_as_it_is_and_the_others_are_averaged():
    rule = Auto()
    all_three(rule, 20, [1.0, 2.0])
    assert all_three(rule, 30, [2.0, 4.0, 0.5]) == pytest.approx([1.3, 2.6, 0.5], rel=RIDGE)


def test_between_evaluations_the_coefficients_stay():
    rule = Auto()
    before = all_three(rule, 20, [1.0, 2.0, 0.5])
    for t in (21, 29):
        assert rule.choose(t, {"whitened": -2e-6}, None, None) == dict(zip(NAMES, before, strict=True))


def test_a_gradient_of_zero_changes_no_coefficient():
    rule = Auto()
    before = all_three(rule, 20, [1.0, 2.0, 0.5])
    zero = torch.zeros(3, 3, dtype=torch.float64)
    after = rule.choose(30, dict.fromkeys(NAMES, 0.0), found([0.0] * 3, 4000.0), (zero, zero))
    assert list(after.values()) == before
    assert all_three(rule, 40, [1.0, 2.0, 0.5]) == pytest.approx(before, rel=RIDGE)


@pytest.mark.parametrize(("kept", "s"), [(2.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0.0, 0.05), (-3.0, 0.05)])
def test_the_slope_counts_for_as_much_as_the_next_batch_finds_of_it_and_for_a_twentieth_at_least(kept, s):
    """The next slope along Δ is what was true of this one, and what the step itself has changed."""
    rule = Auto()
    for _ in range(60):
        alpha = choose(rule, 3, -0.1)
        rule.judge(-0.1 * kept + alpha)
    assert rule.s == pytest.approx(s, rel=1e-4)
    assert choose(rule, 3, -0.1) == pytest.approx(0.1 * s, rel=1e-4)


# Damping ----------------------------------------------------------------------------------------------------------

PROMISES = {-1.0: 2.0, 0.0: 2.0, 0.24: 2.0, 0.26: 1.0, 0.74: 1.0, 0.76: 1 / 1.1, 3.0: 1 / 1.1}


@pytest.mark.parametrize("ratio", PROMISES)
def test_a_broken_promise_doubles_the_damping_and_one_that_is_kept_lets_it_fall(ratio):
    assert learn(Auto(), ratio) == pytest.approx(1e-3 * PROMISES[ratio])


def test_damping_stays_within_its_bounds():
    rule = Auto()
    assert [learn(rule, 0) for _ in range(20)][-2:] == [1.0, 1.0]
    assert [learn(rule, 1) for _ in range(200)][-2:] == [1e-4, 1e-4]


@pytest.mark.parametrize(("change", "good"), [(0.19, True), (0.21, False), (math.nan, False), (math.inf, False)])
def test_a_step_that_raised_the_loss_by_more_than_twice_the_bound_is_to_be_undone(change, good):
    rule = Auto()
    choose(rule, 3, -0.1)
    assert rule.learn(found([1.0], 1.0, slopes=[-0.2]), {"whitened": 0.2}, change) is good
    assert rule.told()["lambda"] == 2e-3


def test_where_damping_alone_holds_the_step_it_falls_without_bound_and_comes_back():
    """By four on a plateau, where predictions move for a hundredth of what λ asks; it stays where F and λ are on a par,
    and doubles, up to where it may be, once F is more."""
    rule = Auto()

    def kept(curvature):
        before = rule.told()["lambda"]
        choose(rule, 3, -1e-3 * curvature, curvature, product=1.0)
        return learn(rule, 1.0) / before

    assert [kept(1e-12) for _ in range(10)] == [0.25] * 10
    lam = rule.told()["lambda"]
    assert kept(0.02 * lam) == kept(0.9 * lam) == 1
    assert [kept(1.0) for _ in range(12)] == [2.0] * 12
    for _ in range(20):
        kept(1.0)
    assert rule.told()["lambda"] == 1e-4


def test_an_output_that_is_certain_counts_as_a_faint_one():
    """Of D less than a hundredth of λ the split of λ between the sides takes no notice; ε₁ε₂ = λ all the same."""
    layer = auto(mlp(5, 3)).statistics.layers["0"]
    split = {}
    for d in (1e-300, 1e-9, 1e-5, 1e-3, 10.0):
        layer.level = {"forward": (4.0, 1e12), "backward": (d, 1e12)}
        split[d] = [Auto().damping(layer, side).value for side in ("forward", "backward")]
        assert split[d][0] * split[d][1] == pytest.approx(1e-3)
        assert split[d][0] / split[d][1] == pytest.approx(4 / max(d, 1e-5))
    assert Auto(fixed=True).damping(layer, "forward") is None
