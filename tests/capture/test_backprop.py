"""Which rows count: neither ignored targets nor rows that belong to them alone are measured.

And weights that are used in ways that are not recorded, which must be found out.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong import WhiteningWarning
from helpers import assert_close, mlp
from layered import stepped

EXACT = {"fisher": "exact", "average": 0.5}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def walk(model, batches, loss, method=bprong.BPRONG, told=False):
    """The parameters after some steps; told: targets are given by observe(x, y)."""
    options = EXACT if method is bprong.BPRONG else {"average": 0.5}  # PRONG measures no errors
    optimizer = method(model, "cross_entropy", lr=0.05, momentum=0.5, every=2, options=options)
    for x, y in batches:
        if told:
            optimizer.observe(x, y)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def cross_entropy(output, y):
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


def masked_loss(output, y):
    """A masked loss written without ignore_index."""
    losses = F.cross_entropy(output.flatten(0, -2), y.flatten().clamp(min=0), reduction="none")
    return (losses * (y.flatten() >= 0)).sum() / (y >= 0).sum()


def padded_rows(steps=5):
    """Sequences of (batch, time, features) with padding full of large numbers, and the same rows without it."""
    padded = []
    rows = []
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(6, 5, 4, generator=generator) + 1
        y = torch.randint(3, (6, 5), generator=generator)
        real = torch.arange(5) < torch.randint(1, 6, (6, 1), generator=generator)
        padded.append((torch.where(real[..., None], x, 50.0), torch.where(real, y, -100)))
        rows.append((x[real], y[real]))
    return padded, rows


@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
@pytest.mark.parametrize("loss", [cross_entropy, masked_loss])
@pytest.mark.parametrize("told", [False, True], ids=["read off the gradient", "observed"])
def test_padding_does_not_count(method, loss, told):
    padded, rows = padded_rows()
    models = [mlp(4, 6, 3) for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    ours = walk(models[0], padded, loss, method, told)
    assert_close(ours, walk(models[1], rows, cross_entropy, method), 1e-9)
    # Without the mask the path is another one.
    blind = walk(models[2], [(x, y.clamp(min=0)) for x, y in padded], cross_entropy, method)
    assert float((ours - blind).norm() / ours.norm()) > 1e-2


class Reader(nn.Module):
    """A transformer on tokens; 0 is padding, which attention ignores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.layer(self.token(tokens), src_key_padding_mask=tokens == 0))


def test_the_length_of_the_padding_changes_nothing_for_a_transformer():
    def batches(width):
        for t in range(6):
            generator = torch.Generator().manual_seed(t)
            tokens = torch.randint(1, 9, (5, 4), generator=generator)
            y = torch.randint(5, (5, 4), generator=generator)
            real = torch.arange(4) < torch.randint(2, 5, (5, 1), generator=generator)
            tokens = torch.where(real, tokens, 0)
            y = torch.where(real, y, -100)
            yield F.pad(tokens, (0, width - 4)), F.pad(y, (0, width - 4), value=-100)

    assert_close(walk(Reader(), batches(4), cross_entropy), walk(Reader(), batches(9), cross_entropy), 1e-9)


def test_rows_that_receive_errors_by_attention_count_though_their_own_target_is_ignored():
    """For example a prompt: its targets are ignored, but errors of the answer come back to it."""
    model = Reader()
    tokens = torch.randint(1, 9, (5, 4))
    y = torch.randint(5, (5, 4))
    y[:, :3] = -100
    walk(model, [], cross_entropy)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, options=EXACT)
    cross_entropy(model(tokens), y).backward()
    optimizer.step()
    layers = optimizer._whitening.layers
    assert layers["layer.self_attn.k"].forward.moments.weight == 20
    assert layers["layer.self_attn.q"].forward.moments.weight == 5
    assert layers["head"].forward.moments.weight == 5
    assert {layer.backward.moments.weight for layer in layers.values()} == {5.0}


def test_a_loss_at_the_last_position_has_one_target_for_each_sequence():
    model = mlp(4, 6, 3)
    other = mlp(4, 6, 3)
    other.load_state_dict(model.state_dict())
    batches = [(torch.randn(7, 5, 4), torch.randint(3, (7,))) for _ in range(4)]
    ours = walk(model, batches, lambda output, y: F.cross_entropy(output[:, -1], y))
    theirs = walk(other, [(x[:, -1], y) for x, y in batches], F.cross_entropy)
    assert_close(ours, theirs, 1e-9)


def test_padding_is_left_out_of_micro_batches():
    padded, rows = padded_rows(1)
    (x, y) = padded[0]
    (flat, _) = rows[0]
    model = mlp(4, 6, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, options=EXACT)
    for part in (slice(0, 2), slice(2, 6)):
        cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()
    assert_close(optimizer._whitening.layers["0"].c, flat.mean(0), 1e-12)


def test_a_batch_in_which_every_target_is_ignored():
    """Nothing is learnt from such a batch, and nothing breaks."""
    model = mlp(4, 3)
    x = torch.randn(6, 4)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, options=EXACT)
    F.cross_entropy(model(x), torch.randint(3, (6,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    (model(x) * 0).sum().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("sizes", [(10, 3), (3, 3)], ids=["ten", "three"])
def test_dead_units_of_examples_that_count_are_measured(sizes):
    """An ignored image changes nothing for the others, in a network with ReLUs and pooling."""
    n, width = sizes
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, width)).double()
    x = torch.randn(n + 1, 1, 8, 8, dtype=torch.float64)
    y = torch.arange(n + 1) % width
    y[-1] = -100
    other = copy.deepcopy(model)
    ours = stepped(model, x, y)._whitening.layers
    theirs = stepped(other, x[:-1], y[:-1])._whitening.layers
    assert ours["0"].forward.moments.weight == theirs["0"].forward.moments.weight == 36 * n
    for name, layer in theirs.items():
        assert_close(ours[name].forward.factor.inverse, layer.forward.factor.inverse, 1e-12)


# Weights used in other ways -------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Layers whose weight is used a second time, in a way that is not recorded."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(6, 6)
        self.conv = nn.Conv1d(6, 6, 1)
        self.head = nn.Linear(6, 6)

    def forward(self, tokens):
        h = self.conv(self.embed(tokens).mT).mT
        if self.kind == "tied":
            return self.head(h) + F.linear(h, self.embed.weight)
        if self.kind == "tied, by hand":
            return self.head(h) + h @ self.embed.weight.T
        if self.kind == "transposed":
            return self.head(h) + F.conv_transpose1d(h.mT, self.conv.weight).mT
        if self.kind == "of its own input":
            return self.head(F.linear(h, self.head.weight.T))
        if self.kind == "as an input":
            return self.head(h) @ self.conv(self.embed.weight.mT).mT
        return self.head(h) + F.linear(h, self.head.weight.T)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tied", ["embed"]),
        ("tied, by hand", ["embed"]),
        ("transposed", ["conv"]),
        ("of its own transpose", ["head"]),
        ("of its own input", ["head"]),
        ("as an input", ["embed"]),
    ],
)
@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
def test_a_weight_with_unrecorded_uses_follows_the_fallback_rule(kind, names, method):
    model = ByHand(kind).float()
    tokens = torch.randint(6, (5, 3))
    y = torch.randint(6, (5, 3))
    optimizer = method(model, "cross_entropy", lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), y.flatten()).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        whitening = [w for w in caught if w.category is WhiteningWarning]
        assert [str(w.message).split("'")[1] for w in whitening] == names
        assert all(w.filename == __file__ for w in whitening)  # at the line of the user's step
        names = []
    reasons = set(optimizer.report().fallback.values())
    assert reasons == {"its weight is used in a way that cannot be recorded"}
    fresh = method(ByHand(kind).float(), "cross_entropy", lr=0.01)
    fresh.load_state_dict(optimizer.state_dict())
    assert list(fresh._whitening.layers) == list(optimizer._whitening.layers)
    assert fresh.report().fallback == optimizer.report().fallback


def test_calls_without_rows_are_uses_that_are_known():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 3)
            self.two = nn.Linear(4, 3)

        def forward(self, x):
            return self.one(x[:0]).sum(0) + self.two(x) + torch.cat([self.one(x[:2]), self.one(x[2:])])

    optimizer = stepped(Experts(), torch.randn(6, 4), torch.arange(6) % 3)
    assert list(optimizer._whitening.layers) == ["one", "two"]
