"""Optimizer state is transformed with the coordinates, so the path in ordinary coordinates does not depend on them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.measure import record
from bprong.capture.request import Request
from bprong.capture.weights import weight_matrix_of
from bprong.likelihood.families import Categorical
from bprong.linalg.roots import root_of
from bprong.network.coordinates import carry_, holders_for, transports_for
from helpers import assert_close, classification, input_moments, layers_of, mlp

SOLVERS = ["eigh", "cholesky", "symmetric"]


def invertible(d, seed):
    return torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 3 * torch.eye(d)


def random_rotation(d, seed):
    return torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_fixed_statistics_momentum_follows_the_same_path_for_every_root(nesterov):
    """eigh, cholesky, symmetric and random rotations QU alternate; the path in ordinary coordinates is the same."""
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
                Z, c = seconds[i]
                transports = transports_for(optimizer)
                carry_([(optimizer, transports)], layer, layer.rewhiten_("forward", root_at(Z, t, i), c))
                carry_([(optimizer, transports)], layer, layer.rewhiten_("backward", root_at(D[i], t, i + 7)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [tensor for layer in layers_of(model) for tensor in (layer.weight, layer.bias)]

    def alternating(second, t, i):
        U = root_of(second, 0.1, SOLVERS[t % 3]).matrix
        return random_rotation(len(U), t * 31 + i) @ U if t % 4 == 3 else U

    fixed = run(lambda second, t, i: root_of(second, 0.1, "eigh").matrix)
    for ours, expected in zip(run(alternating), fixed, strict=True):
        assert_close(ours, expected, 1e-11)


class OrdinaryMomentum:
    """v ← βv + P_t g in ordinary coordinates: ΔW = (RᵀR)(g_W − g_b cᵀ)(UᵀU), Δb = (RᵀR) g_b − ΔW c."""

    def __init__(self, linear, lr, beta):
        self.linear = linear
        self.lr = lr
        self.beta = beta
        self.UU = torch.eye(linear.in_features, dtype=torch.float64)
        self.RR = torch.eye(linear.out_features, dtype=torch.float64)
        self.c = torch.zeros(linear.in_features, dtype=torch.float64)
        self.v_W = torch.zeros_like(linear.weight)
        self.v_b = torch.zeros_like(linear.bias)

    def refresh(self, moments, forward, backward):
        if forward:
            self.UU = torch.linalg.inv(moments.z.second + 0.1 * torch.eye(len(self.UU), dtype=torch.float64))
            self.c = moments.z.mean
        if backward:
            self.RR = torch.linalg.inv(moments.delta.second + 0.03 * torch.eye(len(self.RR), dtype=torch.float64))

    @torch.no_grad()
    def step(self):
        g_b = self.linear.bias.grad
        step_W = self.RR @ (self.linear.weight.grad - torch.outer(g_b, self.c)) @ self.UU
        self.v_W = self.beta * self.v_W + step_W
        self.v_b = self.beta * self.v_b + self.RR @ g_b - step_W @ self.c
        self.linear.weight -= self.lr * self.v_W
        self.linear.bias -= self.lr * self.v_b


def test_with_changing_statistics_momentum_averages_preconditioned_gradients():
    x, y = classification(80, 5, 3)
    model = mlp(5, 4, 3)
    plain = mlp(5, 4, 3)
    plain.load_state_dict(model.state_dict())
    bprong.whiten_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", fisher="exact", forward_every=3, backward_every=2, backward_offset=1
    )
    expected = {name: OrdinaryMomentum(plain.get_submodule(name), 0.03, 0.9) for name in ("0", "2")}
    for t in range(50):
        chosen = torch.arange(t * 20, (t + 1) * 20) % 80
        rewhitening.step(x[chosen])
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        weights = {weight_matrix_of(name, own.linear): True for name, own in expected.items()}
        request = Request(weights, expected.keys(), expected.keys(), Categorical(), "exact")
        seen = record(plain, request, x[chosen])
        plain.zero_grad()
        F.cross_entropy(plain(x[chosen]), y[chosen]).backward()
        for name, own in expected.items():
            own.refresh(seen[name], forward=t % 3 == 0, backward=t % 2 == 1)
            own.step()
    for layer, own in zip(layers_of(model), expected.values(), strict=True):
        assert_close(layer.weight, own.linear.weight, 1e-10)
        assert_close(layer.bias, own.linear.bias, 1e-10)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_the_first_moment_of_adam_is_transformed_exactly_as_a_gradient(kind):
    """In ordinary coordinates the first moment is the average of gradients, before and after any change."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = kind(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    transports = transports_for(optimizer)
    layer = layers_of(model)[0]
    average_W = torch.zeros(4, 5, dtype=torch.float64)
    average_b = torch.zeros(4, dtype=torch.float64)
    for t in range(12):
        if t % 3 == 1:
            before = optimizer.state[layer.weight_dagger]["exp_avg_sq"].clone()
            carry_([(optimizer, transports)], layer, layer.rewhiten_("forward", invertible(5, t), torch.randn(5)))
            carry_([(optimizer, transports)], layer, layer.rewhiten_("backward", invertible(4, t)))
            after = optimizer.state[layer.weight_dagger]["exp_avg_sq"]
            assert (after >= 0).all()
            assert not torch.equal(after, before)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        plain = bprong.fold(model)
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        average_W = 0.9 * average_W + 0.1 * plain[0].weight.grad
        average_b = 0.9 * average_b + 0.1 * plain[0].bias.grad
        optimizer.step()
        m_W = optimizer.state[layer.weight_dagger]["exp_avg"]
        m_b = optimizer.state[layer.bias_dagger]["exp_avg"]
        assert_close(m_W, layer.R @ (average_W - torch.outer(average_b, layer.c)) @ layer.U.T, 1e-10)
        assert_close(m_b, layer.R @ average_b, 1e-10)


def test_adam_follows_the_same_path_when_coordinates_are_permuted():
    """A signed permutation only renames coordinates, so here even the second moment is transformed exactly."""
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
                    carry_(holders_for(optimizer), layer, layer.rewhiten_("forward", P @ layer.U, layer.c))
                    carry_(holders_for(optimizer), layer, layer.rewhiten_("backward", Q @ layer.R))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model(x)

    assert_close(run(True), run(False), 1e-12)


def test_every_known_optimizer_has_a_transport_for_all_its_state():
    """A state tensor shaped like the parameter would be wrong if it were not moved, and nothing would say so."""
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
        rewhitening = bprong.Rewhitening(
            model, optimizer, "cross_entropy", forward_every=2, backward_every=2, backward_offset=1
        )
        for _ in range(5):
            rewhitening.step(x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for parameter, state in optimizer.state.items():
            shaped = {k for k, v in state.items() if torch.is_tensor(v) and v.shape == parameter.shape}
            assert shaped <= set(transports_for(optimizer)), type(optimizer)


class Unknown(torch.optim.SGD):
    """A subclass may use the same key for something else."""


def test_an_unknown_optimizer_is_refused_unless_carry_is_given():
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = Unknown(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"state of Unknown.*carry="):
        bprong.Rewhitening(model, optimizer, "cross_entropy")
    bprong.Rewhitening(model, optimizer, "cross_entropy", carry={"momentum_buffer": "velocity"})
    with pytest.raises(ValueError, match="'speed'"):
        bprong.Rewhitening(model, optimizer, "cross_entropy", carry={"momentum_buffer": "speed"})
    adadelta = torch.optim.Adadelta(model.parameters())  # torch's own, but not among those that are known
    with pytest.raises(TypeError, match=r"state of Adadelta.*carry="):
        transports_for(adadelta)
    assert transports_for(adadelta, {"square_avg": "squares"}) == {"square_avg": "squares"}


def test_accumulated_gradients_are_transformed_too():
    """Two micro-batches with a refresh between them: their gradients add up in the same coordinates."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rewhitening = bprong.Rewhitening(
        model, optimizer, "cross_entropy", forward_every=1, backward_every=1, fisher="exact"
    )
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
def test_momentum_is_exact_if_the_bias_has_another_learning_rate(factor):
    """Velocities in ordinary coordinates: v_W ← βv_W + η_W P g_W, v_b ← βv_b + η_b (RᵀR) g_b − η_W (P g_W) c."""
    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 3))
    layer = model[0]
    beta = 0.9
    lr = 0.05
    groups = [{"params": [layer.weight_dagger]}, {"params": [layer.bias_dagger], "lr": lr * factor}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=beta)
    W = layer.weight.detach().clone()
    b = layer.bias.detach().clone()
    v_W = torch.zeros_like(W)
    v_b = torch.zeros_like(b)
    for t in range(20):
        U = invertible(5, t) / 3
        c = torch.randn(5, dtype=torch.float64)
        R = invertible(3, t + 50) / 3
        for change in (layer.rewhiten_("forward", U, c), layer.rewhiten_("backward", R)):
            carry_(holders_for(optimizer), layer, change)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        delta = (x @ W.T + b).softmax(-1) - F.one_hot(y, 3)
        g_W = delta.T @ x / len(x)
        g_b = delta.mean(0)
        step_W = lr * R.T @ R @ (g_W - torch.outer(g_b, c)) @ U.T @ U
        v_W = beta * v_W + step_W
        v_b = beta * v_b + lr * factor * R.T @ R @ g_b - step_W @ c
        W = W - v_W
        b = b - v_b
        assert_close(layer.weight, W, 1e-9)
        assert_close(layer.bias, b, 1e-9)


@pytest.mark.parametrize(("rates", "expected"), [((0.1, 0.2), 0.5), ((0.0, 0.0), 1.0), ((0.1, 0.0), 0.0)])
def test_the_velocity_of_a_weight_enters_that_of_its_bias_by_the_ratio_of_their_rates(rates, expected):
    """b†' = b† + W†s, so with zero gradients the bias's buffer changes by the ratio times m_W s."""
    layer = bprong.WhitenedLinear(nn.Linear(4, 3, dtype=torch.float64))
    groups = [{"params": [p], "lr": lr} for p, lr in zip(layer.parameters(), rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    velocity = torch.randn(3, 4, dtype=torch.float64)
    optimizer.state[layer.weight_dagger]["momentum_buffer"] = velocity.clone()
    optimizer.state[layer.bias_dagger]["momentum_buffer"] = torch.zeros(3, dtype=torch.float64)
    c = torch.randn(4, dtype=torch.float64)
    carry_(holders_for(optimizer), layer, layer.rewhiten_("forward", torch.eye(4, dtype=torch.float64), c))
    assert_close(optimizer.state[layer.bias_dagger]["momentum_buffer"], expected * velocity @ c, 1e-12)


def test_each_state_of_rmsprop_is_transformed_in_its_own_way():
    model = bprong.whiten_(mlp(4, 3))
    layer = model[0]
    optimizer = torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True)
    F.cross_entropy(model(torch.randn(5, 4, dtype=torch.float64)), torch.zeros(5, dtype=torch.long)).backward()
    optimizer.step()
    state = {key: (optimizer.state[layer.weight_dagger][key].clone(), optimizer.state[layer.bias_dagger][key].clone())
             for key in ("momentum_buffer", "grad_avg", "square_avg")}  # fmt: skip
    change = layer.rewhiten_("forward", invertible(4, 1), torch.randn(4))
    carry_(holders_for(optimizer), layer, change)
    for key, transport in (("momentum_buffer", "velocity"), ("grad_avg", "gradient"), ("square_avg", "squares")):
        W, b = getattr(change, transport)(*state[key])
        assert_close(optimizer.state[layer.weight_dagger][key], W, 1e-12)
        assert_close(optimizer.state[layer.bias_dagger][key], b, 1e-12)


@pytest.mark.parametrize("kept", ["weight", "bias"])
def test_state_of_the_weight_or_the_bias_alone_is_transformed(kept):
    layer = bprong.WhitenedLinear(nn.Linear(4, 3, dtype=torch.float64))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    parameter = layer.weight_dagger if kept == "weight" else layer.bias_dagger
    optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter.data)
    carry_(holders_for(optimizer), layer, layer.rewhiten_("backward", invertible(3, 1)))
    assert not torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.ones_like(parameter.data))


@pytest.mark.parametrize("carry", [{"momentum": "velocity"}, {"momentum_buffer": "velocity", "step": "velocity"}])
def test_a_carry_that_does_not_fit_the_state_is_refused_before_anything_is_changed(carry):
    class Counting(Unknown):
        """Keeps a count besides its momentum."""

        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["step"] = torch.tensor(1.0)

    x, y = classification(40, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", carry=carry, forward_every=1, backward_every=1)
    rewhitening.step(x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="layer '0': Counting keeps '(momentum_buffer|step)'"):
        rewhitening.step(x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
