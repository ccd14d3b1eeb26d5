"""Two processes of which one is different: all take the same decision, or all stop with an error that says why."""

import behaviours
import launch
import pytest
import torch
from cases import Case, data, made, parameters, train
from torch import nn

import bprong
from bprong.capture.weights import weight_matrices_of
from bprong.parallel.processes import Ranks
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers
from bprong.whitening.ranks import _common_mean, share_layers
from helpers import assert_close

SLOW = (
    "ranks_seeded_differently", "a_batch_that_is_not_finite", "clipped", "nothing_counted",
    "automatic_by_hand", "copies", "a_rank_that_does_not_arrive",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(two_ranks):
    return {name.removeprefix("behaviours:"): by_rank for name, by_rank in two_ranks.items()}


@pytest.fixture(scope="module")
def found_slowly():
    return dict(zip(SLOW, launch.run(2, *(f"behaviours:{name}" for name in SLOW)), strict=True))


def same(by_rank):
    return all(torch.equal(by_rank[0], other) for other in by_rank)


@pytest.mark.rest
def test_the_seed_of_sampled_targets_is_rank_0s_and_no_two_ranks_sample_alike(found_slowly):
    for name in behaviours.RULES:
        (seed, own, first), (other_seed, others_own, second) = (
            of[name] for of in found_slowly["ranks_seeded_differently"]
        )
        assert seed == other_seed
        assert own != others_own
        assert torch.equal(first, second), name


@pytest.mark.parametrize("way", ["resumed", "distributed_checkpoint"])
def test_a_run_resumes_bit_for_bit(found, way):
    for by_rank in found[way]:
        for name, (straight, resumed) in by_rank.items():
            assert torch.equal(straight, resumed), name


def test_a_checkpoint_of_two_processes_goes_on_in_one(found):
    case = Case()
    for name, (state, expected) in found["saved_for_one_process"][0].items():
        model = made(case)
        optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), options={"fisher": "exact"}, **behaviours.RULES[name])
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        for t in range(10, 20):
            optimizer.zero_grad()
            x, y = (torch.cat(parts) for parts in zip(*(data(case, rank, t, 0) for rank in range(2)), strict=True))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert_close(parameters(model), expected, 1e-9, name)


@pytest.mark.rest
def test_a_batch_that_is_not_finite_is_refused_by_all(found_slowly):
    for name in behaviours.RULES:
        by_rank = [of[name] for of in found_slowly["a_batch_that_is_not_finite"]]
        assert {steps for steps, _, _ in by_rank} == {7}, name
        assert all(warned for _, warned, _ in by_rank)
        assert same([values for _, _, values in by_rank])
        assert by_rank[0][2].isfinite().all()


def test_a_rank_without_examples_takes_part(found):
    for name in behaviours.RULES:
        by_rank = [of[name] for of in found["an_empty_batch"]]
        assert {steps for steps, _ in by_rank} == {12}, name
        assert same([values for _, values in by_rank])


def test_an_error_on_one_rank_stops_all(found):
    for name in behaviours.RULES:
        first, second = (of[name] for of in found["an_error_on_one_rank"])
        assert "error on rank 1" in first, name
        assert "there is no batch to measure" in second, name


def test_gradients_that_nobody_averages_are_an_error(found):
    assert all(
        "Wrap the model in torch.nn.parallel.DistributedDataParallel" in message
        for message in found["gradients_that_differ"]
    )


def test_gradients_may_be_averaged_by_hand(found):
    case = Case(steps=10, arguments={"lr": 0.05, "options": {"fisher": "exact"}})
    assert same(found["averaged_by_hand"])
    assert_close(found["averaged_by_hand"][0], parameters(train(case, 2)[0]), 1e-9, "averaged by hand")


@pytest.mark.rest
def test_the_factor_of_clipping_is_the_same_on_all_ranks(found_slowly):
    for name in ("empty", "unused"):
        assert same([of[name] for of in found_slowly["clipped"]]), name


@pytest.mark.rest
def test_a_rank_whose_targets_do_not_count_adds_nothing(found_slowly):
    assert found_slowly["nothing_counted"] == [12.0, 12.0]


@pytest.mark.rest
@pytest.mark.rest
def test_automatic_steps_with_gradients_averaged_by_hand(found_slowly):
    (first, warned), (second, _) = found_slowly["automatic_by_hand"]
    assert torch.equal(first, second)
    assert warned == []


def test_join_is_refused_by_name(found):
    assert all("Join is not supported" in message for message in found["join"])


@pytest.mark.rest
def test_a_rank_that_does_not_arrive_is_an_error_that_says_so(found_slowly):
    message = found_slowly["a_rank_that_does_not_arrive"][0]
    assert "rank 0 of 2 could not exchange statistics" in message
    assert "has not come to this step in time" in message


@pytest.mark.rest
def test_copies_can_be_made(found_slowly):
    assert found_slowly["copies"] == [(True, 1), (True, 1)]


def test_the_papers_network_takes_the_path_of_one_process(found):
    alone = parameters(bprong.fold(behaviours.train_whitened([0, 1])))
    assert same(found["whitened"])
    assert_close(found["whitened"][0], alone, 1e-9, "the paper's network")


# In one process -------------------------------------------------------------------------------------------------------


def test_processes_that_appear_after_the_first_step_are_an_error(monkeypatch):
    case = Case()
    model = made(case)
    optimizer = bprong.BPRONG(model, nn.CrossEntropyLoss(), lr=0.1, every=1)  # found out where something is exchanged
    x, y = data(case, 0, 0, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    monkeypatch.setattr(Ranks, "size", 2)
    monkeypatch.setattr(Ranks, "rank", 0)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="the first steps were made by 1 processes, and this one by 2"):
        optimizer.step()


def test_the_costliest_layers_are_assigned_first(monkeypatch):
    """Which cost 3, 8, 5 and 4, roughly; each to the rank that has the least to do."""
    monkeypatch.setattr(Ranks, "size", 2)
    widths = {"a": 144, "b": 200, "c": 171, "d": 159}  # the costs are their cubes
    layers = Layers(layer for name, width in widths.items() for layer in layers_of(name, nn.Linear(width, 1)))
    ranks = Ranks()
    share_layers(layers, ranks)
    owners = {name: {ranks.owners[p] for p in layer.parameters} for name, layer in layers.items()}
    assert owners == {"b": {0}, "c": {1}, "d": {1}, "a": {0}}
    shared = nn.Linear(171, 1)
    shared.weight = layers["c"].weight
    layers |= Layers(layers_of("e", shared))
    share_layers(layers, ranks)
    assert ranks.owners[shared.bias] == ranks.owners[shared.weight] == 1, "layers that share a parameter have one owner"


def layers_of(name, module):
    return [Layer(weight) for weight in weight_matrices_of(name, module)]


def test_the_common_mean_of_a_constant_feature_is_exactly_the_constant():
    """Also if its sum is rounded, and whatever the ranks without observations send."""
    means = torch.tensor([[0.1, 1.0], [0.0, 0.0], [0.1, 2.0], [0.1, 4.0]], dtype=torch.float64)
    mean = _common_mean(torch.tensor([3.0, 0.0, 7.0, 11.0], dtype=torch.float64), means)
    assert mean[0] == means[0, 0]
    assert_close(mean[1], torch.tensor(61 / 21, dtype=torch.float64), 1e-15, "common mean")
