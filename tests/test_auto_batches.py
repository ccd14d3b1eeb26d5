"""lr="auto" looks at a part of each batch: of what the part is, and batches that have none."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import auto
from bprong import evaluation
from bprong.cut import Cut
from bprong.schedule import WhiteningWarning
from helpers import assert_unchanged, mlp, snapshot
from training import EXACT, assert_same_path, batches


def run(model, optimizer, data, loss=F.cross_entropy):
    for x, y in data:
        optimizer.zero_grad()
        loss(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return snapshot(model)


def sequences(n, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, length, 5, generator=generator, dtype=torch.float64)
    return x, (x[..., :3] + torch.randn(n, length, 3, generator=generator, dtype=torch.float64)).argmax(-1)


# Examples and rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "whole"), [(1, 1), (3, 10), (64, 65), (7, 7), (64, 1000)])
@pytest.mark.parametrize("each", [1, 3])
def test_a_cut_is_of_whole_examples_evenly_spread(count, whole, each):
    """As many as asked for, in order, no gap more than one longer than another; their rows together."""
    rows = Cut(count, whole).rows(torch.arange(whole * each)).view(count, each)
    assert torch.equal(rows, rows[:, :1] + torch.arange(each))
    chosen = rows[:, 0] // each
    assert torch.equal(rows[:, 0] % each, torch.zeros(count, dtype=torch.long))
    gaps = torch.cat([chosen, torch.tensor([whole])]).diff()
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("size", [16, 100])
@pytest.mark.parametrize("given", [False, True])
def test_an_output_that_is_flattened_takes_the_same_path(size, given):
    """(B, T, m) and (B·T, m) are the same targets; of a hundred examples a part is looked at."""
    data = list(batches(*sequences(200, 3), size, 12))
    torch.manual_seed(1)
    model = mlp(5, 4, 3)
    flat = nn.Sequential(*copy.deepcopy(model), nn.Flatten(0, 1))
    expected = run(model, auto(model, options=EXACT), data)
    optimizer = auto(flat, options=EXACT)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(flat(x), y.flatten()).backward()
        if given:
            optimizer.observe(x, y.flatten())
        optimizer.step()
    assert_same_path(snapshot(flat), expected, 1e-8)


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x).permute(0, 2, 3, 1).flatten(0, 2)


class Pairs(nn.Module):
    """Three rows for every two examples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 9)

    def forward(self, x):
        return self.layer(x.view(-1, 10)).view(-1, 3)


@pytest.mark.parametrize("made", [Segments, Pairs])
def test_pixels_and_rows_that_are_nobodys_train(made):
    model = made().double()
    x = torch.randn((80, 2, 4, 4) if made is Segments else (80, 5), dtype=torch.float64)
    with torch.no_grad():
        y = made().double()(x).argmax(-1)
    losses = [float(F.cross_entropy(model(x).detach(), y))]
    run(model, auto(model), [(x, y)] * 20)
    losses.append(float(F.cross_entropy(model(x).detach(), y)))
    assert losses[1] < losses[0] / 3


@pytest.mark.parametrize("flatten", [False, True])
def test_the_part_of_a_sorted_batch_is_like_the_whole(flatten):
    """64 examples, each four times in a row: the part of 64 that is looked at is each of them once."""
    x, y = sequences(64, 3)
    ends = []
    for times in (1, 4):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        model = nn.Sequential(*model, nn.Flatten(0, 1)) if flatten else model
        optimizer = auto(model, forward_damping=0.1, backward_damping=0.1, options=EXACT)
        data = [(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))] * 12
        ends.append(run(model, optimizer, data))
    assert_same_path(ends[1], ends[0], 1e-6)


@pytest.mark.parametrize("flatten", [False, True])
def test_statistics_of_some_examples_are_of_such_a_part(flatten):
    x, y = sequences(8, 3)
    ends = []
    for times, examples in ((1, None), (4, 8)):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        model = nn.Sequential(*model, nn.Flatten(0, 1)) if flatten else model
        optimizer = bprong.BPRONG(model, lr=0.1, options=EXACT | {"examples": examples})
        y[0] = -100
        ends.append(run(model, optimizer, [(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))] * 3))
    assert_same_path(ends[1], ends[0], 1e-8)


# Batches that cannot be cut -------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """With a state whose second dimension is the batch's."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, *state):
        return self.head(self.lstm(x, state)[0])


class Masked(nn.Module):
    """With a mask as long as a batch by chance."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x, mask):
        return self.head(self.layer(self.first(x), src_mask=mask))


class Tanh(torch.autograd.Function):
    """Without forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.saved_tensors[0] ** 2)


class Graph(nn.Module):
    def __init__(self, phi=torch.tanh):
        super().__init__()
        self.first, self.head, self.phi = nn.Linear(5, 6), nn.Linear(6, 3), phi

    def forward(self, x, edges):
        z = self.phi(self.first(x))
        return self.head(z + torch.zeros_like(z).index_add(0, edges[1], z[edges[0]]))


class Lengths(nn.Module):
    """A list of Python's own; raises nothing, but gives the rows of those that it names."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x, lengths):
        counts = x.new_zeros(len(lengths), 1)
        counts[: len(x), 0] = x.new_tensor(lengths)[: len(x)]
        z = x.new_zeros(len(lengths), 5)
        z[: len(x)] = x.sum(1)
        return self.head((self.first(z) / counts.clamp(min=1)).tanh())


def recurrent():
    return Recurrent(), torch.randn(70, 4, 5), (torch.zeros(1, 70, 4, dtype=torch.float64),) * 2


def masked():
    return Masked(), torch.randn(70, 70, 5), (torch.zeros(70, 70, dtype=torch.float64),)


def graph():
    return Graph(), torch.randn(70, 5), (torch.arange(70).repeat(2, 1).roll(1, 1),)


def lengths():
    return Lengths(), torch.randn(70, 4, 5), ([4] * 70,)


def uncut(made, steps, optimizer_of=auto, resume=None):
    torch.manual_seed(2)
    model, x, rest = made()
    model, x = model.double(), x.double()
    y = (x[..., :3] if made is not lengths else x[:, 0, :3]).argmax(-1)
    optimizer = optimizer_of(model)
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x, *rest).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("made", [recurrent, masked, graph, lengths])
def test_a_batch_that_cannot_be_cut_is_looked_at_whole_and_said_so_once(made, monkeypatch):
    """As if all of it were always enough. Float64, where an LSTM has forward mode: nothing else is said."""
    with pytest.warns(WhiteningWarning, match="takes no part of a batch") as said:
        model, optimizer = uncut(made, 6)
    assert len(said) == 1
    assert optimizer._rule.auto.forward_mode
    monkeypatch.setattr(evaluation, "ENOUGH", 1000)
    expected, _ = uncut(made, 6)
    assert_unchanged(snapshot(expected), snapshot(model))


def test_without_forward_mode_a_part_that_fails_is_told_from_that():
    """Both are said, in this order or that; and neither for the other."""
    with pytest.warns(WhiteningWarning) as said:
        _, optimizer = uncut(lambda: (Graph(Tanh.apply), *graph()[1:]), 6)
    words = {str(w.message).split(": ")[1].split(",")[0]: str(w.message) for w in said}
    assert len(said) == len(words) == 2
    assert "jvp" in words["forward mode is not to be had"]
    assert "out of bounds" in words["the model takes no part of a batch"]
    assert optimizer._rule.whole


@pytest.mark.parametrize("t", [1, 2, 5])
def test_that_it_cannot_be_cut_is_remembered(t):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, _ = uncut(graph, 8)
        begun, optimizer = uncut(graph, t)
        state = copy.deepcopy({"model": begun.state_dict(), "optimizer": optimizer.state_dict()})
        resumed, again = uncut(graph, 8 - t, resume=state)
    assert len(said) == 2
    assert_unchanged(snapshot(model), snapshot(resumed))
    assert again._rule.whole


def test_what_fails_on_all_of_a_batch_is_raised():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.refuses = nn.Linear(5, 3), False

        def forward(self, x):
            if self.refuses and not torch.is_grad_enabled():
                raise LookupError("not today")
            return self.layer(x)

    model = Moody().double()
    optimizer, data = auto(model), [sequences(70, 1)]
    run(model, optimizer, data)
    model.refuses = True
    with pytest.raises(LookupError, match="not today"):
        run(model, optimizer, data)
    assert not optimizer._rule.whole


@pytest.mark.parametrize(("size", "parts"), [(63, 2), (9, 8), (65, 1), (1, 3)])
def test_no_single_example_is_left_for_a_norm_of_the_batch(size, parts):
    norm = nn.BatchNorm1d(4) if size > 1 else nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = (t[:, 0] for t in sequences(size * parts, 1))
    optimizer = auto(model)
    for _ in range(5):
        optimizer.zero_grad()
        for xb, yb in zip(x.split(size), y.split(size), strict=True):
            F.cross_entropy(model(xb), yb).div(parts).backward()
        optimizer.step()
    assert not optimizer._rule.whole
