"""Models of transformers: what they return, the loss inside them, mixed precision, compilation and padding.

Each path is compared with that of the same model when it returns its logits alone and the loss is computed outside.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

import bprong
from helpers import assert_close, snapshot
from tiny import (
    CLASSES,
    LENGTH,
    Reads,
    classifier,
    inside,
    language_batches,
    llama,
    mamba,
    optimizer_of,
    outside,
    question_answering,
    tokens,
    train,
    updates,
)
from training import EXACT, assert_same_path, default_backend

AUTO = {"lr": "auto", "options": {"fisher": "exact"}}


def start_and_end(output: Any) -> Tensor:
    """Both logits of a question-answering head as (batch, 2, positions): two targets for each example."""
    return torch.stack((output.start_logits, output.end_logits), 1)


def spans(batch: int = 8) -> dict[str, Tensor]:
    """Questions with the first and the last position of their answers."""
    random = torch.Generator().manual_seed(3)
    ends = torch.randint(LENGTH, (2, batch), generator=random)
    return {"input_ids": tokens(batch), "start_positions": ends[0], "end_positions": ends[1]}


# What a model returns, and how it is called ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, AUTO], ids=["fixed", "auto"])
def test_loss_and_logits_as_a_model_returns_them(settings: dict[str, Any]) -> None:
    """A model that returns its loss with its logits is trained as one that returns logits alone; −100 is no target."""
    model = llama().double()
    plain = Reads(copy.deepcopy(model))
    train(model, optimizer_of(model, **settings), language_batches(5), inside)
    train(plain, optimizer_of(plain, **settings), language_batches(5), outside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-6)


def test_a_tuple_with_the_loss_first() -> None:
    """With return_dict=False the loss comes first and the logits second, which `output` says."""
    model = llama().double()
    plain = Reads(copy.deepcopy(model))
    optimizer = optimizer_of(model, options=EXACT | {"output": 1})
    train(model, optimizer, language_batches(5), lambda model, batch: model(**batch, return_dict=False)[0])
    train(plain, optimizer_of(plain), language_batches(5), outside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-6)


class TakesADict(nn.Module):
    """A model that is given its whole batch as one dict, from which it removes what it has used."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch.pop("input_ids"), attention_mask=batch.get("attention_mask")).logits


@pytest.mark.parametrize("settings", [{}, AUTO], ids=["fixed", "auto"])
@pytest.mark.parametrize("how", ["keywords", "dict"])
def test_keyword_calls_and_dict_batches(how: str, settings: dict[str, Any]) -> None:
    """Arguments may come by keyword only, or as one dict from which `forward` removes entries."""
    model = classifier().double()
    plain = copy.deepcopy(model)
    y = torch.arange(8) % CLASSES
    other = TakesADict(model) if how == "dict" else model

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if isinstance(model, TakesADict):
            return F.cross_entropy(model({"input_ids": x}), y)
        return F.cross_entropy(model(x).logits if model is plain else model(input_ids=x, labels=None).logits, y)

    data = [tokens(seed=step) for step in range(5)]
    train(other, optimizer_of(other, **settings), data, loss_of)
    train(plain, optimizer_of(plain, **settings), data, loss_of)
    assert_same_path(snapshot(model), snapshot(plain), 1e-9)


# Several outputs ------------------------------------------------------------------------------------------------------


def test_question_answering() -> None:
    """Two heads are two targets for each example: a wrapper returns their logits together."""
    model = Reads(question_answering().double(), start_and_end)

    def loss_of_both(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = torch.stack((batch["start_positions"], batch["end_positions"]), 1)
        return F.cross_entropy(model(input_ids=batch["input_ids"]).flatten(0, 1), y.flatten())

    losses = train(model, optimizer_of(model, lr="auto", options={}), [spans()] * 15, loss_of_both)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("output", ["end_logits", 1], ids=["key", "index"])
def test_the_output_that_the_loss_is_of_can_be_named(output: Any) -> None:
    """`output` is a key, or an index among what the model returns."""
    model = question_answering().double()
    plain = Reads(copy.deepcopy(model), lambda output: output.end_logits)

    def loss_of_the_end(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(input_ids=batch["input_ids"])
        return F.cross_entropy(found if model is plain else found.end_logits, batch["end_positions"])

    train(model, optimizer_of(model, options=EXACT | {"output": output}), [spans()] * 5, loss_of_the_end)
    train(plain, optimizer_of(plain), [spans()] * 5, loss_of_the_end)
    assert_same_path(snapshot(model), snapshot(plain), 1e-9)


def test_two_losses_inside_a_model_are_refused_with_what_to_do() -> None:
    """Two logits, neither named "logits", each with a loss inside of the model."""
    model = question_answering()
    with pytest.raises(TypeError, match=r"losses of 2 tensors of one size.*torch\.stack"):
        train(model, optimizer_of(model), [spans()], inside)


def test_an_output_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    """A key that the model does not return is named in the error together with the keys that it returns."""
    model = question_answering()
    optimizer = optimizer_of(model, options=EXACT | {"output": "stop_logits"})
    with pytest.raises((KeyError, ValueError, TypeError), match="(?s)stop_logits.*end_logits"):
        train(model, optimizer, [spans()], inside)


@pytest.mark.parametrize("settings", [{}, {"lr": "auto", "options": {}}], ids=["fixed", "auto"])
def test_mamba(settings: dict[str, Any]) -> None:
    """A weight used through a view of it is whitened; one multiplied by hand is named in a warning; the loss falls."""
    model = mamba()
    optimizer = optimizer_of(model, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", bprong.WhiteningWarning)
        losses = train(model, optimizer, language_batches(1) * 15, inside)
    said = " ".join(str(w.message) for w in caught if issubclass(w.category, bprong.WhiteningWarning))
    fallback = optimizer.report().fallback
    assert "backbone.layers.0.mixer.conv1d.weight" not in fallback
    assert "backbone.layers.0.mixer.dt_proj.weight" not in fallback or "dt_proj" in said
    assert losses[-1] < losses[0] - 0.1


# Mixed precision and compilation --------------------------------------------------------------------------------------


def first_update(how: str) -> Tensor:
    """How a Llama moves at its first step with its loss inside ("accelerate"), or outside ("autocast")."""
    model = llama()
    before = snapshot(model)
    (batch,) = language_batches(1)
    if how == "autocast":
        plain = Reads(model)
        optimizer = optimizer_of(plain)
        with torch.autocast("cpu", torch.bfloat16):
            loss = outside(plain, batch)
        loss.backward()
        optimizer.step()
        return updates(model, before)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    called, optimizer = accelerator.prepare(model, optimizer_of(model))
    accelerator.backward(inside(called, batch))
    optimizer.step()
    return updates(model, before)


def test_bf16_with_the_loss_inside_the_model() -> None:
    """Outputs are converted to float32 after the loss was computed; the step is that of the loss computed outside."""
    assert_close(first_update("accelerate"), first_update("autocast"), 0.05)


@pytest.mark.parametrize("backend", ["aot_eager", default_backend()])
def test_a_compiled_model_with_the_loss_outside(backend: str) -> None:
    """−100 targets count as little as in eager mode."""
    model = Reads(llama().double())
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    train(compiled, optimizer_of(compiled), language_batches(4), outside)
    train(plain, optimizer_of(plain), language_batches(4), outside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-5)


def test_auto_does_not_stall_with_the_loss_inside() -> None:
    """Under lr="auto" bf16 training reaches nine tenths of the decrease of plain float32 training."""
    decrease = []
    for variant in ("plain", "accelerate"):
        model: nn.Module = llama()
        optimizer = bprong.BPRONG(model, "cross_entropy", every=2)
        if variant == "accelerate":
            model, optimizer = Accelerator(cpu=True, mixed_precision="bf16").prepare(model, optimizer)
        losses = train(model, optimizer, language_batches(1) * 10, inside)
        decrease.append(losses[0] - losses[-1])
    assert decrease[0] > 1.5
    assert decrease[1] > 0.9 * decrease[0]


# Padding --------------------------------------------------------------------------------------------------------------


def padded(batch: int = 8) -> dict[str, Tensor]:
    """Sequences of two tokens up to the full length, filled up with padding that attention is told to ignore.

    Positions are given for each example: those that the model makes itself are one row for all examples, whose errors
    are summed over the batch.
    """
    lengths = torch.arange(batch) % (LENGTH - 1) + 2
    real = torch.arange(LENGTH) < lengths[:, None]
    ids = tokens(batch).masked_fill(~real, 0)
    positions = torch.arange(LENGTH).repeat(batch, 1)
    y = torch.arange(batch) % CLASSES
    return {"input_ids": ids, "attention_mask": real.long(), "position_ids": positions, "labels": y}


def one_by_one(model: nn.Module, optimizer: bprong.BPRONG, batch: dict[str, Tensor], steps: int) -> None:
    """Trains on a batch without its padding, one example at a time, with the gradients of all in one step."""
    for _ in range(steps):
        optimizer.zero_grad()
        for example in zip(*batch.values(), strict=True):
            *rows, y = example
            real = {name: row[example[1].bool()][None] for name, row in zip(batch, rows, strict=False)}
            (model(**real, labels=y[None]).loss / len(batch["labels"])).backward()
        optimizer.step()


def test_padding_of_a_classifier_does_not_count() -> None:
    """Rows that attention masks enter no statistics: the path is that of the same examples without padding."""
    model = classifier().double()
    plain = copy.deepcopy(model)
    train(model, optimizer_of(model), [padded()] * 3, inside)
    one_by_one(plain, optimizer_of(plain), padded(), 3)
    assert_same_path(snapshot(model), snapshot(plain), 1e-8)


class MeanOfRows(nn.Module):
    """A classifier of the mean over the real rows of each example, without attention that would show the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(4, 5, dtype=torch.float64)
        self.head = nn.Linear(5, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.body(x).tanh() * mask.unsqueeze(-1)
        return self.head(z.sum(1) / mask.sum(1, keepdim=True))


def test_rows_that_the_model_masks_itself_do_not_count() -> None:
    """Without attention too, the path is that of the examples without padding."""
    model = MeanOfRows()
    plain = copy.deepcopy(model)
    x = torch.randn(8, LENGTH, 4, dtype=torch.float64)
    y = torch.arange(8) % CLASSES
    mask = padded()["attention_mask"]
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, every=1, options=EXACT)
    other = bprong.BPRONG(plain, "cross_entropy", lr=0.05, every=1, options=EXACT)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x, mask), y).backward()
        optimizer.step()
        other.zero_grad()
        for i in range(8):
            n = int(mask[i].sum())
            (F.cross_entropy(plain(x[i : i + 1, :n], mask[i : i + 1, :n]), y[i : i + 1]) / 8).backward()
        other.step()
    assert_same_path(snapshot(model), snapshot(plain), 1e-8)
