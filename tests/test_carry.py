"""Optimizer state through changes of coordinates: one path in ordinary coordinates, whatever the whitened ones are."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import bprong
from bprong.carry import carry_, rules_for
from bprong.coordinates import BackwardChange, ForwardChange
from bprong.likelihood import Categorical
from bprong.moments import input_moments
from bprong.recording import record
from bprong.whitening import whitener
from helpers import assert_close, classification, layers_of, mlp

FACTORISATIONS = ["eigh", "cholesky", "symmetric"]


def invertible(d, seed):
    return torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3 * torch.eye(d)


def forward_change(seed=0, d=4):
    c = torch.randn(2, d, dtype=torch.float64)
    return ForwardChange(invertible(d, seed), c[0], invertible(d, seed + 1), c[1])


def backward_change(seed=0, d=3):
    return BackwardChange(invertible(d, seed), invertible(d, seed + 1))


changes = st.builds(lambda f, seed: f(seed), st.sampled_from([forward_change, backward_change]), st.integers(0, 30))


def some_pair(seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(3, 4, dtype=torch.float64, generator=generator),
        torch.randn(3, dtype=torch.float64, generator=generator),
    )


def pairing(g, v):
    return float((g[0] * v[0]).sum() + (g[1] * v[1]).sum())


@given(change=changes, seed=st.integers(0, 30))
def test_a_gradient_keeps_its_product_with_every_velocity(change, seed):
    """What makes it a covector: ⟨g, v⟩, the rate of change of the loss, is the same in all coordinates."""
    g, v = some_pair(seed), some_pair(seed + 1)
    assert pairing(change.gradient(*g), change.velocity(*v)) == pytest.approx(pairing(g, v), rel=1e-9, abs=1e-9)


@given(change=changes, seed=st.integers(0, 30))
def test_the_two_rules_differ(change, seed):
    g = some_pair(seed)
    moved, wrong = change.gradient(*g), change.velocity(*g)
    assert float((moved[0] - wrong[0]).norm() / moved[0].norm()) > 1e-3


@given(change=changes)
def test_squares_are_the_diagonal_of_the_moved_covariance(change):
    """Σ over unit gradients of (moved)², each weighted by its square: exact for uncorrelated gradients."""
    v = tuple(t.square() for t in some_pair(7))
    expected = [torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    for which in (0, 1):
        for k in range(v[which].numel()):
            unit = [torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
            unit[which].view(-1)[k] = v[which].view(-1)[k].sqrt()
            moved_unit = change.gradient(*unit)
            expected = [total + part.square() for total, part in zip(expected, moved_unit, strict=True)]
    for moved, total in zip(change.squares(*v), expected, strict=True):
        assert_close(moved, total, 1e-10)
        assert (moved >= 0).all()


@pytest.mark.parametrize("change", [forward_change(), backward_change()])
def test_a_change_and_its_reverse_cancel(change):
    if isinstance(change, ForwardChange):
        back = ForwardChange(change.U_new, change.c_new, change.U, change.c)
    else:
        back = BackwardChange(change.R_new, change.R)
    for rule in ("velocity", "gradient"):
        there = getattr(change, rule)(*some_pair(1))
        for got, start in zip(getattr(back, rule)(*there), some_pair(1), strict=True):
            assert_close(got, start, 1e-11)


@pytest.mark.parametrize("change", [forward_change(), backward_change()])
@pytest.mark.parametrize("rule", ["velocity", "gradient", "squares"])
def test_without_a_bias_the_weight_moves_alone(change, rule):
    W, b = getattr(change, rule)(some_pair(1)[0].square(), None)
    assert b is None
    assert_close(W, getattr(change, rule)(some_pair(1)[0].square(), torch.zeros(3, dtype=torch.float64))[0], 1e-12)


def random_rotation(d, seed):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_fixed_statistics_momentum_follows_one_path_whatever_the_root(nesterov):
    """eigh, cholesky, symmetric and random rotations QU take turns; the ordinary path does not notice."""
    x, y = classification(40, 5, 3)
    z_hidden = torch.randn(40, 4, dtype=torch.float64)
    seconds = [(input_moments(z).second, z.mean(0)) for z in (x, z_hidden)]
    D = [input_moments(torch.randn(20, d, dtype=torch.float64), centre=False).second for d in (4, 3)]

    def run(root_at):
        torch.manual_seed(1)
        model = bprong.whiten_(mlp(5, 4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=nesterov)
        for t in range(60):
            for i, layer in enumerate(layers_of(model)):
                (Z, c), rules = seconds[i], rules_for(optimizer)
                U, R = root_at(Z, t, i), root_at(D[i], t, i + 7)
                carry_(optimizer, rules, layer, layer.rewhiten_forward_(U, c))
                carry_(optimizer, rules, layer, layer.rewhiten_backward_(R))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [tensor for layer in layers_of(model) for tensor in (layer.weight, layer.bias)]

    def alternating(second, t, i):
        U = whitener(second, 0.1, FACTORISATIONS[t % 3]).matrix
        return random_rotation(len(U), t * 31 + i) @ U if t % 4 == 3 else U

    fixed = run(lambda second, t, i: whitener(second, 0.1, "eigh").matrix)
    for ours, expected in zip(run(alternating), fixed, strict=True):
        assert_close(ours, expected, 1e-11)


def test_with_changing_statistics_the_path_is_v_becomes_beta_v_plus_P_g():
    """P_t g in ordinary coordinates: ΔW = (RᵀR)(g_W − g_b cᵀ)(UᵀU), Δb = (RᵀR) g_b − ΔW c."""
    x, y = classification(80, 5, 3)
    model = mlp(5, 4, 3)
    plain = mlp(5, 4, 3)
    plain.load_state_dict(model.state_dict())
    bprong.whiten_(model)
    beta, lr = 0.9, 0.03
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=beta)
    rewhitening = bprong.Rewhitening(
        model, optimizer, fisher="exact", forward_every=3, backward_every=2, backward_offset=1
    )
    inverses = {i: (torch.eye(a, dtype=torch.float64), torch.zeros(a, dtype=torch.float64),
                    torch.eye(b, dtype=torch.float64)) for i, (a, b) in enumerate([(5, 4), (4, 3)])}  # fmt: skip
    velocity = [(torch.zeros_like(m.weight), torch.zeros_like(m.bias)) for m in (plain[0], plain[2])]
    for t in range(50):
        chosen = torch.arange(t * 20, (t + 1) * 20) % 80
        xb, yb = x[chosen], y[chosen]
        rewhitening.step(xb)
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()

        layers = {str(i): (m, True) for i, m in ((0, plain[0]), (2, plain[2]))}
        seen = record(plain, layers, xb, None, likelihood=Categorical(), fisher="exact", errors=True, seed=0)
        plain.zero_grad()
        F.cross_entropy(plain(xb), yb).backward()
        for i, (name, m) in enumerate((("0", plain[0]), ("2", plain[2]))):
            UU, c, RR = inverses[i]
            if t % 3 == 0:
                UU, c = torch.linalg.inv(seen[name].z.second + torch.diag(torch.full_like(c, 0.1))), seen[name].z.mean
            if t % 2 == 1:
                RR = torch.linalg.inv(
                    seen[name].delta.second + torch.diag(torch.full((len(RR),), 0.03, dtype=torch.float64))
                )
            inverses[i] = UU, c, RR
            step_W = RR @ (m.weight.grad - torch.outer(m.bias.grad, c)) @ UU
            step_b = RR @ m.bias.grad - step_W @ c
            vW, vb = velocity[i]
            velocity[i] = vW, vb = beta * vW + step_W, beta * vb + step_b
            with torch.no_grad():
                m.weight -= lr * vW
                m.bias -= lr * vb
    for layer, m in zip(layers_of(model), (plain[0], plain[2]), strict=True):
        assert_close(layer.weight, m.weight, 1e-10)
        assert_close(layer.bias, m.bias, 1e-10)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_adams_first_moment_is_carried_exactly_as_a_gradient(kind):
    """The first moment, brought to ordinary coordinates, is the average of ordinary gradients, through any change."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    rules = rules_for(optimizer)
    layer = layers_of(model)[0]
    average_W, average_b = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for t in range(12):
        if t % 3 == 1:
            before = optimizer.state[layer.weight_dagger]["exp_avg_sq"].clone()
            carry_(optimizer, rules, layer, layer.rewhiten_forward_(invertible(5, t), torch.randn(5)))
            carry_(optimizer, rules, layer, layer.rewhiten_backward_(invertible(4, t)))
            after = optimizer.state[layer.weight_dagger]["exp_avg_sq"]
            assert (after >= 0).all()
            assert not torch.equal(after, before)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain = bprong.fold(model)
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        average_W, average_b = 0.9 * average_W + 0.1 * plain[0].weight.grad, 0.9 * average_b + 0.1 * plain[0].bias.grad
        optimizer.step()
        m_W, m_b = (optimizer.state[p]["exp_avg"] for p in (layer.weight_dagger, layer.bias_dagger))
        assert_close(m_W, layer.R @ (average_W - torch.outer(average_b, layer.c)) @ layer.U.T, 1e-10)
        assert_close(m_b, layer.R @ average_b, 1e-10)


def test_adam_keeps_its_path_through_a_permutation_of_coordinates():
    """A signed permutation only renames coordinates, so here even the second moment is carried exactly."""
    x, y = classification(40, 5, 3)

    def run(permute):
        torch.manual_seed(3)
        model = bprong.whiten_(mlp(5, 4, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        for t in range(20):
            if permute and t % 3 == 2:
                for layer in layers_of(model):
                    P = torch.eye(layer.in_features)[torch.randperm(layer.in_features)].double()
                    Q = -torch.eye(layer.out_features)[torch.randperm(layer.out_features)].double()
                    carry_(optimizer, rules_for(optimizer), layer, layer.rewhiten_forward_(P @ layer.U, layer.c))
                    carry_(optimizer, rules_for(optimizer), layer, layer.rewhiten_backward_(Q @ layer.R))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model(x)

    assert_close(run(True), run(False), 1e-12)


def test_every_known_optimizer_runs_and_its_state_keys_are_all_known():
    """A state tensor shaped like the parameter that no rule moves would be silently wrong."""
    x, y = classification(40, 5, 3)
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RAdam,
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        torch.optim.Adagrad,
    ):
        model = bprong.whiten_(mlp(5, 4, 3))
        optimizer = make(model.parameters())
        rewhitening = bprong.Rewhitening(model, optimizer, forward_every=2, backward_every=2, backward_offset=1)
        for _ in range(5):
            rewhitening.step(x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for parameter, state in optimizer.state.items():
            shaped = {k for k, v in state.items() if torch.is_tensor(v) and v.shape == parameter.shape}
            assert shaped <= set(rules_for(optimizer)), type(optimizer)


class Unknown(torch.optim.SGD):
    """A subclass may mean something else by the same key."""


def test_an_unknown_optimizer_is_refused_unless_told_how():
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = Unknown(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"state of Unknown.*carry="):
        bprong.Rewhitening(model, optimizer)
    bprong.Rewhitening(model, optimizer, carry={"momentum_buffer": "velocity"})
    with pytest.raises(ValueError, match="'speed'"):
        bprong.Rewhitening(model, optimizer, carry={"momentum_buffer": "speed"})


def test_gradients_already_accumulated_are_moved_too():
    """Two micro-batches with a refresh between them: their gradients add up in one coordinate system."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewhitening = bprong.Rewhitening(model, optimizer, forward_every=1, backward_every=1, fisher="exact")
    F.cross_entropy(model(x), y).backward()
    rewhitening.step(x)
    F.cross_entropy(model(x), y).backward()
    plain = bprong.fold(model)
    plain.zero_grad()
    (2 * F.cross_entropy(plain(x), y)).backward()
    for layer, stock in zip(layers_of(model), (plain[0], plain[2]), strict=True):
        centred = stock.weight.grad - torch.outer(stock.bias.grad, layer.c)
        assert_close(layer.weight_dagger.grad, layer.R @ centred @ layer.U.T, 1e-10)
        assert_close(layer.bias_dagger.grad, layer.R @ stock.bias.grad, 1e-10)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_momentum_is_exact_with_a_learning_rate_of_the_biass_own(factor):
    """Velocities in ordinary coordinates: v_W ← βv_W + η_W P g_W, v_b ← βv_b + η_b (RᵀR) g_b − η_W (P g_W) c."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 3))
    layer, beta, lr = model[0], 0.9, 0.05
    groups = [{"params": [layer.weight_dagger]}, {"params": [layer.bias_dagger], "lr": lr * factor}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=beta)
    W, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    vW, vb = torch.zeros_like(W), torch.zeros_like(b)
    for t in range(20):
        U, c, R = invertible(5, t), torch.randn(5, dtype=torch.float64), invertible(3, t + 50)
        for change in (layer.rewhiten_forward_(U / 3, c), layer.rewhiten_backward_(R / 3)):
            carry_(optimizer, rules_for(optimizer), layer, change)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        p = (x @ W.T + b).softmax(-1) - F.one_hot(y, 3)
        g_W, g_b = p.T @ x / len(x), p.mean(0)
        RR, UU = R.T @ R / 9, U.T @ U / 9
        step_W, step_b = lr * RR @ (g_W - torch.outer(g_b, c)) @ UU, lr * factor * RR @ g_b
        vW, vb = beta * vW + step_W, beta * vb + step_b - step_W @ c
        W, b = W - vW, b - vb
        assert_close(layer.weight, W, 1e-9)
        assert_close(layer.bias, b, 1e-9)


def test_each_state_of_rmsprop_is_moved_by_its_own_rule():
    model = bprong.whiten_(mlp(4, 3))
    layer = model[0]
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)
    F.cross_entropy(model(torch.randn(5, 4, dtype=torch.float64)), torch.zeros(5, dtype=torch.long)).backward()
    optimizer.step()
    state = {key: (optimizer.state[layer.weight_dagger][key].clone(), optimizer.state[layer.bias_dagger][key].clone())
             for key in ("momentum_buffer", "grad_avg", "square_avg")}  # fmt: skip
    change = layer.rewhiten_forward_(invertible(4, 1), torch.randn(4))
    carry_(optimizer, rules_for(optimizer), layer, change)
    for key, rule in (("momentum_buffer", "velocity"), ("grad_avg", "gradient"), ("square_avg", "squares")):
        W, b = getattr(change, rule)(*state[key])
        assert_close(optimizer.state[layer.weight_dagger][key], W, 1e-12)
        assert_close(optimizer.state[layer.bias_dagger][key], b, 1e-12)


@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_state_of_one_of_the_two_alone_is_moved(kept):
    layer = bprong.WhitenedLinear(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    parameter = layer.weight_dagger if kept == "weight" else layer.bias_dagger
    optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter.data)
    carry_(optimizer, rules_for(optimizer), layer, layer.rewhiten_backward_(invertible(3, 1)))
    assert not torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones_like(parameter.data))


@pytest.mark.parametrize("carry", [{"momentum": "velocity"}, {"momentum_buffer": "velocity", "step": "velocity"}])
def test_a_carry_that_does_not_fit_the_state_is_refused_before_anything_is_changed(carry):
    class Counting(Unknown):
        """Keeps a count beside its momentum."""

        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["step"] = torch.tensor(1.0)

    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    rewhitening = bprong.Rewhitening(model, optimizer, carry=carry, forward_every=1, backward_every=1)
    rewhitening.step(x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="layer '0': Counting keeps '(momentum_buffer|step)'"):
        rewhitening.step(x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
