"""optimizer.averaged(): which weights count how much, what the model has in its context and after it, and its state."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import bprong
from bprong import WhiteningWarning
from bprong.optim.auto.race import SETTINGS, Rival
from bprong.optim.averaging import AveragedWeights
from helpers import EPS, assert_close, assert_unchanged, classification, mlp, snapshot
from training import EXACT, batches, train

ETA = AveragedWeights.eta
DATA = classification(60, 5, 3)
RULES = {
    "natural": {"lr": 0.05, "momentum": 0.9},
    "literal": {"lr": 0.05, "max_step": None},
    "spectral": {"lr": 0.02, "step": "spectral"},
    "auto": {"step": "natural"},
    "auto, spectral": {"step": "spectral"},
}


def network(kind: str = "plain") -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "plain":
        return mlp(5, 6, 3)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def made(model: nn.Module, rule: str = "natural", **arguments: object) -> bprong.BPRONG:
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), **RULES[rule], **({"options": EXACT} | arguments))
    optimizer.averaged()
    return optimizer


def averages(model: nn.Module, optimizer: bprong.BPRONG) -> dict[str, Tensor]:
    with optimizer.averaged():
        return snapshot(model)


def mean_of(path: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of weights w₀, w₁, …, of which the k-th counts C(k+η, k)."""
    shares = torch.tensor([math.comb(k + int(ETA), k) for k in range(len(path))], dtype=torch.float64)
    shares /= shares.sum()
    return {name: sum(s * weights[name] for s, weights in zip(shares, path, strict=True)) for name in path[0]}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if "num_batches" not in name:
            assert_close(actual[name], value, rtol, name)


# Which weights count how much -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "normalised"])
@pytest.mark.parametrize("rule", RULES)
def test_the_average_is_a_mean_in_which_later_steps_count_more(rule, kind):
    """Running statistics count like the weights. In the first, the weights that the run began with."""
    model = network(kind)
    optimizer = made(model, rule)
    path = [snapshot(model)]
    for batch in batches(*DATA, 20, 12):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        statistics = {name: value for name, value in snapshot(model).items() if "running" in name}
        path[-1] |= statistics  # they are added with the weights that they were measured at
        optimizer.step()
        path.append(snapshot(model))
    assert_all_close(averages(model, optimizer), mean_of(path))
    with pytest.raises(AssertionError):
        assert_all_close(averages(model, optimizer), path[-1])


@pytest.mark.parametrize("rule", RULES)
def test_averages_and_evaluations_change_nothing_of_training(rule):
    ends = []
    for averaged in (False, True):
        model = network("normalised")
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), **RULES[rule], options=EXACT)
        if averaged:
            optimizer.averaged()
        for batch in batches(*DATA, 20, 12):
            train(model, optimizer, [batch])
            if averaged:
                with optimizer.averaged():
                    update_bn([DATA[0]], model)
                    model.eval()(DATA[0])
                model.train()
        ends.append(snapshot(model))
    assert_unchanged(*ends)


@pytest.mark.parametrize("length", [50, 400])
def test_it_spans_the_same_part_of_every_run(length):
    """Weights that move at constant speed are n/(2+η) ahead of their average."""
    model = nn.Linear(1, 1, bias=False).double()
    average = AveragedWeights(model)
    for k in range(length):
        nn.init.constant_(model.weight, k)
        average.add(model.parameters())
    nn.init.constant_(model.weight, length)
    with average.in_the_model(torch.optim.SGD(model.parameters())):
        assert model.weight.item() == pytest.approx(length * (1 + ETA) / (2 + ETA), rel=4 * length * EPS)


def test_the_average_of_what_does_not_move_is_what_it_is():
    """Bit for bit: without a learning rate, frozen, unused, outside of the groups, and buffers with infinities."""
    model = network()
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model[0].unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    groups = [{"params": [model[0].weight, model[0].bias], "lr": 0.0}, {"params": [*model[2].parameters()]}]
    groups[1]["params"].append(model[0].unused)
    optimizer = made(model, params=groups)
    before = snapshot(model)
    train(model, optimizer, batches(*DATA, 20, 6))
    average = averages(model, optimizer)
    changed = {name for name, value in average.items() if not torch.equal(value, before[name])}
    assert changed == {"2.weight", "2.bias"}


def test_a_tied_weight_is_averaged_once():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 20), nn.Linear(20, 3)).double()
    model[2].weight = model[0].weight
    optimizer = made(model)
    path = [snapshot(model)]
    for batch in batches(*DATA, 20, 5):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    assert_all_close(averages(model, optimizer), mean_of(path))


def test_a_parameter_that_joins_later_was_constant_before():
    model = network()
    optimizer = made(model, params=model[2].parameters())
    path = [snapshot(model)]
    for t, batch in enumerate(batches(*DATA, 20, 8)):
        if t == 4:
            optimizer.add_param_group({"params": model[0].parameters()})
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    assert not torch.equal(path[-1]["0.weight"], path[0]["0.weight"])
    assert_all_close(averages(model, optimizer), mean_of(path))


def test_small_changes_of_bfloat16_weights_are_not_lost():
    """The average is in float32: a change of 2⁻⁸ that counts 1 % is smaller than the spacing of bfloat16 numbers."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    average = AveragedWeights(model)
    for value in [1.0] * 500 + [1 + 2**-7] * 500:
        nn.init.constant_(model.weight, value)
        average.add(model.parameters())
    with average.in_the_model(torch.optim.SGD(model.parameters())):
        assert model.weight.item() == 1 + 2**-7
    assert average._averages[model.weight].dtype == torch.float32


# Batch Normalisation --------------------------------------------------------------------------------------------------


def test_averaged_statistics_are_near_those_of_the_averaged_weights():
    """Nearer than those of the last weights. `update_bn` in the context measures them exactly."""
    x, y = classification(600, 5, 3)
    model = network("normalised")
    optimizer = made(model, "auto")
    train(model, optimizer, batches(x, y, 60, 200))
    live = snapshot(model)
    with optimizer.averaged():
        average = snapshot(model)
        update_bn(x.split(60), model)
        exact = snapshot(model)
    for name in ("1.running_mean", "1.running_var"):
        assert (average[name] - exact[name]).norm() < (live[name] - exact[name]).norm()
    assert_unchanged(live, snapshot(model))


def test_statistics_are_restored_before_there_is_an_average():
    model = network("normalised")
    optimizer = made(model, "auto")
    before = snapshot(model)
    with optimizer.averaged():
        update_bn(classification(600, 5, 3)[0].split(60), model)
    assert_unchanged(before, snapshot(model))


# Steps that were refused, undone or skipped ---------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_refused_step_is_no_step(rule):
    model = network()
    optimizer = made(model, rule)
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    for t, batch in enumerate(batches(*DATA, 20, 9)):
        train(twin, twins_optimizer, [batch])
        train(model, optimizer, [batch])
        if t % 3 == 1:
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan)
            with pytest.warns(WhiteningWarning, match="refused"):
                optimizer.step()
    assert_unchanged(averages(twin, twins_optimizer), averages(model, optimizer))


def test_a_step_that_a_scaler_skips_is_no_step():
    model = network()
    optimizer = made(model)
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t, (x, y) in enumerate(batches(*DATA, 20, 9)):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if t == 4:
            model[0].weight.grad[0, 0] = torch.inf
        else:
            train(twin, twins_optimizer, [(x, y)])
        scaler.step(optimizer)
        scaler.update()
    assert_all_close(averages(model, optimizer), averages(twin, twins_optimizer), 1e-9)


@pytest.mark.parametrize("reason", ["the loss blew up", "gradients are not finite"])
def test_an_undone_update_is_not_in_the_average(reason):
    """In its place are the weights before it, which the model has again."""
    model = network()
    optimizer = made(model, "auto")
    path = [snapshot(model)]
    for batch in batches(*DATA, 20, 24):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    for p in model.parameters():
        wrong = 100 * torch.randn_like(p)
        p.data += wrong
        optimizer.state[p]["last_update"] += wrong
    with pytest.raises(AssertionError):
        assert_all_close(averages(model, optimizer), mean_of([*path[:-1], path[-2]]), 1e-9)
    if reason == "the loss blew up":
        train(model, optimizer, [DATA])
    else:
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, torch.nan)
            with pytest.warns(WhiteningWarning, match="not finite"):
                optimizer.step()
    path[-1] = snapshot(model)
    assert_all_close(path[-1], path[-2], 1e-9)
    for batch in batches(*DATA, 20, 3):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    assert_all_close(averages(model, optimizer), mean_of(path), 1e-9)


def test_after_a_race_the_average_is_that_of_the_winners_weights(monkeypatch):
    """Until then it is that of the leader, whose weights the model has; a mean of both would be of neither path."""
    monkeypatch.setattr(Rival, "verdict", lambda rival: (-0.5, 0.01))
    model = network("normalised")
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), options=EXACT)
    optimizer.averaged()
    length = min(SETTINGS.looks)
    path = [snapshot(model)]
    rows = classification(1000, 5, 3)  # no example comes again
    for t, (x, y) in enumerate(batches(*rows, 20, length + 5)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        path[-1] |= {name: value for name, value in snapshot(model).items() if "running" in name}
        optimizer.step()
        if t + 1 == length:
            assert optimizer._race.rival is None
            path = []
        path.append(snapshot(model))
        assert_all_close(averages(model, optimizer), mean_of(path))
    assert len(path) == 6


def test_after_a_race_that_is_lost_the_average_goes_on(monkeypatch):
    monkeypatch.setattr(Rival, "verdict", lambda rival: (0.5, 0.01))
    model = network()
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), options=EXACT)
    optimizer.averaged()
    path = [snapshot(model)]
    for batch in batches(*classification(1000, 5, 3), 20, 25):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    assert_all_close(averages(model, optimizer), mean_of(path))


# The context ----------------------------------------------------------------------------------------------------------


def test_the_model_has_its_own_weights_again_also_after_an_error():
    model = network("normalised")
    optimizer = made(model)
    train(model, optimizer, batches(*DATA, 20, 6))
    before = snapshot(model)
    tensors = [*model.parameters(), *model.buffers()]
    places = [x.data_ptr() for x in tensors]

    def interrupted() -> None:
        with optimizer.averaged():
            assert torch.is_grad_enabled()
            assert not torch.equal(model[0].weight, before["0.weight"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_unchanged(before, snapshot(model))
    assert places == [x.data_ptr() for x in tensors]


def test_without_a_step_the_model_keeps_its_weights():
    model = network("normalised")
    before = snapshot(model)
    assert_unchanged(before, averages(model, made(model)))


def test_an_average_that_begins_late_is_that_of_what_follows():
    model = network()
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.05, options=EXACT)
    train(model, optimizer, batches(*DATA, 20, 6))
    path = [snapshot(model)]
    with pytest.warns(WhiteningWarning, match="averaging begins after 6 steps"):
        assert_unchanged(path[0], averages(model, optimizer))
    for batch in batches(*DATA, 20, 6):
        train(model, optimizer, [batch])
        path.append(snapshot(model))
    assert_all_close(averages(model, optimizer), mean_of(path))


@pytest.mark.parametrize("copied", [False, True])
def test_averaged_weights_are_not_trained_and_not_averaged_again(copied):
    model = network()
    optimizer = made(model)
    train(model, optimizer, batches(*DATA, 20, 6))
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    before = snapshot(model)
    with optimizer.averaged():
        for action in (lambda: train(model, optimizer, [DATA]), optimizer.averaged().__enter__):
            with pytest.raises(RuntimeError, match=r"leave the context of optimizer\.averaged"):
                action()
    assert_unchanged(before, snapshot(model))
    train(model, optimizer, [DATA])


# State ----------------------------------------------------------------------------------------------------------------


def saved(model: nn.Module, optimizer: bprong.BPRONG, rule: str) -> tuple[nn.Module, bprong.BPRONG]:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, weights_only=True)
    other = network("normalised")
    other_optimizer = made(other, rule)
    other.load_state_dict(of_model)
    other_optimizer.load_state_dict(of_optimizer)
    return other, other_optimizer


CLONES = {
    "torch.save": saved,
    "deepcopy": lambda model, optimizer, rule: copy.deepcopy((model, optimizer)),
    "pickle": lambda model, optimizer, rule: pickle.loads(pickle.dumps((model, optimizer))),
}


@pytest.mark.parametrize("clone", CLONES)
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("rule", ["natural", "spectral", "auto"])
def test_averages_continue_bit_for_bit(rule, steps, clone):
    model = network("normalised")
    optimizer = made(model, rule)
    data = list(batches(*DATA, 20, steps + 6))
    train(model, optimizer, data[:steps])
    other, other_optimizer = CLONES[clone](model, optimizer, rule)
    assert_unchanged(averages(model, optimizer), averages(other, other_optimizer))
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, data[steps:])
    assert_unchanged(averages(model, optimizer), averages(other, other_optimizer))


def test_from_a_state_without_averages_they_begin_with_the_weights_of_the_model():
    model = network()
    plain = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.05, options=EXACT)
    train(model, plain, batches(*DATA, 20, 4))
    other = network()
    optimizer = bprong.BPRONG(other, nn.CrossEntropyLoss(), lr=0.05, options=EXACT)
    optimizer.averaged()
    train(other, optimizer, [DATA])
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    path = [snapshot(other)]
    for batch in batches(*DATA, 20, 5):
        train(other, optimizer, [batch])
        path.append(snapshot(other))
    assert_all_close(averages(other, optimizer), mean_of(path))
