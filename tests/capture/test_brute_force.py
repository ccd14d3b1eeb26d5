"""Ž and D of every kind of layer from first principles, without code of bprong on the other side.

z is written down by hand. δ comes from the Jacobian of the logits by a perturbation added to the layer's output, one
example and one class at a time: D = 1/N Σ_n Σ_y p(y|x_n) Σ_rows δδᵀ.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev

import bprong
from helpers import SelfAttention, assert_close


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def brute_force_D(logits_of, shape, xs):
    """logits_of(x, e): logits (targets, classes) of one example with e (rows, features) added to the layer's output."""
    D = torch.zeros(shape[-1], shape[-1])
    targets = 0
    for x in xs:
        e = torch.zeros(shape)
        J = jacrev(logits_of, 1)(x, e)
        p = logits_of(x, e).softmax(-1)  # J: (targets, classes, rows, features)
        for t in range(len(p)):
            targets += 1
            for y in range(p.shape[1]):
                delta = torch.einsum("c,crf->rf", p[t] - F.one_hot(torch.tensor(y), p.shape[1]), J[t])
                D += p[t, y] * delta.T @ delta
    return D / targets


def measured(model, x, y):
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, options={"fisher": "exact", "average": 0.0})
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    return optimizer._whitening.layers


def test_a_convolution():
    """Stride, dilation, zero padding and two groups, output and kernel positions counted out."""
    conv = nn.Conv2d(4, 6, (2, 3), stride=(2, 1), padding=(1, 1), dilation=(1, 2), groups=2)
    head = nn.Linear(6 * 3 * 4, 3)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), head)
    W = conv.weight.detach().clone()
    b = conv.bias.detach().clone()
    H = head.weight.detach().clone()
    h = head.bias.detach().clone()
    xs = torch.randn(5, 4, 4, 6)

    def patch(x, i, j, group):
        entries = []
        for channel in (2 * group, 2 * group + 1):
            for u in range(2):
                for v in range(3):
                    row = 2 * i + u - 1
                    column = j + 2 * v - 1
                    inside = 0 <= row < 4 and 0 <= column < 6
                    entries.append(x[channel, row, column] if inside else torch.tensor(0.0))
        return torch.stack(entries)

    def logits_of(x, e):
        a = torch.stack(
            [
                torch.cat([W[3 * g : 3 * g + 3].flatten(1) @ patch(x, i, j, g) for g in (0, 1)]) + b
                for i in range(3)
                for j in range(4)
            ]
        )
        return (H @ torch.tanh(a + e).T.flatten() + h).unsqueeze(0)

    assert_close(torch.stack([logits_of(x, torch.zeros(12, 6))[0] for x in xs]), model(xs), 1e-12)
    layer = measured(model, xs, torch.arange(5) % 3)["0"]
    D = brute_force_D(logits_of, (12, 6), xs)
    for g in (0, 1):
        z = torch.stack([patch(x, i, j, g) for x in xs for i in range(3) for j in range(4)])
        assert_close(layer.forward.moments.second[g], torch.cov(z.T, correction=0), 1e-10)
        assert_close(layer.c[g], z.mean(0), 1e-10)
        assert_close(layer.backward.moments.second[g], D[3 * g : 3 * g + 3, 3 * g : 3 * g + 3], 1e-10)


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_attention(which):
    mha = nn.MultiheadAttention(4, 2, batch_first=True)
    head = nn.Linear(4, 3)
    nn.init.normal_(mha.in_proj_bias)

    parts = dict(zip("qkv", zip(mha.in_proj_weight.chunk(3), mha.in_proj_bias.chunk(3), strict=True), strict=True))
    parts = {name: (W.detach().clone(), b.detach().clone()) for name, (W, b) in parts.items()}
    W_o, b_o, H, h = (p.detach().clone() for p in (*mha.out_proj.parameters(), *head.parameters()))
    xs = torch.randn(4, 3, 4)

    def attended(x, e):
        q, k, v = (x @ W.T + b + (e if name == which else 0) for name, (W, b) in parts.items())
        heads = [
            (q[:, s] @ k[:, s].T / 2**0.5).softmax(-1) @ v[:, s] for s in (slice(0, 2), slice(2, 4))
        ]  # two heads of two features
        return torch.cat(heads, 1)

    def logits_of(x, e):
        return (attended(x, e) @ W_o.T + b_o + (e if which == "out" else 0)) @ H.T + h

    none = torch.zeros(3, 4)
    model = SelfAttention(mha, head)
    assert_close(torch.stack([logits_of(x, none) for x in xs]), model(xs), 1e-12)
    layer = measured(model, xs, torch.arange(12).view(4, 3) % 3)["mha.out_proj" if which == "out" else f"mha.{which}"]
    z = torch.cat([attended(x, none) for x in xs]) if which == "out" else xs.flatten(0, 1)
    assert_close(layer.forward.moments.second, torch.cov(z.T, correction=0), 1e-10)
    assert_close(layer.backward.moments.second, brute_force_D(logits_of, (3, 4), xs), 1e-10)


def test_an_embedding():
    embed = nn.Embedding(5, 4)
    head = nn.Linear(4, 3)
    E, H, h = (p.detach().clone() for p in (embed.weight, head.weight, head.bias))
    xs = torch.tensor([[0, 1, 1], [3, 2, 1]])
    layer = measured(nn.Sequential(embed, nn.Tanh(), head), xs, torch.zeros(2, 3, dtype=torch.long))["0"]

    def logits_of(x, e):
        return torch.tanh(E[x] + e) @ H.T + h

    assert layer.forward.moments.second.flatten().tolist() == pytest.approx([1 / 6, 3 / 6, 1 / 6, 1 / 6, 0])
    assert_close(layer.backward.moments.second, brute_force_D(logits_of, (3, 4), xs), 1e-10)


def test_a_recurrent_cell_over_time():
    cell = nn.RNNCell(3, 4)
    head = nn.Linear(4, 3)

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell
            self.head = head

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.head(h)

    Wi, Wh, bi, bh, H, h0 = (p.detach().clone() for p in (*cell.parameters(), *head.parameters()))
    xs = torch.randn(5, 3, 3)

    def states(x, e):
        h = [torch.zeros(4)]
        for t in range(3):
            h.append(torch.tanh(Wi @ x[t] + bi + Wh @ h[-1] + bh + e[t]))
        return h

    def logits_of(x, e):
        return (H @ states(x, e)[-1] + h0).unsqueeze(0)

    layers = measured(Unrolled(), xs, torch.arange(5) % 3)
    D = brute_force_D(logits_of, (3, 4), xs)
    before = torch.stack([h for x in xs for h in states(x, torch.zeros(3, 4))[:-1]])
    assert_close(layers["cell.weight_ih"].forward.moments.second, torch.cov(xs.flatten(0, 1).T, correction=0), 1e-10)
    assert_close(layers["cell.weight_hh"].forward.moments.second, torch.cov(before.T, correction=0), 1e-10)
    for name in ("cell.weight_ih", "cell.weight_hh"):
        assert_close(layers[name].backward.moments.second, D, 1e-10)
