"""Targets that the loss leaves out: neither they nor what belongs to them alone enters the statistics."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from helpers import assert_close, mlp

EXACT = {"fisher": "exact", "average": 0.5}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def walk(model, batches, loss, method=bprong.BPRONG, told=False, **settings):
    """The parameters after some steps; `told`: targets are given by observe(x, y)."""
    optimizer = method(model, lr=0.05, momentum=0.5, every=2, options=EXACT | settings.pop("options", {}), **settings)
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
    """As people write it who do not know ignore_index."""
    losses = F.cross_entropy(output.flatten(0, -2), y.flatten().clamp(min=0), reduction="none")
    return (losses * (y.flatten() >= 0)).sum() / (y >= 0).sum()


def padded_rows(steps=5):
    """Sequences of (batch, time, features) with padding full of large numbers, and the same rows without it."""
    padded, rows = [], []
    for t in range(steps):
        generator = torch.Generator().manual_seed(t)
        x, y = torch.randn(6, 5, 4, generator=generator) + 1, torch.randint(3, (6, 5), generator=generator)
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
    # and it would have mattered
    blind = walk(models[2], [(x, y.clamp(min=0)) for x, y in padded], cross_entropy, method)
    assert float((ours - blind).norm() / ours.norm()) > 1e-2


class Reader(nn.Module):
    """Tokens, 0 for padding, which attention does not look at."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.head(self.layer(self.token(tokens), src_key_padding_mask=tokens == 0))


def test_a_transformer_does_not_notice_how_far_it_is_padded():
    def batches(width):
        for t in range(6):
            generator = torch.Generator().manual_seed(t)
            tokens, y = torch.randint(1, 9, (5, 4), generator=generator), torch.randint(5, (5, 4), generator=generator)
            real = torch.arange(4) < torch.randint(2, 5, (5, 1), generator=generator)
            tokens, y = torch.where(real, tokens, 0), torch.where(real, y, -100)
            yield F.pad(tokens, (0, width - 4)), F.pad(y, (0, width - 4), value=-100)

    assert_close(walk(Reader(), batches(4), cross_entropy), walk(Reader(), batches(9), cross_entropy), 1e-9)


def test_rows_that_are_attended_to_count_even_where_their_own_target_does_not():
    """A prompt: its targets are ignored, but errors of the answer come back to it."""
    model = Reader()
    tokens, y = torch.randint(1, 9, (5, 4)), torch.randint(5, (5, 4))
    y[:, :3] = -100
    walk(model, [], cross_entropy)
    optimizer = bprong.BPRONG(model, options=EXACT)
    cross_entropy(model(tokens), y).backward()
    optimizer.step()
    layers = optimizer.statistics.layers
    assert layers["layer.self_attn.k"].moments["forward"].weight == 20
    assert layers["layer.self_attn.q"].moments["forward"].weight == 5
    assert layers["head"].moments["forward"].weight == 5
    assert {layer.moments["backward"].weight for layer in layers.values()} == {5.0}


def test_a_loss_of_the_last_position_has_one_target_a_sequence():
    model = mlp(4, 6, 3)
    other = mlp(4, 6, 3)
    other.load_state_dict(model.state_dict())
    batches = [(torch.randn(7, 5, 4), torch.randint(3, (7,))) for _ in range(4)]
    ours = walk(model, batches, lambda output, y: F.cross_entropy(output[:, -1], y))
    theirs = walk(other, [(x[:, -1], y) for x, y in batches], F.cross_entropy)
    assert_close(ours, theirs, 1e-9)


def test_micro_batches_and_sub_samples_know_their_own_padding():
    padded, rows = padded_rows(1)
    (x, y), (flat, _) = padded[0], rows[0]
    model = mlp(4, 6, 3)
    optimizer = bprong.BPRONG(model, options=EXACT)
    for part in (slice(0, 2), slice(2, 6)):
        cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()
    assert_close(optimizer.statistics.layers["0"].c, flat.mean(0), 1e-12)
    sampled = bprong.BPRONG(model, options=EXACT | {"examples": 2})
    cross_entropy(model(x), y).backward()
    sampled.step()
    assert_close(sampled.statistics.layers["0"].c, x[::3][y[::3] >= 0].mean(0), 1e-12)


def test_every_target_ignored_is_as_if_none_were():
    """Nothing is learnt from such a batch, and nothing breaks."""
    model, x = mlp(4, 3), torch.randn(6, 4)
    optimizer = bprong.BPRONG(model, options=EXACT)
    F.cross_entropy(model(x), torch.randint(3, (6,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    (model(x) * 0).sum().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
