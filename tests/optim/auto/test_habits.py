"""What users of AdamW do to learning rates and weight decay does the same to lr="auto"."""

import copy
import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers

import bprong
from automatic import DATA, auto, loss_of
from bprong.optim.auto.rule import SETTINGS
from helpers import assert_close, assert_unchanged, mlp, quick_cases, snapshot
from training import batches, train

STEPS = ["natural", "spectral"]


def rule_of(optimizer):
    return optimizer._rule.rule


# Schedules ------------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 0.8**t),
    "warm-up from zero": lambda o: schedulers.LambdaLR(o, lambda t: min(1.0, t / 5)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.7),
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 6], gamma=0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.2, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-3, total_steps=12),
    "OneCycleLR, three phases": lambda o: schedulers.OneCycleLR(o, 1e-3, total_steps=12, three_phase=True),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.3),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 3), schedulers.ExponentialLR(o, 0.8)], optimizer=o
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 6)], milestones=[4]
    ),
}


def scheduled(kind, model, name, steps=12):
    """Makes steps with a scheduler, and yields the lr before each, the model before and after, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if kind == "adamw" else auto(model, step=kind)
    scheduler = SCHEDULERS[name](optimizer)
    for batch in batches(*DATA, 20, steps):
        lr = optimizer.param_groups[0]["lr"]
        before = copy.deepcopy((model, optimizer))
        train(model, optimizer, [batch])
        yield lr, before, model, optimizer, batch
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # of torch 2.6 at its own SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_each_step_is_the_part_of_the_whole_one_that_it_would_be_for_adamw(name):
    """Of the step that is made at the same point at the full learning rate, also where λ and averages adapt."""
    parts = [lr / 1e-3 for lr, *_ in scheduled("adamw", mlp(5, 4, 3), name)]
    for part, (_, before, model, optimizer, batch) in zip(parts, scheduled("natural", mlp(5, 4, 3), name), strict=True):
        start = snapshot(before[0])
        whole, whole_optimizer = before
        group = whole_optimizer.param_groups[0]
        group["lr"] = group.get("max_lr", 1.0)
        train(whole, whole_optimizer, [batch])
        assert rule_of(optimizer).multiplier == pytest.approx(part, rel=1e-9)
        if part:
            for key, value in snapshot(model).items():
                assert_close(value - start[key], part * (snapshot(whole)[key] - start[key]), 1e-7, key)
            assert rule_of(optimizer).lam == rule_of(whole_optimizer).lam
        else:
            assert_unchanged(start, snapshot(model))


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_spectral_steps_follow_schedules_as_well(name):
    expected = [lr / 1e-3 for lr, *_ in scheduled("adamw", mlp(5, 4, 3), name)]
    parts = [rule_of(optimizer).multiplier for *_, optimizer, _ in scheduled("spectral", mlp(5, 4, 3), name)]
    assert parts == pytest.approx(expected, rel=1e-9)


def test_a_first_rise_that_is_not_planned_counts_as_1():
    """CyclicLR's, and a warm-up written by hand: what they rise to is not known before."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    scheduler = schedulers.CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=3)
    parts = []
    for batch in batches(*DATA, 20, 9):
        train(model, optimizer, [batch])
        parts.append(rule_of(optimizer).multiplier)
        scheduler.step()
    assert parts == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1, 0.4, 0.7])


@pytest.mark.parametrize("step", STEPS)
def test_noams_schedule_trains_after_20_steps(step):
    """It multiplies lr=1 by at most 0.02 here; once that is known, the highest so far is 1."""
    model = mlp(5, 4, 3)
    optimizer = auto(model, step=step)
    scheduler = schedulers.LambdaLR(optimizer, lambda t: 0.1 * min((t + 1) ** -0.5, (t + 1) * 25**-1.5))
    parts = []
    for batch in batches(*DATA, 20, 60):
        train(model, optimizer, [batch])
        parts.append(rule_of(optimizer).multiplier)
        scheduler.step()
    assert max(parts[:20]) < 0.02
    assert parts[20:25] == [1.0] * 5
    assert parts[59] == pytest.approx((25 / 60) ** 0.5)
    assert loss_of(model) < 0.5


class Curved(nn.Module):
    """f = W₃ sin(W₂ sin(W₁ x)), of which a quadratic model is good for short steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*sizes).double() for sizes in ((5, 6), (6, 6), (6, 3)))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).sin()
        return self.layers[-1](x)


def lambdas(part, steps):
    """λ after steps that are so short that the network stays where it is; it starts far too low."""
    model = Curved()
    optimizer = auto(model, every=5, options={"fisher": "exact"})
    rule_of(optimizer).highest_lr = 1.0
    rule_of(optimizer).lam = 1e-7
    optimizer.param_groups[0]["lr"] = part
    found = []
    for _ in range(steps):
        train(model, optimizer, [DATA])
        found.append(rule_of(optimizer).lam)
    return found


def test_lambda_cannot_win_back_in_200_steps_what_a_schedule_takes_away():
    """The model of the loss is exact for tiny parts of a step, at which λ would fall, but λ is judged by the whole."""
    tiny = lambdas(1e-9, 200)
    assert lambdas(1e-7, 200) == tiny
    assert tiny[-1] > 100 * 1e-7


def step_lengths(kind, part, seed):
    """The mean length of the second 100 steps after 100 at the full learning rate, on fresh data with random labels."""
    torch.manual_seed(seed)
    model = mlp(8, 10, 4)
    optimizer = auto(model, step=kind, every=10)
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    for t in range(300):
        optimizer.param_groups[0]["lr"] = 1.0 if t < 100 else part
        x = torch.randn(40, 8, dtype=torch.float64, generator=generator)
        y = torch.multinomial((x[:, :4] / 2).softmax(-1), 1, generator=generator)[:, 0]
        before = snapshot(model)
        train(model, optimizer, [(x, y)])
        after = snapshot(model)
        lengths.append(math.sqrt(sum(float((after[key] - before[key]).square().sum()) for key in after)))
    return sum(lengths[-100:]) / 100


@pytest.mark.parametrize("kind", STEPS)
def test_200_steps_at_a_tenth_of_the_learning_rate_are_a_tenth_as_long(kind):
    """Where gradients are mostly noise, longer steps would undo what a schedule is for.

    Spectral steps become somewhat shorter still: 0.07 in the mean of ten seeds, natural ones 0.108.
    """
    short, full = (sum(step_lengths(kind, part, seed) for seed in range(4)) for part in (0.1, 1.0))
    assert 0.05 < short / full < 0.13


# Groups, and numbers written by hand ----------------------------------------------------------------------------------


def groups_of(model, *rates):
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, rates, strict=True)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["by hand", "groups"])
def test_one_learning_rate_for_all_is_as_good_as_none(how, step):
    """Bit for bit."""
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    data = list(batches(*DATA, 20, 30))
    train(model, auto(model, step=step, every=3), data)
    optimizer = auto(other, step=step, every=3, params=groups_of(other, 1e-3, 1e-3) if how == "groups" else None)
    if how == "by hand":
        optimizer.param_groups[0]["lr"] = 3e-4
    train(other, optimizer, data)
    assert_unchanged(snapshot(model), snapshot(other))


@pytest.mark.parametrize("step", STEPS)
def test_a_body_at_1e_5_moves_a_hundredth_as_far_as_a_head_at_1e_3(step):
    """Of how far both move at one learning rate."""
    moved = []
    for body in (1e-3, 1e-5):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        before = snapshot(model)
        train(model, auto(model, step=step, params=groups_of(model, body, 1e-3)), [DATA])
        moved.append({key: value - before[key] for key, value in snapshot(model).items()})
    factor = float(moved[1]["2.weight"].norm() / moved[0]["2.weight"].norm())
    for key, value in moved[1].items():
        part = factor if key.startswith("2") else 0.01 * factor
        assert_close(value, part * moved[0][key], 1e-7, key)


def test_a_group_without_a_learning_rate_has_1():
    model = mlp(5, 4, 3)
    optimizer = auto(model, params=[{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}])
    train(model, optimizer, [DATA])
    assert rule_of(optimizer).multiplier == 1.0
    assert optimizer.state[model[0].weight]["last_rate"] == 0.1


def test_ratios_are_the_same_after_a_checkpoint():
    """What the highest learning rate was is in it: otherwise a lowered one would count as 1 again."""
    model = mlp(5, 4, 3)
    optimizer = auto(model)
    for lr, batch in zip([1e-3] * 3 + [1e-4] * 3, batches(*DATA, 20, 6), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        train(model, optimizer, [batch])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = auto(model)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(model, resumed, [DATA])
    assert rule_of(resumed).multiplier == pytest.approx(0.1)


CYCLES = {
    "OneCycleLR": lambda o, cycles: schedulers.OneCycleLR(o, 1e-3, total_steps=20, cycle_momentum=cycles),
    "CyclicLR": lambda o, cycles: schedulers.CyclicLR(o, 1e-4, 1e-3, step_size_up=4, cycle_momentum=cycles),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", CYCLES)
def test_momentum_that_a_scheduler_writes_is_ignored_silently(name, step):
    """OneCycleLR and CyclicLR write it unless they are told not to. Warnings are errors here."""
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    numbers = []
    for trained, cycle_momentum in ((model, True), (other, False)):
        optimizer = auto(trained, step=step, every=3)
        scheduler = CYCLES[name](optimizer, cycle_momentum)
        for batch in batches(*DATA, 20, 15):
            train(trained, optimizer, [batch])
            scheduler.step()
        numbers.append(optimizer.param_groups[0]["momentum"])
    assert numbers[0] != numbers[1]
    assert_unchanged(snapshot(model), snapshot(other))


# Weight decay ---------------------------------------------------------------------------------------------------------


class WithUnused(nn.Module):
    """A layer, and a parameter whose gradient is always zero, so that only weight decay moves it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3).double()
        self.unused = nn.Parameter(torch.randn(7, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + 0 * self.unused.sum()


@pytest.mark.parametrize("step", STEPS)
def test_weight_decay_is_adamws_at_its_default_learning_rate(step):
    """p ← (1 − 0.001 M w) p, for natural and spectral steps, whatever the learning rate is called."""
    model = WithUnused()
    other = copy.deepcopy(model)
    optimizer = auto(model, step=step, weight_decay=0.3)
    optimizer.param_groups[0]["lr"] = 0.2
    adamw = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.3)
    for make, trained in ((optimizer, model), (adamw, other)):
        scheduler = schedulers.ExponentialLR(make, 0.9)
        for batch in batches(*DATA, 20, 30):
            train(trained, make, [batch])
            scheduler.step()
    assert_close(model.unused, other.unused, 1e-6)


def test_weight_decay_of_groups_follows_their_learning_rates():
    model = WithUnused()
    before = model.unused.detach().clone()
    params = [
        {"params": model.layer.parameters(), "lr": 1e-3},
        {"params": [model.unused], "lr": 1e-4, "weight_decay": 2.0},
    ]
    train(model, auto(model, params=params), batches(*DATA, 20, 10))
    assert_close(model.unused, before * math.exp(-10 * SETTINGS.decay_rate * 0.1 * 2.0), 1e-9)


def test_decay_is_no_fault_of_the_model_of_the_loss():
    """It is in the loss before a step that is evaluated, so that predictions stay as good and λ falls as fast."""
    ends = []
    for decay in (0.0, 30.0):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        optimizer = auto(model, weight_decay=decay, options={"fisher": "exact"})
        train(model, optimizer, [DATA] * 10)
        ends.append(rule_of(optimizer).ratio)
    assert ends[1] == pytest.approx(ends[0], abs=0.15)


@pytest.mark.parametrize("how", quick_cases(["clipped", "summed"], "clipped"))
def test_weight_decay_does_not_depend_on_the_scale_of_the_loss(how):
    model = mlp(5, 4, 3)
    other = copy.deepcopy(model)
    data = list(batches(*DATA, 20, 20))
    train(model, auto(model, weight_decay=3.0, options={"fisher": "exact"}), data)
    loss = nn.CrossEntropyLoss(reduction="sum" if how == "summed" else "mean")
    optimizer = auto(other, loss, weight_decay=3.0, options={"fisher": "exact"})
    for x, y in data:
        optimizer.zero_grad()
        loss(other(x), y).backward()
        if how == "clipped":
            nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        optimizer.step()
    for key, value in snapshot(model).items():
        assert_close(snapshot(other)[key], value, 1e-6, key)


# What users see -------------------------------------------------------------------------------------------------------


def test_print_names_the_rule_the_loss_and_the_multiplier():
    model = mlp(5, 3)
    optimizer = auto(model, nn.CrossEntropyLoss())
    scheduler = schedulers.ConstantLR(optimizer, 0.25, 5)
    train(model, optimizer, [DATA])
    shown = str(optimizer)
    assert shown.startswith("BPRONG (natural steps, lr: automatic, times 0.25, loss: nn.CrossEntropyLoss\n")
    assert "weight_decay: 0.0" in shown
    assert scheduler.get_last_lr() == [0.25]
    assert "(spectral steps, lr: automatic" in str(auto(model, step="spectral"))
    assert str(bprong.PRONG(model, F.mse_loss, lr=0.1)).startswith("PRONG (natural steps, loss: F.mse_loss\n")
    spectral = bprong.BPRONG(model, "cross_entropy", lr=0.1, step="spectral")
    assert str(spectral).startswith('BPRONG (spectral steps, loss: "cross_entropy"\n')


def test_a_learning_rate_made_for_adamw_is_worth_one_line_of_advice():
    """Warned of once, when the optimizer is made; not for spectral steps, for which it is right."""
    model = mlp(5, 3)
    with pytest.warns(bprong.WhiteningWarning, match=r"lr=0.001 is small for natural steps") as caught:
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=1e-3)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [DATA] * 2)
        bprong.BPRONG(model, "cross_entropy", lr=1e-3, step="spectral")
        bprong.BPRONG(model, "cross_entropy", lr=0.005)
        bprong.BPRONG(model, "cross_entropy", lr=0.0)
        bprong.BPRONG(model, nn.CrossEntropyLoss(reduction="sum"), lr=1e-3)
        bprong.PRONG(model, "cross_entropy", lr=1e-3)
