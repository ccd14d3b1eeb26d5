"""lr="auto" looks at a part of each batch: of what the part is, and batches that have none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from automatic import auto
from bprong.cut import Cut
from helpers import mlp, snapshot
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
