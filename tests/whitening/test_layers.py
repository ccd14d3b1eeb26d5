"""Layers: what they do to gradients, alone and grouped, and how they answer failures and foreign states."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.request import LayerMoments
from bprong.capture.weights import weight_matrices_of
from bprong.errors import WhiteningError, WhiteningWarning
from bprong.linalg.factors import Damping, centred
from bprong.whitening import layers as layers_module
from bprong.whitening.layer import PATIENCE, Layer
from bprong.whitening.layers import Layers, Stack, values_of, write_
from bprong.whitening.refresh import refresh, update
from bprong.whitening.schedule import Periods, Schedule
from helpers import assert_close, error_moments, input_moments, inverse, mlp, snapshot

f64 = torch.float64
EPSILON = {"forward": Damping(0.1), "backward": Damping(0.03)}


def rows(n, d, seed):
    return torch.randn(n, d, dtype=f64, generator=torch.Generator().manual_seed(seed)) + 0.5


def layer_of(inputs=5, outputs=3, name="0", **options):
    module = nn.Linear(inputs, outputs, dtype=f64, bias=options.pop("bias", True))
    return Layer(weight_matrices_of(name, module)[0], "auto", **options)


def whiten(layer, seed=0, centre=True):
    """Refreshes both sides of a layer from random rows; returns c, Ž + ε₁ and D + ε₂."""
    z = input_moments(rows(40, layer.forward.blocks.size, seed), centre)
    delta = error_moments(rows(40, layer.backward.blocks.size, seed + 1), 40)
    for side, moments in layer.update(LayerMoments(z=z, delta=delta), 0.0):
        layer.take(side, moments, EPSILON[side.name])
    eye = torch.eye(layer.forward.blocks.size, dtype=f64)
    other = torch.eye(layer.backward.blocks.size, dtype=f64)
    return z.mean, z.second + 0.1 * eye, delta.second + 0.03 * other


def direction_of(layer, gradients):
    """Of one layer alone."""
    return Stack([layer]).precondition({layer: values_of(layer, gradients)})[layer]


def gradients_of(layer, left_out=None):
    return {p: torch.randn_like(p) for p in layer.parameters if p is not left_out}


# One layer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whitened", [False, True])
def test_gradients_are_left_as_they_are(whitened):
    """Also without factors, where the natural gradient is the gradient itself and may not be scaled in place."""
    layer = layer_of()
    if whitened:
        whiten(layer)
    gradients = gradients_of(layer)
    before = {p: g.clone() for p, g in gradients.items()}
    Layers([layer]).natural_gradients(gradients, dict.fromkeys(gradients, -2.0))
    assert all(torch.equal(gradients[p], g) for p, g in before.items())


def test_the_step_is_the_formula_of_the_paper_in_ordinary_coordinates():
    """ΔW = −(D+ε₂)⁻¹ (g_W − g_b cᵀ) (Ž+ε₁)⁻¹,  Δb = −(D+ε₂)⁻¹ g_b − ΔW c."""
    layer = layer_of()
    c, Z, D = whiten(layer)
    gradients = gradients_of(layer)
    g_W = gradients[layer.weight]
    g_b = gradients[layer.bias]
    delta_W = -torch.linalg.inv(D) @ (g_W - torch.outer(g_b, c)) @ torch.linalg.inv(Z)
    delta_b = -torch.linalg.inv(D) @ g_b - delta_W @ c
    steps = {}
    write_(steps, layer, *direction_of(layer, gradients))
    assert_close(steps[layer.weight], -delta_W, 1e-12)
    assert_close(steps[layer.bias], -delta_b, 1e-12)
    assert_close(centred(g_W, g_b, layer.c), g_W - torch.outer(g_b, c), 1e-15)


def test_gradients_are_not_changed():
    layer = layer_of()
    whiten(layer)
    gradients = gradients_of(layer)
    before = {p: g.clone() for p, g in gradients.items()}
    direction_of(layer, gradients)
    assert all(torch.equal(g, before[p]) for p, g in gradients.items())


@pytest.mark.parametrize("centre", [True, False])
def test_a_parameter_without_a_gradient_does_not_move_by_itself(centre):
    layer = layer_of()
    _, Z, D = whiten(layer, centre=centre)
    gradients = gradients_of(layer, layer.bias)
    d_W, d_b = direction_of(layer, gradients)
    assert d_b is None
    assert_close(d_W, torch.linalg.inv(D) @ gradients[layer.weight] @ torch.linalg.inv(Z), 1e-12)
    gradients = gradients_of(layer, layer.weight)
    d_W, d_b = direction_of(layer, gradients)
    assert d_W is None
    assert_close(d_b, torch.linalg.inv(D) @ gradients[layer.bias], 1e-12)


def test_a_layer_that_was_never_refreshed_follows_its_gradient():
    layer = layer_of()
    gradients = gradients_of(layer)
    d_W, d_b = direction_of(layer, gradients)
    assert torch.equal(d_W, gradients[layer.weight])
    assert torch.equal(d_b, gradients[layer.bias])


def test_a_layer_with_one_side_is_whitened_forward_only():
    layer = layer_of(backward=False)
    c, Z, _ = whiten(layer)
    assert [side.name for side in layer.sides] == ["forward"]
    assert layer.backward.factor is None
    gradients = gradients_of(layer)
    d_W, d_b = direction_of(layer, gradients)
    centred = gradients[layer.weight] - torch.outer(gradients[layer.bias], c)
    assert_close(d_W, centred @ torch.linalg.inv(Z), 1e-12)
    assert torch.equal(d_b, gradients[layer.bias])


def test_gradients_in_bfloat16_are_preconditioned_in_float32():
    layer = Layer(weight_matrices_of("0", nn.Linear(5, 3, dtype=torch.bfloat16))[0])
    whiten(layer)
    d_W, d_b = direction_of(layer, gradients_of(layer))
    assert layer.forward.factor.inverse.dtype is d_W.dtype is d_b.dtype is torch.float32


def test_the_parts_of_a_packed_weight_fill_one_step():
    """The projections of attention are rows of one parameter; each writes its own rows."""
    attention = nn.MultiheadAttention(4, 2, dtype=f64)
    q, k, v = (Layer(w) for w in weight_matrices_of("", attention) if w.rows is not None)
    steps = {}
    directions = {layer: (torch.randn(4, 4, dtype=f64), torch.randn(4, dtype=f64)) for layer in (q, v)}
    for layer, direction in directions.items():
        write_(steps, layer, *direction)
    weight = steps[attention.in_proj_weight]
    bias = steps[attention.in_proj_bias]
    for i, layer in enumerate((q, k, v)):
        d_W, d_b = directions.get(layer, (torch.zeros(4, 4), torch.zeros(4)))
        assert_close(weight[4 * i : 4 * i + 4], d_W, 0)
        assert_close(bias[4 * i : 4 * i + 4], d_b, 0)


def test_a_failing_side_warns_once_and_raises_after_several_failures():
    layer = layer_of(name="body.3")
    reason = WhiteningError("no reason")
    with pytest.warns(WhiteningWarning, match="layer 'body.3' keeps its previous forward whitener: no reason") as said:
        layer.failed(layer.forward, reason)
    assert [w.filename for w in said] == [__file__], "the warning names the line of the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(PATIENCE - 2):
            layer.failed(layer.forward, reason)
        layer.failed(layer.backward, reason, quiet=True)  # counted for itself
        with pytest.raises(WhiteningError, match=f"'body.3', forward whitening, {PATIENCE} times in a row: no reason"):
            layer.failed(layer.forward, reason)


def test_a_state_of_another_shape_is_refused():
    wide = layer_of(8, 3, name="2")
    whiten(wide)
    layer = layer_of(5, 3, name="2")
    message = r"layer '2': the state's forward factor has shape \(8, 8\), and this layer's has \(5, 5\)"
    with pytest.raises(ValueError, match=message):
        layer.check_state(wide.state_dict())
    layer.check_state(layer_of(5, 3).state_dict())


def test_the_state_restores_the_directions():
    layer = layer_of()
    whiten(layer)
    other = layer_of()
    other.load_state_dict(layer.state_dict())
    gradients = gradients_of(layer)
    copied = dict(zip(other.parameters, gradients.values(), strict=True))
    for ours, expected in zip(direction_of(other, copied), direction_of(layer, gradients), strict=True):
        assert torch.equal(ours, expected)


# Layers of one shape --------------------------------------------------------------------------------------------------


def batch(t, features=6, rows=64):
    x = torch.randn(rows, features, dtype=f64, generator=torch.Generator().manual_seed(t))
    return x, (x[:, 0] > 0).long()


def train(model, optimizer, steps):
    for t in range(steps):
        x, y = batch(t)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def deep():
    torch.manual_seed(0)
    return mlp(6, 6, 6, 6, 6, 2)


def preconditioned(layers, gradients):
    return layers._preconditioned({layer: values_of(layer, gradients) for layer in layers.values()})


def stored_together(layers):
    """The names of the layers whose factors are slices of one tensor, for each such tensor."""
    found = {}
    for layer in layers.values():
        if layer.forward.factor is not None:
            found.setdefault(layer.forward.factor.inverse.untyped_storage().data_ptr(), []).append(layer.name)
    return [names for names in found.values() if len(names) > 1]


@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_grouped_layers_move_as_they_would_alone(method, momentum, monkeypatch):
    together = deep()
    alone = deep()
    first = method(together, "cross_entropy", lr=0.05, momentum=momentum, every=3)
    train(together, first, 10)
    assert stored_together(first._whitening.layers) == [["0", "2", "4", "6"]], "four layers of 6 × 6"
    monkeypatch.setattr(layers_module, "STACKED_UP_TO", 0)
    second = method(alone, "cross_entropy", lr=0.05, momentum=momentum, every=3)
    train(alone, second, 10)
    assert not stored_together(second._whitening.layers)
    for a, b in zip(together.parameters(), alone.parameters(), strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_directions_of_a_group_are_those_of_its_layers(bias, backward):
    made = [layer_of(6, 4, name=str(i), bias=bias, backward=backward) for i in range(3)]
    for i, layer in enumerate(made):
        whiten(layer, seed=10 * i, centre=bias)
    gradients = {p: g for layer in made for p, g in gradients_of(layer).items()}
    expected = {layer: direction_of(layer, gradients) for layer in made}
    layers = Layers(made)
    found = preconditioned(layers, gradients)
    assert stored_together(layers)
    assert list(found) == made
    for layer, (d_W, d_b) in found.items():
        alone_W, alone_b = expected[layer]
        assert_close(d_W, alone_W, 1e-13)
        assert (d_b is None) == (not bias)
        if bias:
            assert_close(d_b, alone_b, 1e-13)


def test_only_layers_with_the_same_factors_form_a_group():
    """One is not centred and one was never refreshed: each of them is computed alone."""
    made = [layer_of(6, 4, name=str(i)) for i in range(4)]
    for i, layer in enumerate(made[:3]):
        whiten(layer, seed=10 * i, centre=i < 2)
    gradients = {p: g for layer in made for p, g in gradients_of(layer).items()}
    expected = {layer: direction_of(layer, gradients) for layer in made}
    layers = Layers(made)
    found = preconditioned(layers, gradients)
    assert stored_together(layers) == [["0", "1"]]
    for layer in made:
        assert_close(found[layer][0], expected[layer][0], 1e-13)


def test_a_group_is_formed_anew_when_a_factor_has_changed():
    made = [layer_of(6, 4, name=str(i)) for i in range(2)]
    for layer in made:
        whiten(layer)
    layers = Layers(made)
    gradients = {p: g for layer in made for p, g in gradients_of(layer).items()}
    preconditioned(layers, gradients)
    whiten(made[1], seed=50)
    assert_close(preconditioned(layers, gradients)[made[1]][0], direction_of(made[1], gradients)[0], 1e-13)


def test_a_layer_of_a_group_without_a_gradient_does_not_stop_the_others():
    model = deep()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=5)
    train(model, optimizer, 2)
    before = snapshot(model)
    x, y = batch(9)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].weight.grad = None
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"2.weight"}


@pytest.mark.parametrize("damping", [Damping(0.1), Damping(0.1, "mean"), Damping(0.1, "variance")])
def test_layers_of_one_shape_have_the_inverses_that_they_have_alone(damping):
    """Each with its own damping: the mean is that of one side, not of all of them."""
    layers = Layers(layer_of(5, 3, name=str(i)) for i in range(4))
    dampings = [Damping(damping.value * (i + 1), damping.relative_to) for i in range(4)]
    moments = [input_moments((i + 1) * rows(30, 5, i)) for i in range(4)]
    updated = update(layers, {str(i): LayerMoments(z=z) for i, z in enumerate(moments)}, 0.0)
    schedule = Schedule(layers, Periods(1))
    refresh(updated, schedule, lambda layer, _: dampings[int(layer.name)])
    for layer, z, epsilon in zip(layers.values(), moments, dampings, strict=True):
        assert_close(layer.forward.factor.inverse, inverse(z.second, epsilon), 1e-12)
