"""A model sharded by FSDP2's `fully_shard` takes the path that one process takes on all batches together."""

import warnings

import cases
import fully_sharded
import launch
import pytest
import torch
from torch import nn

import bprong
from helpers import assert_close

SLOW = (
    "a_batch_that_is_not_finite", "validated_between_backward_and_step", "other_models", "distributed_checkpoint",
    "mixed_precision",
)  # fmt: skip
LAUNCHES = [
    pytest.param((2, None), id="two ranks"),
    pytest.param((2, "paths"), id="two ranks, all cases", marks=pytest.mark.rest),
    pytest.param((1, "some_paths"), id="one rank", marks=pytest.mark.rest),
    pytest.param((4, "some_paths"), id="four ranks", marks=pytest.mark.rest),
]


@pytest.fixture(scope="module")
def found(two_ranks):
    return {name.removeprefix("fully_sharded:"): by_rank for name, by_rank in two_ranks.items()}


@pytest.fixture(scope="module")
def found_slowly():
    return dict(zip(SLOW, launch.run(2, *(f"fully_sharded:{name}" for name in SLOW)), strict=True))


@pytest.fixture(scope="module", params=LAUNCHES)
def trained(request):
    size, function = request.param
    if function is None:
        return size, request.getfixturevalue("two_ranks")["fully_sharded:some_paths"]
    (paths,) = launch.run(size, f"fully_sharded:{function}")
    return size, paths


def alone(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cases.parameters(cases.train(case, 2)[0])


def test_the_path_is_that_of_one_process(trained):
    size, found = trained
    assert len(found[0]) >= 3
    for name in found[0]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = cases.parameters(cases.train(fully_sharded.SHARDED_CASES[name], size)[0])
        assert_close(found[0][name], expected, 1e-9, name)


@pytest.mark.parametrize("rule", ["fixed", "spectral", "auto", "auto, spectral"])
@pytest.mark.rest
def test_distributed_checkpoints_restore_everything(found_slowly, rule):
    for by_rank in found_slowly["distributed_checkpoint"]:
        expected, resumed = by_rank[rule]
        assert torch.equal(expected, resumed)


@pytest.mark.parametrize("name", fully_sharded.AVERAGED)
@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_averaged_weights_are_those_of_one_process_and_resume_bit_for_bit(found, way, name):
    """With torch.distributed.checkpoint. The model computes with them in the context only."""
    case = cases.CASES[name]
    expected = cases.averaged_alone(case, 2)
    model = cases.made(case)
    torch.nn.utils.vector_to_parameters(expected, model.parameters())
    for by_rank in found["averaged"]:
        (average, output, afterwards, restored), (resumed, *_) = by_rank[way, name]
        assert restored
        assert_close(average, expected, 1e-9)
        assert_close(output, model(cases.data(case, 0, 0, 0)[0]), 1e-9)
        assert not torch.allclose(output, afterwards)
        assert torch.equal(average, resumed)
        assert torch.equal(average, found["averaged"][0][way, name][0][0])


def test_each_rank_has_its_part_of_the_state(found):
    for factors, momentum in found["memory"]:
        assert factors <= 0.6
        assert momentum <= 0.6


@pytest.mark.parametrize("rule", ["fixed", "spectral", "auto"])
@pytest.mark.rest
def test_a_batch_that_is_not_finite_is_refused_by_all(found_slowly, rule):
    for kept, messages, _ in (by_rank[rule] for by_rank in found_slowly["a_batch_that_is_not_finite"]):
        assert kept
        assert len(messages) == 1
        assert "step 1 refused" in messages[0]


@pytest.mark.rest
def test_a_forward_pass_before_the_step_changes_nothing(found_slowly):
    for without, with_one in found_slowly["validated_between_backward_and_step"]:
        assert torch.equal(without, with_one)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("checkpointed", fully_sharded.Checkpointed), ("tied", fully_sharded.Tied), ("read", fully_sharded.Read)],
)
@pytest.mark.filterwarnings("ignore:layer 'read' follows the fallback rule:bprong.WhiteningWarning")
@pytest.mark.rest
def test_other_models_take_the_path_of_one_process(found_slowly, name, kind):
    case = cases.Case(model=kind, arguments={"options": cases.EXACT, "step": "natural"}, steps=6)
    assert_close(found_slowly["other_models"][0][name], alone(case), 1e-9)


@pytest.mark.parametrize("rule", ["fixed", "spectral", "auto"])
@pytest.mark.rest
def test_mixed_precision_trains_as_full_precision_does(found_slowly, rule):
    """By the mean loss of the last ten batches: that of one rank's half moves by 6 % with the rounding of bfloat16."""
    by_rank = found_slowly["mixed_precision"]
    full, mixed = (sum(losses) / len(by_rank) for losses in zip(*(own[rule] for own in by_rank), strict=True))
    assert abs(mixed - full) < 0.02 * full
    assert full < 1.05  # less than at the start


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("HSDP", "HSDP and tensor parallelism are not supported"),
        ("a part of the model", "shard the whole model too: fully_shard(model)"),
        ("ignored parameters", "parameter '0.weight' is not sharded"),
        ("columns", "parameter '0.weight' is not sharded by rows"),
        ("FSDP1", "wrapped for FullyShardedDataParallel, which is not supported"),
        ("sharded later", "fully_shard"),
        ("the paper's network", "wrapped for fully_shard, which is not supported"),
    ],
)
def test_what_cannot_be_made_right_is_refused_by_name(found, way, message):
    for by_rank in found["refused"]:
        assert message in by_rank[way], by_rank[way]


def test_a_type_made_by_fully_shard_is_seen_as_it_was_written():
    class FSDPModule:
        pass

    class FSDPLinear(FSDPModule, nn.Linear):
        pass

    (row, _) = bprong.coverage(nn.Sequential(FSDPLinear(3, 2))).rows
    assert row.treatment == "two-sided"
