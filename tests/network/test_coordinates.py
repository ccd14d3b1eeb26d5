"""Changes of coordinates: how velocities, gradients and squared gradients move, in one block and in several."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bprong
from bprong import WhiteningError
from bprong.linalg.moments import Blocks
from bprong.network.coordinates import Change, check_outputs, quotient
from convolutions import f64, invertible
from helpers import assert_close, assert_unchanged, snapshot


def forward(U, c, U_new, c_new, blocks):
    s = (U @ (c_new - c).unsqueeze(-1)).squeeze(-1)
    return Change(quotient(U, U_new), blocks, s)


def forward_change(seed=0, d=4):
    c = torch.randn(2, d, dtype=f64)
    return forward(invertible((d, d), seed), c[0], invertible((d, d), seed + 1), c[1], Blocks(d))


def backward_change(seed=0, d=3):
    return Change(quotient(invertible((d, d), seed), invertible((d, d), seed + 1)), Blocks(d))


changes = st.builds(lambda f, seed: f(seed), st.sampled_from([forward_change, backward_change]), st.integers(0, 30))


def some_pair(seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(3, 4, dtype=f64, generator=generator),
        torch.randn(3, dtype=f64, generator=generator),
    )


def pairing(g, v):
    return float((g[0] * v[0]).sum() + (g[1] * v[1]).sum())


@given(change=changes, seed=st.integers(0, 30))
def test_a_gradient_keeps_its_product_with_every_velocity(change, seed):
    """A gradient is a covector: ⟨g, v⟩, the rate of change of the loss, is the same in all coordinates."""
    g = some_pair(seed)
    v = some_pair(seed + 1)
    assert pairing(change.gradient(*g), change.velocity(*v)) == pytest.approx(pairing(g, v), rel=1e-9, abs=1e-9)


@given(change=changes, seed=st.integers(0, 30))
def test_gradients_do_not_move_like_velocities(change, seed):
    g = some_pair(seed)
    moved = change.gradient(*g)
    wrong = change.velocity(*g)
    assert float((moved[0] - wrong[0]).norm() / moved[0].norm()) > 1e-3


@given(change=changes)
def test_squares_are_the_diagonal_of_the_transformed_covariance(change):
    """The sum of the squares of transformed unit gradients, each scaled: exact for uncorrelated gradients."""
    v = tuple(t.square() for t in some_pair(7))
    expected = [torch.zeros(3, 4, dtype=f64), torch.zeros(3, dtype=f64)]
    for which in (0, 1):
        for k in range(v[which].numel()):
            unit = [torch.zeros(3, 4, dtype=f64), torch.zeros(3, dtype=f64)]
            unit[which].view(-1)[k] = v[which].view(-1)[k].sqrt()
            moved_unit = change.gradient(*unit)
            expected = [total + part.square() for total, part in zip(expected, moved_unit, strict=True)]
    for moved, total in zip(change.squares(*v), expected, strict=True):
        assert_close(moved, total, 1e-10)
        assert (moved >= 0).all()


def there_and_back(side):
    d = 4 if side == "forward" else 3
    old = invertible((d, d), 0)
    new = invertible((d, d), 1)
    c = torch.randn(2, d, dtype=f64)
    if side == "forward":
        return forward(old, c[0], new, c[1], Blocks(d)), forward(new, c[1], old, c[0], Blocks(d))
    return Change(quotient(old, new), Blocks(d)), Change(quotient(new, old), Blocks(d))


@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_change_and_its_reverse_cancel(side):
    change, back = there_and_back(side)
    for rule in ("velocity", "gradient"):
        there = getattr(change, rule)(*some_pair(1))
        for got, start in zip(getattr(back, rule)(*there), some_pair(1), strict=True):
            assert_close(got, start, 1e-11)


BLOCKS = [
    Blocks(6, groups=2),
    Blocks(3, 2),
    Blocks(2, 3, groups=2),
    Blocks(1, 3, groups=2),
]


@given(blocks=st.sampled_from(BLOCKS), seed=st.integers(0, 20), side=st.sampled_from(["forward", "backward"]))
def test_the_rules_hold_in_groups_and_blocks(blocks, seed, side):
    """⟨g, v⟩ is the same in all coordinates; squares are the diagonal of the transformed covariance."""
    shape = (4, blocks.features, 1, 1)
    random = torch.Generator().manual_seed(seed)
    c = torch.randn(2, *blocks.shape[:-1], dtype=f64, generator=random)
    change = forward(invertible(blocks.shape, seed), c[0], invertible(blocks.shape, seed + 1), c[1], blocks)
    if side == "backward":
        outputs = quotient(invertible((2, 2, 2), seed), invertible((2, 2, 2), seed + 1))
        change = Change(outputs, Blocks(2, groups=2))
    g_W = torch.randn(shape, dtype=f64, generator=random)
    v_W = torch.randn(shape, dtype=f64, generator=random)
    g_b = torch.randn(4, dtype=f64, generator=random)
    v_b = torch.randn(4, dtype=f64, generator=random)
    G_W, G_b = change.gradient(g_W, g_b)
    V_W, V_b = change.velocity(v_W, v_b)
    assert_close((G_W * V_W).sum() + (G_b * V_b).sum(), (g_W * v_W).sum() + (g_b * v_b).sum(), 1e-8)
    assert float((G_W - change.velocity(g_W, g_b)[0]).norm()) > 1e-3
    squares = torch.zeros_like(g_W)
    for unit in torch.diag(torch.cat([g_W.flatten(), g_b])):
        squares += change.gradient(unit[:-4].view(shape), unit[-4:])[0] ** 2
    assert_close(change.squares(g_W**2, g_b**2)[0], squares, 1e-10)


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
@pytest.mark.parametrize("side", ["forward", "backward"])
def test_a_change_that_would_move_the_outputs_is_refused_and_nothing_changes(side, wrong):
    """Its multiplier is not the one that belongs to the new U or R."""
    layer = bprong.WhitenedLinear(nn.Linear(4, 3, dtype=f64))
    before = snapshot(layer)
    probe = torch.randn(5, 4, dtype=f64)
    held = layer.U if side == "forward" else layer.R
    T = quotient(held, wrong * held)
    message = "would change its outputs on this batch by"
    with pytest.raises(WhiteningError, match=message):
        layer.rewhiten_(side, held, None, probe, T)
    assert_unchanged(before, snapshot(layer))


def test_outputs_are_compared_with_new_tensors_without_storing_them():
    layer = bprong.WhitenedLinear(nn.Linear(4, 3, dtype=f64))
    before = snapshot(layer)
    probe = torch.randn(5, 4, dtype=f64)
    check_outputs(layer, {"U": layer.U / 2, "weight_dagger": layer.weight_dagger.detach() * 2}, probe)
    with pytest.raises(WhiteningError, match="would change its outputs"):
        check_outputs(layer, {"U": layer.U / 2}, probe)
    with pytest.raises(WhiteningError, match="not finite"):
        check_outputs(layer, {}, probe / 0)
    assert_unchanged(before, snapshot(layer))
