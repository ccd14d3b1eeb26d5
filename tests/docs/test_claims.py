"""Claims of docs/compatibility.md that no other test shows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bprong
from bprong.parallel.slices import unwrapped
from helpers import classification, mlp

X, Y = classification(20, 5, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_optimizer_of_a_compiled_model_must_be_given_it_compiled():
    """A call in compiled code is not seen; `observe` gives its batch."""
    torch._dynamo.reset()
    model = mlp(5, 4, 3)
    compiled = torch.compile(model, backend="eager")
    late = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    F.cross_entropy(compiled(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"(?s)no batch to measure.*you call \(the compiled one"):
        late.step()
    late.observe(X, Y)
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
