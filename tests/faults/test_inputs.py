"""What a model may be given: sequences with time first, sparse and empty batches, dicts, other precision, own noise."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.errors import WhiteningWarning
from helpers import assert_close, assert_unchanged, classification, mlp, quick_cases, snapshot
from paths import Rate, path, seeded
from training import EXACT

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
X, Y = classification(60, 5, 3)


def classified(
    model: nn.Module, lr: Rate, backward: Callable[[nn.Module], None], steps: int = 3, **settings: Any
) -> dict[str, Tensor]:
    """The path with cross-entropy."""
    return path(model, "cross_entropy", lr, backward, steps=steps, **settings)


# 7. Time first --------------------------------------------------------------------------------------------------------

LONG = 80  # longer than the number of examples from which on lr="auto" evaluates a part of a batch


class Previous(nn.Module):
    """Predicts at each position the class of the position before, from one-hot inputs (batch, time, classes) or, time
    first, (time, batch, classes): right everywhere from the start, with probabilities near one.

    returned: "as given", or flattened to (rows, classes) with "batch first" or "time first"
    """

    def __init__(self, time: int, returned: str = "as given") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.time = time
        self.returned = returned
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8) + 0.01 * torch.randn(8, 8))
            self.first.bias.zero_()
            self.last.weight.copy_(12 * torch.eye(4, 8).roll(4, dims=1))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([x.narrow(self.time, 0, 1), x.narrow(self.time, 0, x.shape[self.time] - 1)], dim=self.time)
        a = self.last(self.first(torch.cat([x, before], dim=-1)).relu())
        if self.returned == "as given":
            return a
        in_order = a if (self.returned == "batch first") == (self.time == 1) else a.transpose(0, 1)
        return in_order.flatten(0, 1)


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """One-hot inputs (batch, time, 4) and the class of the position before each (batch, time)."""
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(4, (batch, length), generator=generator)
    before = torch.cat([classes[:, :1], classes[:, :-1]], dim=1)
    return F.one_hot(classes, 4).double(), before


def first_step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The loss before the first step of lr="auto", and the one that the rule believes in."""
    optimizer = bprong.BPRONG(model, "cross_entropy", lr="auto", options={"fisher": "empirical"})
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhiteningWarning)  # that all of the batch is evaluated
        optimizer.step()
    return float(loss.detach()), optimizer._rule.rule.loss


@pytest.mark.parametrize(
    ("batch", "length", "time", "returned"),
    [
        (3, LONG, 1, "as given"), (LONG, 3, 1, "as given"), (LONG, 3, 1, "batch first"),
        (3, LONG, 0, "as given"), (1, LONG, 0, "as given"), (3, LONG, 0, "time first"), (3, LONG, 0, "batch first"),
        (LONG, 3, 1, "time first"), (LONG, LONG, 0, "as given"), (LONG, LONG, 1, "time first"),
    ],
)  # fmt: skip
def test_the_loss_is_not_evaluated_on_a_part_cut_along_time(batch: int, length: int, time: int, returned: str) -> None:
    """On sequences with gaps the model, which is right everywhere, would be wrong."""
    x, y = tokens(batch, length)
    given = x if time == 1 else x.transpose(0, 1)
    targets = y.T if (returned == "time first" or (returned == "as given" and time == 0)) else y
    actual, believed = first_step(seeded(lambda: Previous(time, returned)), given, targets.contiguous())
    assert actual < 0.01
    assert believed == pytest.approx(actual, rel=0.5)


def test_time_first_takes_the_path_of_batch_first() -> None:
    """One long sequence, of which nothing can be left out."""
    x, y = tokens(1, LONG)
    y = (y + 1) % 4  # so that there is something to learn

    def run(time: int) -> dict[str, Tensor]:
        given = x if time == 1 else x.transpose(0, 1)
        targets = y if time == 1 else y.T

        def backward(model: nn.Module) -> None:
            F.cross_entropy(model(given).flatten(0, 1), targets.flatten()).backward()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhiteningWarning)
            return classified(seeded(lambda: Previous(time)), "auto", backward, options={"fisher": "empirical"})

    expected = run(time=1)
    ours = run(time=0)
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-8, name)


# 11. Layers that are used at random -----------------------------------------------------------------------------------


class LayerDrop(nn.Module):
    """A residual layer that is left out at random; decisions: replayed instead of drawn."""

    def __init__(self, decisions: list[bool] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.decisions = decisions
        self.drawn: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).tanh()
        used = bool(torch.rand(()) < 0.5) if self.decisions is None else self.decisions[len(self.drawn)]
        self.drawn.append(used)
        return self.last(z + self.middle(z) if used else z)


def plain(model: nn.Module) -> None:
    F.cross_entropy(model(X), Y).backward()


@pytest.mark.parametrize("seed", range(6))
def test_statistics_are_of_the_layers_that_the_users_own_pass_has_used(seed: int) -> None:
    """The same path as with the same decisions made in advance."""
    steps = 4
    model = seeded(LayerDrop)
    torch.manual_seed(seed)
    ours = classified(model, 0.1, plain, steps)
    assert len(model.drawn) == steps
    assert_unchanged(classified(seeded(lambda: LayerDrop(model.drawn)), 0.1, plain, steps), ours)


class NoisyRouting(nn.Module):
    """Each example goes to the expert with the largest noisy score; experts without examples are not called."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.router = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(4))
        self.last = nn.Linear(4, 3)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        gate, chosen = (scores + self.noise * torch.randn_like(scores)).softmax(-1).max(-1)
        z = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                z = z.index_add(0, rows, gate[rows, None] * expert(x[rows]))
        return self.last(z.tanh())


@RATES
@pytest.mark.parametrize("seed", quick_cases(range(6), 0, 1))
@pytest.mark.parametrize("make", [LayerDrop, lambda: NoisyRouting(5.0)], ids=["LayerDrop", "noisy routing"])
def test_layers_that_are_used_at_random_train(lr: Rate, seed: int, make: Callable[[], nn.Module]) -> None:
    """A few examples, so that some experts have none in one pass and some in another."""
    model = seeded(make)
    torch.manual_seed(seed)
    after = classified(model, lr, lambda model: F.cross_entropy(model(X[:4]), Y[:4]).backward(), steps=6)
    assert all(value.isfinite().all() for value in after.values())


# 13. Layers of different precision ------------------------------------------------------------------------------------


class Tuned(nn.Module):
    """A frozen backbone in bfloat16 and a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16().requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.z: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        z = self.backbone(x).tanh()
        self.z.append(z.detach())
        return self.head(z)


@RATES
@pytest.mark.parametrize("fed", [torch.float32, torch.bfloat16])
def test_a_frozen_backbone_in_bf16_with_a_head_in_float32_trains_under_autocast(lr: Rate, fed: torch.dtype) -> None:
    """The head's inputs are measured as they were in the user's own pass: rounded to bf16."""
    torch.manual_seed(1)
    model = Tuned()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options={"average": 0.0})
    losses = []
    for t in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(X.to(fed)), Y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if t == 0:
            side = optimizer._whitening.layers["head"].forward
            z = model.z[0].double()
            assert_close(side.moments.mean, z.mean(0), 1e-6)
            assert_close(side.moments.second, (z - z.mean(0)).T @ (z - z.mean(0)) / 60, 1e-5)
    assert losses[-1] < losses[0]


@RATES
def test_a_backbone_in_bf16_and_a_head_in_float32_train_without_autocast(lr: Rate) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8).bfloat16().requires_grad_(False), Widened(), nn.Linear(8, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1)
    before = snapshot(model)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(X.bfloat16()), Y).backward()
        optimizer.step()
    assert_unchanged({"0.weight": before["0.weight"]}, {"0.weight": model[0].weight})
    assert not torch.equal(before["2.weight"], model[2].weight)
    assert model[2].weight.isfinite().all()


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().tanh()


# 15. Sparse, empty and changed inputs ---------------------------------------------------------------------------------

NODES = 70  # more than the number of examples from which on lr="auto" evaluates a part of a batch


class Graph(nn.Module):
    """A graph network: features are averaged over neighbours by a product with the adjacency matrix."""

    def __init__(self, adjacency_first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)
        self.adjacency_first = adjacency_first

    def forward(self, *given: Tensor) -> Tensor:
        adjacency, x = given if self.adjacency_first else given[::-1]
        return adjacency @ self.last((adjacency @ self.first(x)).tanh())


def adjacency_matrix(layout: str) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    edges = (torch.rand(NODES, NODES, generator=generator) < 0.1).double() + torch.eye(NODES, dtype=torch.float64)
    dense = edges / edges.sum(dim=1, keepdim=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse CSR is in beta
        return {"dense": dense, "COO": dense.to_sparse(), "CSR": dense.to_sparse_csr()}[layout]


@RATES
@pytest.mark.parametrize("layout", ["COO", "CSR"])
@pytest.mark.parametrize("first", [False, True])
def test_a_sparse_argument_is_as_a_dense_one(lr: Rate, layout: str, first: bool) -> None:
    x, y = classification(NODES, 5, 3)

    def run(layout: str) -> dict[str, Tensor]:
        adjacency = adjacency_matrix(layout)
        given = (adjacency, x) if first else (x, adjacency)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhiteningWarning)  # that a graph cannot be divided
            return classified(
                seeded(lambda: Graph(first)), lr, lambda model: F.cross_entropy(model(*given), y).backward(),
                options={"fisher": "empirical"},
            )  # fmt: skip

    expected = run("dense")
    ours = run(layout)
    for name, value in expected.items():  # torch has no forward-mode AD of some products, only finite differences
        assert_close(ours[name], value, 1e-5 if lr == "auto" else 1e-9, name)


class Words(nn.Module):
    """Takes sparse counts of words itself as the input of its first product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 6) / 3)
        self.last = mlp(6, 4, 3)

    def forward(self, counts: Tensor) -> Tensor:
        return self.last((counts @ self.table).tanh())


@RATES
@pytest.mark.parametrize("layout", ["COO", "CSR"])
def test_a_sparse_batch_is_as_a_dense_one(lr: Rate, layout: str) -> None:
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(-3, 3, (60, 12), generator=generator).clamp(min=0).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        sparse = counts.to_sparse() if layout == "COO" else counts.to_sparse_csr()

    def run(x: Tensor) -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhiteningWarning)  # that forward-mode AD is unavailable
            return classified(seeded(Words), lr, lambda model: F.cross_entropy(model(x), Y).backward())

    expected = run(counts)
    ours = run(sparse)
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-5 if lr == "auto" else 1e-9, name)


def summed(model: nn.Module, n: int) -> None:
    """The sum of the losses of n examples, which may be none."""
    (F.cross_entropy(model(X[:n]), Y[:n], reduction="sum") / 60).backward()


def test_a_step_on_an_empty_batch_changes_nothing_at_a_fixed_rate() -> None:
    """There is no gradient, nothing to measure, and no error."""
    model = seeded(lambda: mlp(5, 4, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, every=1, options=EXACT)
    summed(model, 60)
    optimizer.step()
    before = snapshot(model)
    moments = optimizer._whitening.layers["0"].forward.moments.scatter.clone()
    optimizer.zero_grad()
    summed(model, 0)
    optimizer.step()
    assert_unchanged(before, snapshot(model))
    assert torch.equal(moments, optimizer._whitening.layers["0"].forward.moments.scatter)
    optimizer.zero_grad()
    summed(model, 60)
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)


@pytest.mark.parametrize("t", [0, 1, 5, 12])
def test_an_empty_batch_in_the_middle_of_a_run_is_no_error_under_auto(t: int) -> None:
    model = seeded(lambda: mlp(5, 4, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr="auto")
    losses = []
    for step in range(16):
        optimizer.zero_grad()
        summed(model, 0 if step == t else 60)
        optimizer.step()
        losses.append(float(F.cross_entropy(model(X), Y).detach()))
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


@RATES
@pytest.mark.parametrize("position", ["first", "last"])
def test_an_empty_batch_beside_a_full_one_does_not_count(lr: Rate, position: str) -> None:
    def with_empty(model: nn.Module) -> None:
        for n in (0, 60) if position == "first" else (60, 0):
            summed(model, n)

    expected = classified(seeded(lambda: mlp(5, 4, 3)), lr, lambda model: summed(model, 60))
    assert_unchanged(expected, classified(seeded(lambda: mlp(5, 4, 3)), lr, with_empty))


class Consuming(nn.Module):
    """Takes what it needs out of the containers that it is given; takes: or leaves them alone."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.body = mlp(5, 4, 3)
        self.takes = takes

    def forward(self, batch: dict[str, Any], scales: list[float] | None = None) -> Tensor:
        inputs = batch["inputs"]
        if not self.takes:
            return self.body(inputs["x"] * batch["factor"] * (scales or [1.0])[0])
        x = inputs.pop("x") * batch.pop("factor") * (scales.pop() if scales else 1.0)
        batch["inputs"] = None
        batch.clear()
        return self.body(x)


@RATES
@pytest.mark.parametrize("way", ["positional", "keyword", "with a list"])
def test_a_model_may_take_things_out_of_the_containers_that_it_is_given(lr: Rate, way: str) -> None:
    def backward(model: nn.Module) -> None:
        batch = {"inputs": {"x": X}, "factor": 2.0}
        scales = [0.5] if way == "with a list" else None
        output = model(batch=batch, scales=scales) if way == "keyword" else model(batch, scales)
        F.cross_entropy(output, Y).backward()

    expected = classified(seeded(lambda: Consuming(False)), lr, backward)
    assert_unchanged(expected, classified(seeded(lambda: Consuming(True)), lr, backward))


class Iterating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(5, 4, 3)

    def forward(self, parts: Any) -> Tensor:
        return torch.cat([self.body(part) for part in parts])


def test_at_a_fixed_rate_a_model_may_be_given_an_iterator() -> None:
    """It is used up by the user's own pass, so that no other pass could be made."""
    expected = classified(seeded(Iterating), 0.1, lambda model: F.cross_entropy(model(X.chunk(3)), Y).backward())
    ours = classified(seeded(Iterating), 0.1, lambda model: F.cross_entropy(model(iter(X.chunk(3))), Y).backward())
    assert_unchanged(expected, ours)


# A common level -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 40])
@pytest.mark.parametrize("rows", [100, 1000])
def test_a_level_that_all_inputs_share_does_not_hide_their_differences(width: int, rows: int) -> None:
    """The level varies 1,000 times as much as the differences. A step in float32 is that of float64."""
    generator = torch.Generator().manual_seed(1)
    level = 1000 * torch.randn(rows, 1, generator=generator)
    x = level + torch.randn(rows, width, generator=generator)
    y = (x[:, 0] > x[:, 1]).long()
    model = seeded(lambda: mlp(width, 3, dtype=torch.float32))
    steps = []
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

        def backward(model: nn.Module, dtype: torch.dtype = dtype) -> None:
            F.cross_entropy(model(x.to(dtype)), y).backward()

        steps.append(classified(model, 0.1, backward, steps=1, max_step=None, options=EXACT)["0.weight"])
    assert_close(*steps, 0.02)
