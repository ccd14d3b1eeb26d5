"""Claims of docs/compatibility.md that no other test shows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bprong
from bprong.parallel.slices import unwrapped
from helpers import assert_close, classification, mlp
from training import train

X, Y = classification(20, 5, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_can_be_scripted_once_its_optimizer_is_deleted():
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy")
    train(model, optimizer, [(X, Y)])
    del optimizer
    assert_close(torch.jit.script(model)(X), model(X), 1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_compiled_before_the_optimizer_must_be_given_compiled():
    """Hooks that are added after the first compiled call never run."""
    torch._dynamo.reset()
    model = mlp(5, 4, 3)
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    late = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    F.cross_entropy(compiled(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"(?s)no batch to measure.*you call \(the compiled one"):
        late.step()
    optimizer = bprong.BPRONG(compiled, "cross_entropy", lr=0.01)
    F.cross_entropy(compiled(X), Y).backward()
    optimizer.step()


def test_compiling_around_distributed_data_parallel_is_refused():
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)  # without processes
    nn.Module.__init__(wrapper)
    compiled = nn.Module()
    compiled._orig_mod = wrapper
    with pytest.raises(ValueError, match="Compile the model itself"):
        unwrapped(compiled)


class DTensor(torch.Tensor):
    """Says where its parts are, as torch's does."""

    placements = ("Shard(dim=0)",)


def test_tensor_parallel_parameters_are_refused_by_name():
    model = copy.deepcopy(mlp(5, 4, 3))
    assert unwrapped(model) is model
    model[0].weight = nn.Parameter(torch.zeros(4, 5).as_subclass(DTensor))
    with pytest.raises(ValueError, match="'0.weight' is a DTensor: .*tensor-parallel models are not supported"):
        unwrapped(model)
