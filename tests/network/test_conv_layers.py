"""WhitenedConv2d computes a convolution in any coordinates, compared with the formula of the paper on patches."""

import copy
import io
from itertools import product

import pytest
import torch
from torch import nn

import bprong
from bprong.network.layers import WhitenedConv2d
from convolutions import FORMS, f64, images, literal, moved, net, rows, sides, whitened
from helpers import assert_close, assert_unchanged, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own, of any Conv2d
ZOO = {
    "plain": {"kernel_size": 3},
    "1x1": {"kernel_size": 1},
    "border": {"kernel_size": 3, "padding": 1},
    "stride": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    "valid": {"kernel_size": 2, "padding": "valid"},
    "same": {"kernel_size": (2, 3), "padding": "same", "dilation": (1, 2)},
    "reflect": {"kernel_size": 3, "padding": (2, 1), "padding_mode": "reflect"},
    "replicate": {"kernel_size": (2, 3), "padding": "same", "padding_mode": "replicate", "dilation": (3, 1)},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2, "groups": 2},
    "groups": {"kernel_size": 3, "padding": 1, "groups": 2},
    "depthwise": {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 4},
    "no bias": {"kernel_size": 3, "padding": 1, "bias": False, "groups": 2},
}
cases = pytest.mark.parametrize(("option", "form"), list(product(ZOO, FORMS)))


def conv_of(option, dtype=f64):
    return nn.Conv2d(4, 8, **ZOO[option], dtype=dtype)


@cases
@pytest.mark.parametrize("backward", [True, False])
def test_in_other_coordinates_and_folded_it_computes_what_the_stock_convolution_does(option, form, backward):
    conv = conv_of(option)
    x = images()
    model = whitened(conv, form, backward)
    moved(model[0], 100)
    plain = bprong.fold(model)
    assert type(model[0]) is WhitenedConv2d
    assert type(plain[0]) is nn.Conv2d
    assert plain[0].extra_repr() == conv.extra_repr()
    assert plain.state_dict().keys() == nn.Sequential(conv).state_dict().keys()
    assert_close(plain[0].weight, conv.weight, 1e-11)
    for module in (model, plain):
        assert_close(module(x), conv(x), 1e-11)
        assert_close(module(x[:1]), conv(x[:1]), 1e-11)
        if conv.padding_mode != "circular":  # torch itself has no circular padding without a batch dimension
            assert_close(module(x[0]), conv(x[0]), 1e-11)


@cases
def test_the_forward_pass_and_its_gradients_are_those_of_the_formula(option, form):
    """a = Rᵀ (W† U (z − c) + b†) with z the padded patches, and ∂/∂W† = R (g_W − g_b cᵀ) Uᵀ."""
    conv = conv_of(option)
    x = images()
    layer = whitened(conv, form)[0]
    U, c, R = sides(layer)
    a = layer(x)
    expected = literal(layer, conv, rows(conv, x) - c)
    assert_close(a.flatten(2), expected, 1e-11)
    parameters = list(layer.parameters())
    push = torch.randn_like(a)
    ours = torch.autograd.grad(a, parameters, push)
    for got, wanted in zip(ours, torch.autograd.grad(expected, parameters, push.flatten(2)), strict=True):
        assert_close(got, wanted, 1e-11)
    g_W, g_b = gradients(conv, x, push)
    assert_close(ours[0], (R @ (g_W - g_b * c) @ U.mT).reshape(conv.weight.shape), 1e-10)


def gradients(conv, x, push):
    """g_W (G, out/G, d) and g_b (G, out/G, 1), which is 0 without a bias."""
    g_W, *g_b = torch.autograd.grad(conv(x), list(conv.parameters()), push)
    g_b = g_b[0] if g_b else torch.zeros(len(g_W), dtype=g_W.dtype)
    return (g.reshape(conv.groups, len(g) // conv.groups, -1) for g in (g_W, g_b))


def test_padding_after_centring_would_be_wrong_at_the_border_only():
    conv = conv_of("border")
    x = images()
    layer = whitened(conv)[0]
    inside = rows(conv, torch.ones_like(x))  # 0 where the padding is
    wrong = literal(layer, conv, (rows(conv, x) - sides(layer)[1]) * inside).view(3, 8, 7, 8)
    right = conv(x)
    assert_close(wrong[..., 1:-1, 1:-1], right[..., 1:-1, 1:-1], 1e-11)
    assert float((wrong - right).detach().norm() / right.detach().norm()) > 0.1


@cases
def test_checkpoints_and_copies_restore_the_layer(option, form):
    x = images()
    stock = conv_of(option)
    two = nn.Sequential(moved(whitened(stock, form, backward=True)[0], 3))
    assert_close(two(x), stock(x), 1e-11)
    file = io.BytesIO()
    torch.save(two.state_dict(), file)
    file.seek(0)
    again = whitened(conv_of(option), form, seed=5)
    copied = copy.deepcopy(two)
    again.load_state_dict(torch.load(file, weights_only=True))
    for other in (again, copied):
        assert_unchanged(two.state_dict(), other.state_dict())
    with torch.no_grad():
        copied[0].weight_dagger.add_(1)
    assert_close(two(x), stock(x), 1e-11)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_a_linear_layer_too_wide_for_one_block_is_whitened_in_several(shape):
    linear = nn.Linear(6, 8, dtype=f64)
    z = torch.randn(shape, dtype=f64)
    model = bprong.whiten_(nn.Sequential(linear), max_dim=5)
    layer = moved(model[0])
    assert (layer.U.shape, layer.R.shape) == ((2, 3, 3), (4, 2, 2))
    U, c, R = sides(layer)
    expected = ((z - c[0, 0]) @ U[0].T @ layer.weight_dagger.T + layer.bias_dagger) @ R[0]
    for module in (layer, linear, bprong.fold(model)):
        assert_close(module(z), expected, 1e-11)


def test_memory_format_and_dtype_are_kept():
    conv = conv_of("border", torch.float32).to(memory_format=torch.channels_last)
    x = images(dtype=torch.float32).to(memory_format=torch.channels_last)
    model = whitened(conv)
    plain = bprong.fold(model)
    for tensor in (model(x), model[0].weight_dagger, plain[0].weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()
        assert tensor.dtype is torch.float32
    assert_close(model(x), conv(x), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # it rounds the weight that the stock layer would have
        assert torch.equal(WhitenedConv2d(conv)(x), conv(x))
        assert model(x).dtype is torch.bfloat16
        assert_close(model(x), conv(x), 0.01)


def test_coordinates_of_another_shape_are_refused():
    layer = WhitenedConv2d(nn.Conv2d(2, 4, 3, groups=2))
    with pytest.raises(ValueError, match=r"U of this layer must have shape \(2, 9, 9\), not \(9, 9\)"):
        layer.rewhiten_("forward", torch.eye(9), layer.c)


def test_frozen_parameters_and_eval_mode_are_kept():
    conv = conv_of("border").eval()
    conv.weight.requires_grad_(False)
    layer = WhitenedConv2d(conv)
    assert [p.requires_grad for p in layer.to_stock().parameters()] == [False, True]
    assert not layer.training
    assert not layer.to_stock().training
    assert layer.centred
    conv.bias.requires_grad_(False)
    assert not WhitenedConv2d(conv).centred


def tied():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1))
    model[1].weight = model[0].weight
    return model


def hooked():
    model = nn.Sequential(nn.Conv2d(2, 2, 1))
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tied, r"0: its weight is shared \(tied\) by 0.weight, 1.weight"),
        (hooked, "0: it has hooks"),
        (lambda: nn.Sequential(nn.Conv2d(2, 2, 1, dtype=torch.complex64)), "0: its weight is complex"),
        (lambda: nn.Conv2d(2, 2, 1), "a bare nn.Conv2d"),
        (lambda: nn.Sequential(type("Mine", (nn.Conv2d,), {})(2, 2, 1)), "nothing to whiten: no nn.Linear"),
    ],
)
def test_layers_that_cannot_be_whitened_are_refused_and_unchanged(model, message):
    model = model()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        bprong.whiten_(model)
    assert_unchanged(before, snapshot(model))
    with pytest.raises(ValueError, match="max_dim must be a whole number of at least 1, not 0"):
        bprong.whiten_(net(), max_dim=0)
