"""WhitenedLinear computes the same function in any coordinates, and behaves as a torch module does."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bprong import WhitenedLinear, WhiteningError
from bprong.linalg.roots import root_of
from helpers import assert_close, assert_unchanged, input_moments, snapshot


def invertible(d, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(d, d, dtype=torch.float64, generator=generator) + 3 * torch.eye(d)).to(dtype)


def moved(layer, seed=0):
    """The layer in some other coordinates."""
    layer.rewhiten_("forward", invertible(layer.in_features, seed), torch.randn(layer.in_features) * layer.centred)
    if layer.R is not None:
        layer.rewhiten_("backward", invertible(layer.out_features, seed + 1))
    return layer


@given(bias=st.booleans(), backward=st.booleans(), rows=st.integers(1, 5), seed=st.integers(0, 50))
def test_rewhitening_keeps_every_output_weight_and_bias(bias, backward, rows, seed):
    linear = nn.Linear(4, 3, bias=bias, dtype=torch.float64)
    layer = WhitenedLinear(linear, backward)
    z = torch.randn(rows, 2, 4, dtype=torch.float64)
    moved(layer, seed)
    moved(layer, seed + 100)
    assert_close(layer(z), linear(z), 1e-12)
    assert_close(layer.weight, linear.weight, 1e-12)
    if bias:
        assert_close(layer.bias, linear.bias, 1e-11)
    else:
        assert layer.bias is None
    assert_close(layer.to_stock()(z), linear(z), 1e-12)


def test_the_forward_pass_is_that_of_the_paper():
    layer = moved(WhitenedLinear(nn.Linear(4, 3, dtype=torch.float64)))
    z = torch.randn(4, dtype=torch.float64)
    z_dagger = layer.U @ (z - layer.c)
    a_dagger = layer.weight_dagger @ z_dagger + layer.bias_dagger
    assert_close(layer(z), layer.R.T @ a_dagger, 1e-13)


def test_a_forward_only_layer_has_no_R():
    layer = WhitenedLinear(nn.Linear(4, 3), backward=False)
    assert layer.R is None
    assert set(layer.state_dict()) == {"weight_dagger", "bias_dagger", "U", "c"}
    with pytest.raises(ValueError, match="forward-only"):
        layer.rewhiten_("backward", torch.eye(3))


def test_parameters_and_buffers_have_the_documented_names():
    layer = WhitenedLinear(nn.Linear(4, 3))
    assert {name for name, _ in layer.named_parameters()} == {"weight_dagger", "bias_dagger"}
    assert {name for name, _ in layer.named_buffers()} == {"U", "c", "R"}
    with pytest.raises(AttributeError):
        layer.weight = torch.zeros(3, 4)


def test_initialisation_is_that_of_torch():
    torch.manual_seed(5)
    stock = nn.Linear(4, 3)
    torch.manual_seed(5)
    assert torch.equal(WhitenedLinear(nn.Linear(4, 3)).weight, stock.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_kept_everywhere(dtype):
    layer = moved(WhitenedLinear(nn.Linear(4, 3, dtype=dtype)))
    assert {tensor.dtype for tensor in layer.state_dict().values()} == {dtype}
    assert layer(torch.randn(2, 4, dtype=dtype)).dtype is dtype
    assert layer.to_stock().weight.dtype is layer.weight.dtype is dtype


def test_under_bfloat16_autocast_it_computes_what_the_stock_layer_does():
    linear = nn.Linear(64, 32)
    layer = WhitenedLinear(linear)
    z = torch.randn(100, 64)
    layer.rewhiten_("forward", root_of(input_moments(z).second, 0.1).matrix, z.mean(0))
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(z)
        out.float().square().mean().backward()
    assert out.dtype is torch.bfloat16
    assert_close(out, linear(z), 0.02)  # bf16's eps is 0.0078
    assert layer.weight_dagger.grad.dtype is torch.float32


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_state_dict_contains_tensors_only_and_restores_the_layer(bias, backward):
    layer = moved(WhitenedLinear(nn.Linear(4, 3, bias=bias), backward=backward))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = WhitenedLinear(nn.Linear(4, 3, bias=bias), backward=backward)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_unchanged(layer.state_dict(), other.state_dict())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_deepcopy_and_pickle_give_an_equal_independent_layer(clone):
    layer = moved(WhitenedLinear(nn.Linear(4, 3)))
    other = clone(layer)
    assert_unchanged(layer.state_dict(), other.state_dict())
    with torch.no_grad():
        other.weight_dagger.add_(1)
    assert not torch.equal(layer.weight_dagger, other.weight_dagger)


def test_the_ordinary_weight_is_differentiable_by_the_parameters():
    """So a penalty on the ordinary weight works: ∂/∂W† of ½‖RᵀW†U‖² is R W Uᵀ."""
    layer = moved(WhitenedLinear(nn.Linear(4, 3, dtype=torch.float64)))
    (layer.weight.square().sum() / 2).backward()
    assert_close(layer.weight_dagger.grad, layer.R @ layer.weight @ layer.U.T, 1e-12)
    assert not layer.to_stock().weight.grad_fn


def test_a_state_of_a_stock_or_a_forward_only_layer_is_refused_by_torch():
    layer = moved(WhitenedLinear(nn.Linear(4, 3)))
    before = snapshot(layer)
    for other, message in (
        (layer.to_stock(), "weight_dagger"),
        (WhitenedLinear(nn.Linear(4, 3), backward=False), '"R"'),
    ):
        with pytest.raises(RuntimeError, match=message):
            copy.deepcopy(layer).load_state_dict(other.state_dict())
    assert_unchanged(before, snapshot(layer))


def test_impossible_coordinates_are_refused_and_nothing_changes():
    layer = moved(WhitenedLinear(nn.Linear(4, 3, bias=False)))
    before = snapshot(layer)
    with pytest.raises(ValueError, match="c must stay 0"):
        layer.rewhiten_("forward", torch.eye(4), torch.ones(4))
    with pytest.raises(WhiteningError, match="cannot be inverted"):
        layer.rewhiten_("forward", torch.zeros(4, 4), torch.zeros(4))
    with pytest.raises(WhiteningError, match="cannot be inverted"):
        layer.rewhiten_("backward", torch.zeros(3, 3))
    assert_unchanged(before, snapshot(layer))


def test_frozen_parameters_stay_frozen_and_an_untrained_bias_is_not_centred():
    linear = nn.Linear(4, 3)
    linear.bias.requires_grad_(False)
    layer = WhitenedLinear(linear.eval())
    assert not layer.centred
    assert not layer.training
    assert not WhitenedLinear(nn.Linear(4, 3, bias=False)).centred
    back = layer.to_stock()
    assert [p.requires_grad for p in back.parameters()] == [True, False]
    linear.weight.requires_grad_(False)
    assert not WhitenedLinear(linear).to_stock().weight.requires_grad
    assert not back.training


def test_an_input_of_the_wrong_width_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"WhitenedLinear of 4 inputs was given a tensor of shape \(2, 5\)"):
        WhitenedLinear(nn.Linear(4, 3))(torch.zeros(2, 5))
