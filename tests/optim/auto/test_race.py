"""step="auto": the leader's path, the rival's path, what decides between them, and what is not raced."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.capture.tape import Batch
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.loss import Targets
from bprong.optim.auto.race import SETTINGS, Race, Rival, _numbers
from helpers import assert_close, assert_unchanged, classification, mlp, snapshot
from training import batches, train

EXACT = {"solver": "exact", "seed": 3}
DATA = classification(8000, 5, 3)  # no example comes again


def optimizer_of(model: nn.Module, step: str = "auto", **settings: object) -> bprong.BPRONG:
    return bprong.BPRONG(model, nn.CrossEntropyLoss(), step=step, options=EXACT, **settings)


def classes(seed: int = 0, *widths: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(*(widths or (5, 4, 3)))


def race_of(optimizer: bprong.BPRONG) -> Race:
    race = optimizer._race
    assert race is not None
    return race


def rival_of(optimizer: bprong.BPRONG) -> Rival:
    rival = race_of(optimizer).rival
    assert rival is not None
    return rival


def decide(monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    """Every race finds this difference."""
    monkeypatch.setattr(Rival, "verdict", lambda self: (difference, 0.01))


def raced_steps() -> int:
    return SETTINGS.length


# Both paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phi", [nn.Tanh, lambda: nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), nn.Dropout(0.3))]
)
def test_the_leader_takes_the_path_of_natural_steps(phi):
    """Bit for bit, buffers and the user's random numbers included, although the rival is trained in between."""
    paths = []
    for step in ("auto", "natural"):
        torch.manual_seed(0)
        model = mlp(5, 4, 3, phi=phi)
        train(model, optimizer_of(model, step), batches(*DATA, 20, 9))
        paths.append(snapshot(model) | {"random": torch.get_rng_state()})
    assert_unchanged(*paths)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_rival_takes_the_path_of_spectral_steps(normalised):
    """With the statistics of the leader, which are those of the first batch here."""
    torch.manual_seed(0)
    model = mlp(5, 4, 3, phi=(lambda: nn.BatchNorm1d(4, dtype=torch.float64)) if normalised else nn.Tanh)
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(model, every=1000)
    train(model, optimizer, batches(*DATA, 20, 12))
    train(twin, optimizer_of(twin, "spectral", every=1000), batches(*DATA, 20, 12))
    rival = rival_of(optimizer)
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(rival.values[p], expected, 1e-9)
    for buffer, expected in zip(rival.buffers, twin.buffers(), strict=True):
        assert_close(buffer, expected, 1e-9)


def test_accumulated_batches_are_one_step_of_both():
    def accumulate(model: nn.Module, optimizer: bprong.BPRONG) -> None:
        for x, y in batches(*DATA, 20, 6):
            optimizer.zero_grad()
            for part in (slice(0, 10), slice(10, 20)):
                (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
            optimizer.step()

    model = classes()
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(model, every=1000)
    accumulate(model, optimizer)
    accumulate(twin, optimizer_of(twin, "spectral", every=1000))
    assert len(rival_of(optimizer).differences) == 6
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(rival_of(optimizer).values[p], expected, 1e-9)


def test_losses_are_compared_before_a_batch_is_trained_on():
    model = classes()
    optimizer = optimizer_of(model)
    for x, y in batches(*DATA, 20, 5):
        with torch.no_grad():
            rival = leader = float(F.cross_entropy(model(x), y))
            if race_of(optimizer).rival is not None:
                weights = {name: rival_of(optimizer).values[p] for name, p in model.named_parameters()}
                rival = float(F.cross_entropy(torch.func.functional_call(model, weights, x), y))
        train(model, optimizer, [(x, y)])
        expected = (rival - leader) / max(rival, leader)
        assert math.isclose(rival_of(optimizer).differences[-1], expected, rel_tol=1e-9, abs_tol=1e-12)


# The decision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [{}, {"backward_damping": 0.1}], ids=["default", "of one side"])
def test_a_rival_that_wins_hands_over_its_weights_and_goes_on(damping, monkeypatch):
    """Afterwards its momentum and its factors are in use: the path is that of spectral steps from the beginning.

    If the user has set a damping, the leader's factors are not in units of the features, and the rival's are.
    """
    decide(monkeypatch, -0.5)
    model = classes()
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(model, every=1000, **damping)
    steps = next(iter(SETTINGS.looks)) + 10
    train(model, optimizer, batches(*DATA, 20, steps))
    train(twin, optimizer_of(twin, "spectral", every=1000, **damping), batches(*DATA, 20, steps))
    assert optimizer._rule.kind == "Automatic, spectral"
    assert "-50%" in race_of(optimizer).history[0]
    for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, expected, 1e-7)  # msgn enlarges the rounding of the step before


def test_a_leader_that_wins_goes_on_as_before(monkeypatch):
    decide(monkeypatch, 0.5)
    model = classes()
    twin = copy.deepcopy(model)
    train(model, optimizer_of(model), batches(*DATA, 20, 30))
    train(twin, optimizer_of(twin, "natural"), batches(*DATA, 20, 30))
    assert_unchanged(snapshot(twin), snapshot(model))


def test_a_rival_that_wins_plainly_ends_a_race_early(monkeypatch):
    for difference, expected in ((-0.5, min(SETTINGS.looks)), (-0.1, raced_steps()), (0.5, raced_steps())):
        decide(monkeypatch, difference)
        model = classes()
        optimizer = optimizer_of(model)
        count = 0
        for batch in batches(*DATA, 20, SETTINGS.starts[1]):
            if race_of(optimizer).next == SETTINGS.starts[0]:
                train(model, optimizer, [batch])
                count += 1
        assert count == expected


def test_a_later_race_changes_the_rule_only_if_the_difference_is_certain(monkeypatch):
    for difference, kind in ((-0.005, "Automatic"), (-0.03, "Automatic, spectral")):
        model = classes()
        optimizer = optimizer_of(model)
        decide(monkeypatch, 0.5)
        train(model, optimizer, batches(*DATA, 20, SETTINGS.starts[1]))
        decide(monkeypatch, difference)
        train(model, optimizer, batches(*(part[4000:] for part in DATA), 20, SETTINGS.length))
        assert optimizer._rule.kind == kind, difference


@pytest.mark.parametrize(("epoch", "steps"), [(SETTINGS.length + 10, SETTINGS.length), (18, 18), (8, 8)])
def test_a_race_of_classifiers_ends_when_examples_come_again(epoch, steps, monkeypatch):
    """Without a winner, if it was too short for a look."""
    decide(monkeypatch, -0.1)
    model = classes()
    optimizer = optimizer_of(model)
    rows = [part[: 20 * epoch] for part in DATA]
    train(model, optimizer, batches(*rows, 20, SETTINGS.length + 1))
    (said,) = race_of(optimizer).history
    assert f"after {steps} steps" in said
    is_too_short = epoch < min(SETTINGS.looks)
    assert ("examples come again" in said) == is_too_short
    assert ("spectral" in optimizer._rule.kind) != is_too_short


def test_a_race_of_regressions_goes_on_when_examples_come_again():
    model = classes()
    optimizer = bprong.BPRONG(model, nn.MSELoss(), options=EXACT)
    targets = F.one_hot(DATA[1]).double()
    train(model, optimizer, batches(DATA[0][:40], targets[:40], 20, 12), loss=F.mse_loss)
    assert len(rival_of(optimizer).differences) == 12


@pytest.mark.parametrize("how", ["shuffled", "cast", "large", "arguments"])
def test_examples_are_told_from_others_wherever_they_are_in_a_batch(how):
    torch.manual_seed(0)
    x = torch.randn(50, 3, 4)
    order = torch.randperm(50)
    others = torch.randn(50, 3, 4)
    wrap = {
        "shuffled": lambda x: x, "cast": lambda x: x.half(), "large": lambda x: x + 1e6,
        "arguments": lambda x: (x[:, 0], {"mask": x > 0, "grid": torch.ones(7)}),
    }[how]  # fmt: skip
    noted = set(_numbers(Batch(x=wrap(x))))
    assert set(_numbers(Batch(x=wrap(x[order][:20])))) <= noted
    assert not noted & set(_numbers(Batch(x=wrap(others))))


def test_pairs_and_targets_tell_examples_apart():
    """A pair is not its sum, and one input may have several targets."""
    first, second = torch.tensor([1, 2, 3]), torch.tensor([3, 2, 1])
    assert len(set(_numbers(Batch(x=(first, second))))) == 3
    loss = declared_loss("cross_entropy")
    batches = [Batch(x=torch.zeros(2, 5), targets=Targets.observed(loss, torch.tensor([k, k + 1]))) for k in (0, 2)]
    assert not set(_numbers(batches[0])) & set(_numbers(batches[1]))


def test_what_has_no_tensors_is_new():
    assert _numbers(Batch(x=object())) == []


def test_a_race_goes_on_if_there_are_enough_examples(monkeypatch):
    decide(monkeypatch, 0.5)
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*(part[:1000] for part in DATA), 100, 12))
    assert len(rival_of(optimizer).differences) == 12


def reset(model, optimizer):
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def freeze(model, optimizer):
    model[0].requires_grad_(False)


def add_buffer(model, optimizer):
    model.register_buffer("cache", torch.zeros(3))


@pytest.mark.parametrize("disturb", [reset, freeze, add_buffer])
def test_a_race_ends_if_somebody_changes_the_model(disturb):
    """The weights of the rival know nothing of it, and must not be handed over."""
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 5))
    assert race_of(optimizer).rival is not None
    disturb(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    other._race = None
    for one, its_optimizer in ((model, optimizer), (twin, other)):
        train(one, its_optimizer, batches(*DATA, 20, 3))
    assert "changed" in race_of(optimizer).history[0]
    assert race_of(optimizer).rival is None
    assert_unchanged(snapshot(twin), snapshot(model))


def test_an_undone_update_does_not_end_a_race():
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 5))
    x, y = DATA[0][400:420], DATA[1][400:420]
    optimizer.zero_grad()
    (1e6 * F.cross_entropy(model(x), y)).backward()
    optimizer._rule.rule.first_loss = 1e-9  # so that the loss has blown up
    optimizer.step()
    train(model, optimizer, batches(*(part[800:] for part in DATA), 20, 3))
    assert race_of(optimizer).rival is not None


def test_a_batch_without_counted_targets_is_left_out():
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 5))
    optimizer.zero_grad()
    ignored = torch.full((20,), -100)
    F.cross_entropy(model(DATA[0][400:420]), ignored, reduction="sum").backward()
    optimizer.step()
    train(model, optimizer, batches(*(part[800:] for part in DATA), 20, 1))
    assert race_of(optimizer).rival is not None


def test_one_difference_decides_nothing(monkeypatch):
    """At the first step dropout alone makes one."""
    torch.manual_seed(0)
    model = mlp(5, 40, 3, phi=lambda: nn.Dropout(0.9))
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 4, 1))
    assert abs(rival_of(optimizer).differences[0]) > SETTINGS.plain


def test_a_rival_whose_loss_is_not_finite_has_lost():
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 12))
    for value in rival_of(optimizer).values.values():
        value.fill_(math.nan)
    train(model, optimizer, [(DATA[0][-20:], DATA[1][-20:])])
    assert "after 13 steps the loss is not finite" in race_of(optimizer).history[0]
    assert race_of(optimizer).next == SETTINGS.starts[1]
    assert optimizer._rule.kind == "Automatic"


def test_a_rival_of_a_later_race_has_the_multiplier_of_the_leader(monkeypatch):
    """Of a schedule, which it has not seen from the beginning."""
    decide(monkeypatch, 0.5)
    model = classes()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.95 if t > 10 else 1.0)
    for batch in batches(*DATA, 20, SETTINGS.starts[1] + 3):
        train(model, optimizer, [batch])
        scheduler.step()
    assert rival_of(optimizer).rule.rule.plan_counts
    assert math.isclose(rival_of(optimizer).rule.rule.multiplier, 0.95)
    assert math.isclose(optimizer._rule.rule.multiplier, 0.95)


def test_there_are_no_more_races_than_starts(monkeypatch):
    decide(monkeypatch, 0.5)
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, SETTINGS.starts[-1] + SETTINGS.length))
    assert race_of(optimizer).next == math.inf
    assert len(race_of(optimizer).history) == len(SETTINGS.starts)


def test_a_verdict_is_the_mean_of_the_last_third_with_its_standard_error():
    model = classes()
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 1))
    rival = rival_of(optimizer)
    rival.differences = [9.0] * 12 + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    mean, error = rival.verdict()
    assert math.isclose(mean, 3.5)
    assert math.isclose(error, math.sqrt(3.5 / 6))


def test_natural_steps_are_chosen_where_they_are_better():
    """The README's data, on which spectral steps are soon too long."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    model = mlp(64, 100, 10, dtype=torch.float32, phi=nn.ReLU)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss())
    for _ in range(3):
        train(model, optimizer, [(x[chosen].float(), y[chosen]) for chosen in torch.randperm(1400).split(100)])
    assert optimizer._rule.kind == "Automatic"


# What is not raced ----------------------------------------------------------------------------------------------------


def history_after(steps: int, model: nn.Module, loss, prepare=lambda optimizer: None) -> list[str]:
    optimizer = optimizer_of(model)
    prepare(optimizer)
    train(model, optimizer, batches(*DATA, 20, steps), loss=loss)
    assert race_of(optimizer).rival is None
    return race_of(optimizer).history


def test_further_terms_of_a_loss_are_not_raced():
    """The rival could not be trained by them."""
    model = classes()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) + 0.1 * sum(p.square().sum() for p in model.parameters())

    assert "declared loss alone" in history_after(1, model, loss)[0]


def test_dropout_is_no_further_term():
    torch.manual_seed(0)
    model = mlp(5, 40, 3, phi=lambda: nn.Dropout(0.3))
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(*DATA, 20, 3))
    assert len(rival_of(optimizer).differences) == 3


def test_clipping_is_no_further_term():
    model = classes()
    optimizer = optimizer_of(model)
    for x, y in batches(*DATA, 20, 3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert len(rival_of(optimizer).differences) == 3


def test_hooks_on_parameters_are_not_called_twice():
    model = classes()
    calls = []
    model[0].weight.register_hook(lambda gradient: calls.append(1))
    assert "hooks on parameters" in history_after(2, model, F.cross_entropy)[0]
    assert len(calls) == 2


def test_a_model_that_is_too_large_or_divided_makes_spectral_steps(monkeypatch):
    monkeypatch.setattr("bprong.optim.auto.race.SETTINGS", SETTINGS.__class__(largest=10))
    optimizer = optimizer_of(classes())
    assert optimizer._race is None
    assert optimizer._rule.kind == "Automatic, spectral"


def test_a_given_rate_makes_natural_steps():
    optimizer = optimizer_of(classes(), lr=0.01)
    assert optimizer._race is None
    assert optimizer._rule.kind == "FixedRate"


def test_a_race_waits_for_the_end_of_a_warm_up():
    model = classes()
    optimizer = optimizer_of(model)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 10))
    for t, batch in enumerate(batches(*DATA, 20, 12)):
        train(model, optimizer, [batch])
        warm_up.step()
        assert (race_of(optimizer).rival is not None) == ((t + 1) / 10 >= SETTINGS.full)


# State ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:layer '0':UserWarning")
def test_a_race_continues_without_a_layer_that_was_left_to_the_fallback_rule():
    """A new optimizer has it among its layers; the race that was saved has not."""

    class Reused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x @ (2 * self[0].weight.T))[:, :3]

    def made() -> tuple[nn.Module, bprong.BPRONG]:
        torch.manual_seed(0)
        model = Reused(*mlp(5, 4, 3))
        return model, optimizer_of(model)

    data = list(batches(*DATA, 20, 14))
    model, optimizer = made()
    train(model, optimizer, data[:8])
    assert set(rival_of(optimizer).layers) == {"2"}
    other, other_optimizer = made()
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, data[8:])
    assert_unchanged(snapshot(model), snapshot(other))
    assert rival_of(optimizer).differences == rival_of(other_optimizer).differences


def saved(model: nn.Module, optimizer: bprong.BPRONG) -> tuple[nn.Module, bprong.BPRONG]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    other = classes(seed=9)
    other_optimizer = optimizer_of(other)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    other.load_state_dict(of_model)
    other_optimizer.load_state_dict(of_optimizer)
    return other, other_optimizer


@pytest.mark.parametrize(
    "clone",
    [saved, lambda *pair: copy.deepcopy(pair), lambda *pair: pickle.loads(pickle.dumps(pair))],
    ids=["torch.save", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("steps", [0, 7, 25])
def test_a_race_continues_bit_for_bit(clone, steps, monkeypatch):
    """Until after its decision, which the rival wins; and after it, where the checkpoint has no rival."""
    decide(monkeypatch, -0.5)
    model = classes()
    optimizer = optimizer_of(model)
    data = list(batches(*DATA, 20, steps + 25))
    train(model, optimizer, data[:steps])
    other, other_optimizer = clone(model, optimizer)
    assert (race_of(optimizer).rival is None) == (steps in (0, 25))
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, data[steps:])
    assert other_optimizer._rule.kind == "Automatic, spectral"
    assert_unchanged(snapshot(model), snapshot(other))
