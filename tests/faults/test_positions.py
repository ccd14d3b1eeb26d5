"""Positions of sequences: which of them are padding is told by masks, not by errors that happen to be zero.

No error comes back to a position that loses a maximum, or whose units are all dead, but its rows are as much a part of
the layer's inputs as those of others.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, snapshot
from training import EXACT

CLASSES = 3
LENGTH = 5
Y = torch.arange(12) % CLASSES


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Pooled(nn.Module):
    """A layer on every position, then a maximum or a mean over positions; as_rows: the layer is given (B·T, F)."""

    def __init__(self, pooling: str, as_rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 2)
        self.head = nn.Linear(2, CLASSES)
        self.pooling = pooling
        self.as_rows = as_rows

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.as_rows else self.body(x)
        if self.pooling == "mean":
            return self.head(h.relu().mean(1))
        if mask is not None:
            h = h.masked_fill(mask.unsqueeze(-1) == 0, -torch.inf)
        return self.head(h.amax(1))


def trained(model: nn.Module, *batch: Tensor, steps: int = 3) -> bprong.BPRONG:
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=1, options=EXACT)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(*batch), Y).backward()
        optimizer.step()
    return optimizer


def assert_same_path(model: nn.Module, other: nn.Module) -> None:
    expected = snapshot(other)
    for name, value in snapshot(model).items():
        assert_close(value, expected[name], 1e-9, name)


def counted_rows(optimizer: bprong.BPRONG, layer: str) -> float:
    return optimizer._whitening.layers[layer].forward.moments.weight


@pytest.mark.parametrize("pooling", ["maximum", "mean"])
def test_positions_without_errors_count_as_rows_do(pooling: str) -> None:
    """Under a maximum over positions, and behind dead units, (B, T, F) is measured as (B·T, F) is."""
    x = torch.randn(12, LENGTH, 4)
    sequences = Pooled(pooling)
    rows = Pooled(pooling, as_rows=True)
    trained(sequences, x)
    trained(rows, x)
    assert_same_path(sequences, rows)


def real_positions() -> Tensor:
    return torch.arange(LENGTH) < (torch.arange(12) % (LENGTH - 1) + 2).unsqueeze(1)


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float64])
def test_under_a_maximum_the_mask_of_the_model_tells_padding(kind: torch.dtype) -> None:
    """Real positions that lose the maximum count, and padding does not, however large its numbers are."""
    real = real_positions()
    x = torch.randn(12, LENGTH, 4)
    model = Pooled("maximum")
    optimizer = trained(model, x.masked_fill(~real.unsqueeze(-1), 50.0), real.to(kind), steps=1)
    assert counted_rows(optimizer, "body") == real.sum()
    assert_close(optimizer._whitening.layers["body"].c, x[real].mean(0), 1e-12)


def test_a_mask_that_the_model_does_not_use_changes_nothing() -> None:
    x = torch.randn(12, LENGTH, 4)
    model = Pooled("mean")
    optimizer = trained(model, x, real_positions(), steps=1)
    assert counted_rows(optimizer, "body") == 12 * LENGTH


class Tokens(nn.Module):
    """A classifier of the mean over real tokens, which it finds itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        real = (tokens != 0).unsqueeze(-1)
        return self.head((self.body(self.embed(tokens)).tanh() * real).sum(1) / real.sum(1))


def padded_tokens() -> Tensor:
    return torch.randint(1, 7, (12, LENGTH)).masked_fill(~real_positions(), 0)


def test_the_padding_of_an_embedding_is_that_of_the_layers_behind_it() -> None:
    optimizer = trained(Tokens(), padded_tokens(), steps=1)
    assert counted_rows(optimizer, "embed") == counted_rows(optimizer, "body") == real_positions().sum()


class Attending(nn.Module):
    """A transformer of the first token, whose attention is told which tokens are padding."""

    def __init__(self, written: str, batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.written = written
        self.batch_first = batch_first
        self.embed = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        h = self.body(self.embed(tokens if self.batch_first else tokens.T)).tanh()
        if self.written == "by hand":
            z = F.scaled_dot_product_attention(h, h, h, attn_mask=~padding.unsqueeze(1))
        else:
            z, _ = self.attention(h, h, h, key_padding_mask=padding, need_weights=self.written == "with weights")
        return self.head(z[:, 0] if self.batch_first else z[0])


@pytest.mark.parametrize("written", ["with weights", "without weights", "by hand"])
def test_a_mask_that_attention_is_given_tells_padding(written: str) -> None:
    optimizer = trained(Attending(written), padded_tokens(), steps=1)
    assert counted_rows(optimizer, "body") == real_positions().sum()


@pytest.mark.parametrize("written", ["with weights", "without weights"])
def test_positions_may_be_time_first(written: str) -> None:
    model = Attending(written, batch_first=False)
    first = copy.deepcopy(model)
    first.batch_first = first.attention.batch_first = True
    tokens = padded_tokens()
    optimizer = trained(model, tokens)
    trained(first, tokens)
    assert counted_rows(optimizer, "body") == real_positions().sum()
    assert_same_path(model, first)
