"""Factors: every form multiplies as the matrix it stands for; the low-rank form keeps the error it states."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bprong.linalg import low_rank as module
from bprong.linalg.factors import NO_FACTOR, Damping, Dense, distance_from_white
from bprong.linalg.low_rank import LowRank, low_rank, restored
from bprong.linalg.moments import Blocks, Moments
from helpers import assert_close, exact_factor, inverse, spd

f64 = torch.float64
SIDES = {
    "one block": Blocks(6),
    "groups": Blocks(3, groups=2),
    "blocks": Blocks(2, 3),
    "blocks of groups": Blocks(2, 2, groups=2),
    "diagonal": Blocks(1, 6),
    "diagonal of groups": Blocks(1, 3, groups=2),
    "one feature in each group": Blocks(1, groups=4),
}
LOW_RANK = "low rank"
FORMS = pytest.mark.parametrize("form", [*SIDES, LOW_RANK])


def moments(blocks, seed=0, weight=7.0):
    """Moments of a side, each of its blocks with a spectrum of its own."""
    count = max(blocks.lead, 1)
    seconds = torch.stack([(i + 1) * spd(blocks.size, seed + i) for i in range(count)])
    return Moments(weight, None, weight * (seconds if blocks.lead else seconds[0]))


def made(form):
    """A factor of this form, and the blocks of its side."""
    if form == LOW_RANK:
        return LowRank(0.3 * torch.randn(6, 2, dtype=f64), 0.7), Blocks(6)
    blocks = SIDES[form]
    return exact_factor(moments(blocks), Damping(0.1), blocks, torch.empty(0, dtype=f64)), blocks


def inverse_of(factor):
    """The inverse that a factor stands for, in the shape of the second moment."""
    if isinstance(factor, LowRank):
        return torch.eye(6, dtype=f64) / factor.s - factor.B @ factor.B.T
    return factor.inverse


def explicit(factor, blocks):
    """The block-diagonal matrix of each group, (groups, features, features)."""
    split = inverse_of(factor).reshape(blocks.groups, blocks.count, blocks.size, blocks.size)
    return torch.stack([torch.block_diag(*group) for group in split])


def matrix(blocks, *shape):
    """Random numbers of this shape, for each group if there are several."""
    lead = (blocks.groups,) if blocks.groups > 1 else ()
    return torch.randn(*lead, *shape, dtype=f64)


@FORMS
def test_products_from_both_sides_are_those_of_the_explicit_matrix(form):
    factor, blocks = made(form)
    expected = explicit(factor, blocks)
    expected = expected if blocks.groups > 1 else expected[0]
    right = matrix(blocks, 4, blocks.features)
    left = matrix(blocks, blocks.features, 4)
    vector = matrix(blocks, blocks.features)
    before = [m.clone() for m in (right, left, vector)]
    assert_close(factor.right(right), right @ expected, 1e-13, "right")
    assert_close(factor.left(left), expected @ left, 1e-13, "left")
    assert_close(factor.left(vector), (expected @ vector.unsqueeze(-1)).squeeze(-1), 1e-13, "vector")
    assert all(torch.equal(a, b) for a, b in zip(before, (right, left, vector), strict=True)), "M was changed"


@FORMS
def test_second_moments_are_multiplied_block_by_block(form):
    factor, blocks = made(form)
    second = moments(blocks, seed=5).second
    assert_close(factor.left(second), inverse_of(factor) @ second, 1e-13)


@FORMS
def test_its_numbers_and_its_tensor_restore_the_factor(form):
    """Also if the tensor is stored with further columns, as in a checkpoint, and as numbers of float64."""
    factor, blocks = made(form)
    numbers = torch.tensor(factor.numbers, dtype=f64).tolist()
    assert len(numbers) == len(NO_FACTOR)
    assert factor.tensor.shape == (*blocks.shape[:-1], int(numbers[0]))
    wider = torch.cat([factor.tensor, torch.ones_like(factor.tensor)], dim=-1)
    M = matrix(blocks, 3, blocks.features)
    for tensor in (factor.tensor, wider):
        same = restored(numbers, tensor, blocks)
        assert type(same) is type(factor)
        assert same.cost == factor.cost
        assert str(same) == str(factor)
        assert torch.equal(same.right(M), factor.right(M))


@FORMS
def test_a_factor_of_another_process_has_its_form_and_its_cost_without_memory(form):
    factor, blocks = made(form)
    elsewhere = restored(factor.numbers, factor.tensor.to("meta"), blocks)
    assert elsewhere.tensor.is_meta
    assert str(elsewhere) == str(factor)
    assert elsewhere.cost == factor.cost


@FORMS
def test_products_have_the_precision_of_the_matrix(form):
    factor, blocks = made(form)
    M = matrix(blocks, 4, blocks.features)
    in_single = factor.right(M.float())
    assert in_single.dtype is torch.float32
    assert_close(in_single, factor.right(M), 1e-5)
    assert factor.left(M.mT.float()).dtype is torch.float32


@FORMS
def test_the_cost_is_the_number_of_operations_for_each_entry(form):
    factor, blocks = made(form)
    M = matrix(blocks, 4, blocks.features)
    with FlopCounterMode(display=False) as counter:
        factor.right(M)
    if blocks.size == 1:
        assert counter.get_total_flops() == 0, "products by elements, which the counter does not see"
        assert factor.cost == 2
    else:
        assert counter.get_total_flops() == factor.cost * M.numel()


@pytest.mark.parametrize("form", SIDES)
@pytest.mark.parametrize("damping", [Damping(0.1), Damping(0.1, "mean"), Damping(0.1, "variance")])
def test_the_exact_factor_is_the_damped_inverse_in_the_form_of_the_side(form, damping):
    blocks = SIDES[form]
    found = exact_factor(moments(blocks), damping, blocks, torch.empty(0))
    assert isinstance(found, Dense)
    assert found.inverse.dtype is torch.float32
    assert str(found) == "exact"
    assert_close(found.inverse, inverse(moments(blocks).second, damping), 1e-4)


@FORMS
def test_the_distance_from_white_is_that_of_whitened_moments(form):
    """‖U Ž Uᵀ − I‖ / ‖I‖ over all blocks, whatever the root U."""
    factor, blocks = made(form)
    if form == LOW_RANK:
        factor = low_rank(decaying(6, 2.0), 0.5, 0.9, most=5)
    second = moments(blocks, seed=3).second
    U = torch.linalg.cholesky(inverse_of(factor)).mT
    off = U @ second @ U.mT - torch.eye(blocks.size, dtype=f64)
    size = (max(blocks.lead, 1) * blocks.size) ** 0.5
    assert distance_from_white(factor, second) == pytest.approx(float(off.norm()) / size, rel=1e-9)


@pytest.mark.parametrize("d", [100, 400])
def test_the_distance_of_wide_sides_is_estimated_well(d):
    """Up to 128 features it is computed exactly, beyond that from random vectors."""
    second = spd(d, 0)
    identity = torch.eye(d, dtype=f64)
    other = torch.linalg.inv(spd(d, 1) + 0.1 * identity)
    exact = float(torch.linalg.matrix_power(other @ second - identity, 2).trace() / d) ** 0.5
    found = distance_from_white(Dense(other, Blocks(d)), second)
    assert found == pytest.approx(exact, rel=1e-6 if d <= 128 else 0.1)


# Low rank -------------------------------------------------------------------------------------------------------------


def decaying(d, power, seed=0, scale=10.0):
    """A second moment whose k-th eigenvalue is scale · k^−power."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=f64, generator=generator))
    return (Q * (scale * torch.arange(1, d + 1, dtype=f64) ** -power)) @ Q.T


def true_error(found, second, epsilon):
    """‖E W^½‖ / ‖W^½‖ with E = (Ž+ε)^½ M (Ž+ε)^½ − I and W = (Ž+ε)^-½ Ž (Ž+ε)^-½."""
    identity = torch.eye(len(second), dtype=f64)
    values, P = torch.linalg.eigh(second)
    values = values.clamp(min=0)
    root = (P * (values + epsilon).sqrt()) @ P.T
    M = found.right(identity.to(found.B.dtype)).double()
    weights = (values / (values + epsilon)).sqrt()
    return float(((root @ M @ root - identity) @ P * weights).norm() / weights.norm())


def rank(found):
    return found.B.shape[1]


@given(
    power=st.floats(1.0, 3.0), epsilon=st.floats(0.01, 1.0), tolerance=st.sampled_from([0.05, 0.1, 0.3]),
    seed=st.integers(0, 5), single=st.booleans(),
)  # fmt: skip
def test_the_true_error_is_at_most_the_stated_one(power, epsilon, tolerance, seed, single):
    second = decaying(120, power, seed)
    found = low_rank(second.float() if single else second, epsilon, tolerance, most=110)
    if found is not None:
        assert found.error <= tolerance
        assert true_error(found, second, epsilon) <= found.error + 1e-4
        assert rank(found) <= 110


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("single", [True, False])
def test_the_stated_error_includes_that_of_rounding(ratio, single):
    """A direction that varies far more than all others leaves nothing of them in float32."""
    second = decaying(300, 1.5, scale=1.0) + ratio * torch.ones(300, 300, dtype=f64)
    found = low_rank(second.float() if single else second, 0.05, 0.5, most=150)
    assert (found is None) == (single and ratio > 1)
    if found is not None:
        assert true_error(found, second, 0.05) <= found.error <= 0.5


def test_the_error_of_a_known_spectrum_is_exact():
    """Of every rank; but for the slack, which is for spectra that are known in part."""
    second = decaying(30, 1.5)
    epsilon = 0.1
    values, P = (x.flip(-1) for x in torch.linalg.eigh(second))
    stated, s = module._errors(second, values, torch.zeros(30, 30, dtype=f64), epsilon)
    for k in range(1, 30):
        assert float(s[k - 1]) == pytest.approx(epsilon + float(values[k:].mean()), rel=1e-12)
        B = P[:, :k] * (1 / s[k - 1] - 1 / (values[:k] + epsilon)).sqrt()
        worst = float((values[k] + epsilon) / s[k - 1]) - 1
        expected = max(true_error(LowRank(B, float(s[k - 1])), second, epsilon), worst / module.WORST)
        assert float(stated[k - 1]) == pytest.approx(module.SLACK * expected, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("tolerance", [0.1, 0.3])
def test_a_direction_is_within_the_error_of_the_exact_one(tolerance):
    second = decaying(200, 1.5)
    epsilon = 0.1
    found = low_rank(second, epsilon, tolerance, most=150)
    damped = second + epsilon * torch.eye(200, dtype=f64)
    worst = 0.0
    for seed in range(20):
        g = torch.randn(3, 200, dtype=f64, generator=torch.Generator().manual_seed(seed))
        exact = g @ inverse(second, epsilon)
        off = found.right(g) - exact
        worst = max(worst, float(((off @ damped) * off).sum() / ((exact @ damped) * exact).sum()) ** 0.5)
    assert 0 < worst <= found.error


def test_the_rank_falls_as_the_tolerance_or_the_damping_rises():
    second = decaying(200, 2.0)
    ranks = [rank(low_rank(second, 0.1, tolerance, most=190)) for tolerance in (0.03, 0.1, 0.3)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] > ranks[-1]
    assert rank(low_rank(second, 1.0, 0.1, most=190)) < ranks[1]


@pytest.fixture
def iterations(monkeypatch):
    """The size of the subspace in each subspace iteration."""
    sizes = []
    leading = module._leading
    monkeypatch.setattr(module, "_leading", lambda A, basis: sizes.append(basis.shape[1]) or leading(A, basis))
    return sizes


def test_the_previous_factor_is_a_good_start(iterations):
    """From its directions one subspace iteration is enough; from random ones the subspace has to grow."""
    before = decaying(200, 1.5)
    after = before + 0.02 * decaying(200, 1.5, seed=1)
    start = low_rank(before, 0.05, 0.2, most=150)
    assert len(iterations) > 1
    iterations.clear()
    warm = low_rank(after, 0.05, 0.2, most=150, start=start.B)
    assert true_error(warm, after, 0.05) <= warm.error <= 0.2
    assert iterations == [rank(start) + module.OVERSAMPLING]


def test_a_flat_spectrum_has_no_low_rank_factor():
    assert low_rank(half(300), 0.01, 0.1, most=100) is None


def half(d):
    """A second moment with half of its eigenvalues one, and half of them zero."""
    P = torch.linalg.qr(torch.randn(d, d // 2, dtype=f64, generator=torch.Generator().manual_seed(0)))[0]
    return P @ P.T


def test_a_flat_spectrum_is_given_up_after_one_subspace_iteration(iterations):
    assert low_rank(half(600), 0.1, 0.3, most=150) is None
    assert len(iterations) == 1


def test_without_damping_there_is_no_low_rank_factor():
    assert low_rank(decaying(100, 2.0), 0.0, 0.3, most=90) is None


@pytest.mark.parametrize("d", [1, 2, 3, 20])
def test_narrow_sides_have_a_factor_of_a_lower_rank_or_none(d):
    second = decaying(d, 4.0)
    found = low_rank(second, 0.5, 0.9, most=d - 1)
    assert (found is None) == (d == 1)
    if found is not None:
        assert rank(found) < d
        assert true_error(found, second, 0.5) <= found.error <= 0.9


def test_moments_of_lower_rank_than_the_factor_leave_no_error():
    """The tail is zero, so the iterated spectrum ends in zeros, or below by rounding."""
    second = decaying(100, 1.0)
    values, P = torch.linalg.eigh(second)
    second = (P[:, -5:] * values[-5:]) @ P[:, -5:].T
    found = low_rank(second, 0.1, 0.3, most=90)
    assert rank(found) == module.RANK_MULTIPLE
    assert true_error(found, second, 0.1) <= found.error + 1e-12 < 1e-6


def test_nothing_is_drawn_from_the_users_random_stream():
    before = torch.random.get_rng_state()
    first, second = (low_rank(decaying(100, 1.5), 0.1, 0.2, most=90) for _ in range(2))
    assert torch.equal(first.B, second.B)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_low_rank_factor_names_its_rank():
    assert str(LowRank(torch.zeros(6, 2), 0.7)) == "rank 2 of"
