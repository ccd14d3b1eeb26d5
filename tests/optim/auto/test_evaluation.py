"""The quadratic model is evaluated on a part of each batch: which part, and batches that cannot be divided."""

import copy
import math
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automatic import auto
from bprong import WhiteningWarning
from bprong.capture.own_pass import Subset
from bprong.capture.tape import Batch
from bprong.likelihood.declared import declared_loss
from bprong.likelihood.loss import Targets
from bprong.optim.auto import evaluation
from bprong.optim.auto.evaluation import LossModel, evaluated_subsets
from bprong.optim.auto.rule import SETTINGS
from helpers import assert_unchanged, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path, batches, recorder_of


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
def test_a_subset_has_whole_examples_that_are_evenly_spread(count, whole, each):
    """It has `count` of them, in order; gaps differ by at most one, and the rows of an example stay together."""
    rows = Subset(count, whole).rows(torch.arange(whole * each)).view(count, each)
    assert torch.equal(rows, rows[:, :1] + torch.arange(each))
    chosen = rows[:, 0] // each
    assert torch.equal(rows[:, 0] % each, torch.zeros(count, dtype=torch.long))
    gaps = torch.cat([chosen, torch.tensor([whole])]).diff()
    assert gaps.min() >= 1
    assert gaps.max() - gaps.min() <= 1


def token_batch(count, length, ignored=0.0, flatten=False):
    """Sequences of tokens with three classes, of which the loss ignores a part."""
    loss = declared_loss(nn.CrossEntropyLoss())
    x, y = sequences(count, length)
    y[:, : int(ignored * length)] = -100
    f = mlp(5, 3)(x).detach()
    output, y = (f.flatten(0, 1), y.flatten()) if flatten else (f, y)
    return Batch(x, output, targets=Targets.observed(loss, y)), loss.likelihood


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    ("count", "length", "ignored", "expected"),
    [
        (16, 64, 0.0, 4),  # a quarter of them has 256 targets
        (8, 16, 0.0, 4),  # a quarter would have 32 targets, and 64 are enough
        (8, 16, 0.5, 8),  # of these, the loss counts half
        (4, 64, 0.0, 2),  # one would have enough, but BatchNorm needs two
        (1, 64, 0.0, 1),
        (100, 1, 0.0, 64),
    ],
)
def test_targets_are_counted_and_not_examples(count, length, ignored, expected, flatten):
    batch, likelihood = token_batch(count, length, ignored, flatten)
    assert evaluated_subsets([batch], likelihood) == [(batch, Subset(expected, count))]
    assert evaluated_subsets([batch], likelihood, everything=True) == [(batch, Subset(count, count))]


def test_targets_of_several_batches_are_counted_together():
    """Two of sixteen sequences each: a quarter of both is eight, all from the first."""
    first, likelihood = token_batch(16, 64)
    second, _ = token_batch(16, 64)
    assert evaluated_subsets([first, second], likelihood) == [(first, Subset(8, 16))]


@pytest.mark.parametrize("size", quick_cases([16, 100], 100))
@pytest.mark.parametrize("given", [False, True])
def test_a_flattened_output_gives_the_same_path(size, given):
    """(B, T, m) and (B·T, m) have the same targets; of a hundred examples a part is evaluated."""
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
def test_pixels_and_rows_that_belong_to_several_examples_train(made):
    model = made().double()
    x = torch.randn((80, 2, 4, 4) if made is Segments else (80, 5), dtype=torch.float64)
    with torch.no_grad():
        y = made().double()(x).argmax(-1)
    losses = [float(F.cross_entropy(model(x).detach(), y))]
    run(model, auto(model), [(x, y)] * 20)
    losses.append(float(F.cross_entropy(model(x).detach(), y)))
    assert losses[1] < losses[0] / 3


@pytest.mark.parametrize("flatten", [False, True])
def test_the_evaluated_part_of_a_sorted_batch_is_like_the_whole(flatten):
    """Of 16 sequences, each repeated four times in a row, the 16 that are evaluated are each of them once."""
    x, y = sequences(16, 4)
    ends = []
    for times in (1, 4):
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        model = nn.Sequential(*model, nn.Flatten(0, 1)) if flatten else model
        optimizer = auto(model, forward_damping=0.1, backward_damping=0.1, options=EXACT)
        data = [(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))] * 12
        ends.append(run(model, optimizer, data))
    assert_same_path(ends[1], ends[0], 1e-6)


# Batches that cannot be divided ---------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """With a state whose second dimension is the batch."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x, *state):
        return self.head(self.lstm(x, state)[0])


class Masked(nn.Module):
    """With a mask that happens to be as long as a batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x, mask):
        return self.head(self.layer(self.first(x), src_mask=mask))


class Tanh(torch.autograd.Function):
    """Without forward-mode AD."""

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
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)
        self.phi = phi

    def forward(self, x, edges):
        z = self.phi(self.first(x))
        return self.head(z + torch.zeros_like(z).index_add(0, edges[1], z[edges[0]]))


class Lengths(nn.Module):
    """With a list of numbers that decides how many rows the output has; on a subset it raises no error."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

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


def undivided(made, steps, resume=None):
    torch.manual_seed(2)
    model, x, rest = made()
    model = model.double()
    x = x.double()
    y = (x[..., :3] if made is not lengths else x[:, 0, :3]).argmax(-1)
    optimizer = auto(model)
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x, *rest).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("made", quick_cases([recurrent, masked, graph, lengths], masked, graph))
def test_a_batch_that_cannot_be_divided_is_evaluated_whole_with_one_warning(made, monkeypatch):
    """In float64, where an LSTM has forward-mode AD, there is no other warning."""
    with pytest.warns(WhiteningWarning) as warned:
        model, optimizer = undivided(made, 6)
    assert any("cannot be run on a subset of a batch" in str(one.message) for one in warned)
    assert len([one for one in warned if "not whitened" not in str(one.message)]) == 1
    assert optimizer._rule.loss_model.forward_mode
    monkeypatch.setattr(evaluation, "SETTINGS", replace(SETTINGS, evaluated_least=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhiteningWarning)  # that an LSTM is not whitened
        expected, _ = undivided(made, 6)
    assert_unchanged(snapshot(expected), snapshot(model))


def test_a_subset_that_fails_is_distinguished_from_missing_forward_mode_ad():
    """There is one warning of each, in any order, with its own reason."""
    with pytest.warns(WhiteningWarning) as warned:
        _, optimizer = undivided(lambda: (Graph(Tanh.apply), *graph()[1:]), 6)
    forward_mode, subset = sorted(str(warning.message) for warning in warned)
    assert "forward-mode AD is unavailable" in forward_mode
    assert "jvp" in forward_mode
    assert "cannot be run on a subset" in subset
    assert "out of bounds" in subset
    assert optimizer._rule.loss_model.everything


@pytest.mark.parametrize("t", [1, 2, 5])
def test_a_checkpoint_remembers_that_batches_cannot_be_divided(t):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, _ = undivided(graph, 8)
        begun, optimizer = undivided(graph, t)
        state = copy.deepcopy({"model": begun.state_dict(), "optimizer": optimizer.state_dict()})
        resumed, again = undivided(graph, 8 - t, resume=state)
    assert len(warned) == 2
    assert_unchanged(snapshot(model), snapshot(resumed))
    assert again._rule.loss_model.everything


def test_an_error_on_the_whole_batch_is_raised():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)
            self.refuses = False

        def forward(self, x):
            if self.refuses and not torch.is_grad_enabled():
                raise LookupError("not today")
            return self.layer(x)

    model = Moody().double()
    optimizer = auto(model)
    data = [sequences(70, 1)]
    run(model, optimizer, data)
    model.refuses = True
    with pytest.raises(LookupError, match="not today"):
        run(model, optimizer, data)
    assert not optimizer._rule.loss_model.everything


@pytest.mark.parametrize(("size", "parts"), [(63, 2), (9, 8), (65, 1), (1, 3)])
def test_batch_norm_is_never_evaluated_on_a_single_example(size, parts):
    norm = nn.BatchNorm1d(4) if size > 1 else nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = (t[:, 0] for t in sequences(size * parts, 1))
    optimizer = auto(model)
    for _ in range(5):
        optimizer.zero_grad()
        for xb, yb in zip(x.split(size), y.split(size), strict=True):
            F.cross_entropy(model(xb), yb).div(parts).backward()
        optimizer.step()
    assert not optimizer._rule.loss_model.everything


# The user's loss on a part of a batch ---------------------------------------------------------------------------------

LABELS = torch.arange(100) % 4
DISTRIBUTIONS = (torch.arange(400).view(100, 4) ** 2).sin().double().softmax(-1)
KINDS = {
    "hard": (F.cross_entropy, LABELS),
    "some ignored": (F.cross_entropy, LABELS.masked_fill(torch.arange(100) % 3 == 0, -100)),
    "weighted": (partial(F.cross_entropy, weight=torch.tensor([0.2, 1.0, 3.0, 0.7]).double()), LABELS),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.2), LABELS),
    "soft": (F.cross_entropy, DISTRIBUTIONS),
    "bits": (F.binary_cross_entropy_with_logits, F.one_hot(LABELS, 4).double()),
    "numbers": (F.mse_loss, DISTRIBUTIONS),
}


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_slopes_on_a_part_of_a_batch_are_those_of_its_examples(kind, observed):
    """Targets come from the call of the loss, or are observed. The loss is in nats per target."""
    loss, y = KINDS[kind]
    nats = {"bits": 4.0, "numbers": 2.0}.get(kind, 1.0)  # torch divides by the number of elements, and has no ½
    model = mlp(5, 6, 4)
    x = torch.randn(100, 5, dtype=torch.float64)
    declared = declared_loss(loss)
    kept = recorder_of(model, declared)
    f = model(x)
    loss(f, y).backward()
    (batch,) = kept.seen()
    if observed:
        batch = Batch(x, f.detach(), targets=Targets.observed(declared, y))
    direction = {p: torch.randn_like(p) for p in model.parameters()}
    found = LossModel(model, declared.likelihood).evaluate([direction], [batch], seed=0)
    ignored = int((y == -100).sum())
    count = math.ceil(SETTINGS.evaluated_least * 100 / (100 - ignored))
    assert found.part == count / 100
    rows = Subset(count, 100).rows
    assert found.targets == int((rows(y) != -100).sum()) if ignored else found.targets == SETTINGS.evaluated_least
    expected = nats * loss(model(rows(x)), rows(y))
    gradients = torch.autograd.grad(expected, list(direction))
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-9)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction.values(), strict=True))
    assert found.slopes == pytest.approx(slope, rel=1e-9)
