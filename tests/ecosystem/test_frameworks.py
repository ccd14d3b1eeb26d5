"""Training loops of other packages: transformers' Trainer, accelerate, Lightning and peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainingArguments

import bprong
from helpers import classification, mlp, snapshot
from tiny import Reads, inside, language_batches, llama, optimizer_of, outside, train
from training import EXACT, assert_same_path, batches


class Examples(Dataset):
    """The examples of some batches, one by one, as dicts."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.rows = [
            dict(zip(batch, values, strict=True)) for batch in batches for values in zip(*batch.values(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


class InOrder(Trainer):
    """A Trainer that keeps the order of its data set."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(model: nn.Module, optimizer: Any, folder: Path, steps: int, **settings: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing, with the Trainer's defaults apart from a constant learning rate."""
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=steps, per_device_train_batch_size=8, report_to="none",
        save_strategy="no", logging_strategy="steps", logging_steps=1, lr_scheduler_type="constant", disable_tqdm=True,
        **({"max_grad_norm": 0.0} | settings),
    )  # fmt: skip
    return InOrder(model, arguments, train_dataset=Examples(language_batches(steps)), optimizers=(optimizer, None))


def test_trainer_takes_the_path_of_a_plain_loop(tmp_path: Path) -> None:
    """The Trainer divides a summed loss by the number of targets that count, and the path is that of their mean."""
    model = llama().double()
    plain = Reads(copy.deepcopy(model))
    trainer(model, optimizer_of(model), tmp_path, 4).train()
    train(plain, optimizer_of(plain), language_batches(4), outside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-5)


def test_trainer_makes_the_optimizer_from_a_factory(tmp_path: Path) -> None:
    """With its own groups, of which one has no weight decay; its learning rate is a ratio."""
    model = llama().double()
    other = copy.deepcopy(model)
    settings: dict[str, Any] = {"step": "natural", "every": 2, "options": EXACT | {"seed": 0}}
    run = trainer(model, None, tmp_path, 4, weight_decay=3.0)
    run.optimizer_cls_and_kwargs = (bprong.BPRONG.factory(model, "cross_entropy"), settings | {"lr": 1e-3})
    run.train()
    decayed = set(run.get_decay_parameter_names(other))
    params = [
        {"params": [p for name, p in other.named_parameters() if name in decayed], "weight_decay": 3.0},
        {"params": [p for name, p in other.named_parameters() if name not in decayed]},
    ]
    trainer(other, bprong.BPRONG(other, "cross_entropy", params=params, **settings), tmp_path, 4).train()
    assert_same_path(snapshot(model), snapshot(other), 1e-9)


def test_trainer_with_gradient_accumulation(tmp_path: Path) -> None:
    """Two micro-batches, whose losses are sums divided by the number of targets in both, are one batch of both."""
    model = llama().double()
    plain = Reads(copy.deepcopy(model))
    accumulated = trainer(model, optimizer_of(model), tmp_path, 2, gradient_accumulation_steps=2)
    accumulated.train_dataset = Examples(language_batches(4))
    accumulated.train()
    pairs = language_batches(4)
    both = [
        {name: torch.cat((first[name], second[name])) for name in first}
        for first, second in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    train(plain, optimizer_of(plain), both, outside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-5)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_trainer_without_a_learning_rate(settings: dict[str, Any], tmp_path: Path) -> None:
    """With default clipping, and in bf16, the Trainer lowers the loss as a plain loop of ten steps does."""
    model = llama()
    plain = copy.deepcopy(model)
    losses = train(plain, bprong.BPRONG(plain, "cross_entropy", every=2), language_batches(1) * 10, inside)
    run = trainer(model, bprong.BPRONG(model, "cross_entropy", every=2), tmp_path, 10, max_grad_norm=1.0, **settings)
    run.train_dataset = Examples(language_batches(1) * 10)
    run.train()
    logged = [row["loss"] for row in run.state.log_history if "loss" in row]
    assert logged[0] - logged[-1] > 0.8 * (losses[0] - losses[-1])


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    return list(batches(*classification(60, 5, 3), 20, steps))


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def test_accelerate_takes_the_path_of_a_plain_loop() -> None:
    """A prepared model and optimizer, with clipping by accelerate, take the path of torch's own functions."""
    model = mlp(5, 6, 3)
    plain = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    other = optimizer_of(plain)
    for batch in data(6):
        optimizer.zero_grad()
        accelerator.backward(classified(prepared, batch))
        accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
        optimizer.step()
        other.zero_grad()
        classified(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
    assert_same_path(snapshot(model), snapshot(plain), 1e-10)


def test_accelerate_with_gradient_accumulation() -> None:
    """Inside `accumulate` step() and zero_grad() do nothing until the last micro-batch: one step of all of them."""
    model = mlp(5, 6, 3)
    plain = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    for batch in data(8):
        with accelerator.accumulate(prepared):
            accelerator.backward(classified(prepared, batch))
            optimizer.step()
            optimizer.zero_grad()
    pairs = data(8)
    both = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
    train(plain, optimizer_of(plain), both, classified)
    assert_same_path(snapshot(model), snapshot(plain), 1e-10)


def test_accelerate_saves_and_loads(tmp_path: Path) -> None:
    """A state saved by accelerate continues the path."""
    ends = []
    for interrupted in (False, True):
        torch.manual_seed(1)
        model = mlp(5, 6, 3)
        accelerator = Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
        for step, batch in enumerate(data(6)):
            if interrupted and step == 3:
                accelerator.save_state(tmp_path / "state")
                accelerator = Accelerator(cpu=True)
                model = mlp(5, 6, 3)
                prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
                accelerator.load_state(tmp_path / "state")
            optimizer.zero_grad()
            accelerator.backward(classified(prepared, batch))
            optimizer.step()
        ends.append(snapshot(model))
    assert_same_path(ends[1], ends[0], 1e-12)


class Classifier(lightning.LightningModule):
    """A LightningModule that trains a perceptron; the optimizer is given the perceptron, or the whole module."""

    def __init__(self, model: nn.Module, whole: bool, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.whole = whole
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> bprong.BPRONG:
        return optimizer_of(self if self.whole else self.model, **self.settings)


@pytest.mark.parametrize("whole", [False, True], ids=["inner model", "LightningModule"])
@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_lightning_takes_the_path_of_a_plain_loop(lr: Any, whole: bool, tmp_path: Path) -> None:
    """Lightning passes a closure that calls zero_grad between the forward and the backward pass."""
    model = mlp(5, 6, 3)
    plain = copy.deepcopy(model)
    x, y = (torch.cat(parts) for parts in zip(*data(6), strict=True))
    run = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=0.5,
    )  # fmt: skip
    run.fit(Classifier(model, whole, lr=lr), DataLoader(TensorDataset(x, y), batch_size=20))
    other = optimizer_of(plain, lr=lr)
    for batch in data(6):
        other.zero_grad()
        classified(plain, batch).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
    assert_same_path(snapshot(model), snapshot(plain), 1e-9)


@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_low_rank_adaptation(lr: Any) -> None:
    """peft's adapters are whitened linear layers; the frozen weights stay as they are, and the loss falls."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    model = get_peft_model(llama(), config)
    before = snapshot(model)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=2)
    losses = train(model, optimizer, language_batches(1) * 10, inside)
    after = snapshot(model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if "lora_" in name}
    assert not optimizer.report().fallback
    assert losses[-1] < 0.99 * losses[0]
