"""Whole runs of Lightning and of the Trainer: interrupted and resumed, accumulated, in mixed precision, and logged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_frameworks import Classifier, Examples, classified, data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

import bprong
from helpers import assert_unchanged, mlp, snapshot
from tiny import gpt2, inside, language_batches, optimizer_of, train
from training import assert_same_path

# Lightning ------------------------------------------------------------------------------------------------------------


class Resumable(DataLoader):
    """A loader that continues where it was saved, as torchdata's StatefulDataLoader."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.done = 0
        self.skipped = 0

    def __iter__(self) -> Any:
        skipped, self.skipped = self.skipped, 0
        self.done = skipped
        for i, batch in enumerate(super().__iter__()):
            if i >= skipped:
                self.done += 1
                yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["done"]


def loader(steps: int, **settings: Any) -> Resumable:
    x, y = (torch.cat(parts) for parts in zip(*data(steps), strict=True))
    return Resumable(TensorDataset(x, y), batch_size=20, **settings)


def lightning_trainer(folder: Path, **settings: Any) -> lightning.Trainer:
    usual = {
        "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
    }  # fmt: skip
    return lightning.Trainer(**usual | settings)


@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_lightning_resumes_in_mid_epoch_bit_for_bit(lr: Any, tmp_path: Path) -> None:
    """A run of two epochs that is interrupted in the middle of the second ends where an uninterrupted one does."""
    torch.manual_seed(1)
    whole = Classifier(mlp(5, 6, 3), whole=False, lr=lr)
    start = snapshot(whole.model)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=9, save_top_k=-1)
    lightning_trainer(tmp_path, callbacks=[saving], enable_checkpointing=True).fit(whole, loader(6))
    (saved,) = tmp_path.glob("*step=9*.ckpt")
    resumed = Classifier(mlp(5, 6, 3), whole=False, lr=lr)
    resumed.model.load_state_dict({name: torch.zeros_like(value) for name, value in start.items()})
    lightning_trainer(tmp_path).fit(resumed, loader(6), ckpt_path=saved, weights_only=True)
    assert_unchanged(snapshot(whole.model), snapshot(resumed.model))


@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_lightning_accumulates_gradients(lr: Any, tmp_path: Path) -> None:
    """Two micro-batches, whose losses Lightning divides by two, are one batch of both."""
    module = Classifier(mlp(5, 6, 3), whole=False, lr=lr)
    plain = mlp(5, 6, 3)
    plain.load_state_dict(module.model.state_dict())
    lightning_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(module, loader(6))
    pairs = data(6)
    both = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
    train(plain, optimizer_of(plain, lr=lr), both, classified)
    assert_same_path(snapshot(module.model), snapshot(plain), 1e-9)


@pytest.mark.parametrize("lr", [0.05, "auto"])
def test_lightning_in_mixed_precision(lr: Any, tmp_path: Path) -> None:
    """Weights stay in float32, and the loss falls as in a plain loop under autocast."""
    module = Classifier(mlp(5, 6, 3).float(), whole=False, lr=lr)
    plain = mlp(5, 6, 3).float()
    plain.load_state_dict(module.model.state_dict())
    batches = [(x.float(), y) for x, y in data(6)]
    rows = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    lightning_trainer(tmp_path, max_epochs=1, precision="bf16-mixed").fit(module, DataLoader(rows, batch_size=20))

    def under_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classified(model, batch)

    train(plain, optimizer_of(plain, lr=lr), batches, under_autocast)
    assert_unchanged(snapshot(plain), snapshot(module.model))


class Logged(Classifier):
    """Logs the report of its optimizer after every step."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, bprong.BPRONG):
            self.log_dict({f"bprong/{name}": value for name, value in optimizer.report().scalars().items()})


def test_the_report_goes_to_lightnings_log_dict_and_to_tensorboard(tmp_path: Path) -> None:
    module = Logged(mlp(5, 6, 3), whole=False)
    logger = TensorBoardLogger(tmp_path)
    lightning_trainer(tmp_path, logger=logger, log_every_n_steps=1).fit(module, loader(6))
    events = EventAccumulator(logger.log_dir).Reload()
    found = events.Tags()["scalars"]
    assert {"bprong/steps", "bprong/0/forward_age", "bprong/2/backward_damping", "bprong/time/step"} <= set(found)
    assert events.Scalars("bprong/steps")[-1].value >= 10


def test_a_trained_lightning_module_becomes_torchscript(tmp_path: Path) -> None:
    """By tracing and by scripting."""
    module = Classifier(mlp(5, 6, 3), whole=False)
    trainer = lightning_trainer(tmp_path, max_epochs=1)
    trainer.fit(module, loader(6))
    x = data(1)[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = module.to_torchscript(method="trace", example_inputs=x)
        assert torch.equal(traced(x), module(x))
        assert torch.equal(module.to_torchscript()(x), module(x))
    assert trainer.optimizers


# transformers' Trainer ------------------------------------------------------------------------------------------------


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 8,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**usual | settings)


def with_decay_groups(trainer: Trainer, **settings: Any) -> Any:
    """What the Trainer makes an optimizer with: groups with and without weight decay, as it has them."""

    def make(model: nn.Module, **given: Any) -> bprong.BPRONG:
        decayed = trainer.get_decay_parameter_names(model)
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in model.named_parameters():
            groups[name not in decayed]["params"].append(parameter)
        return bprong.BPRONG(model, "cross_entropy", params=groups, **given)

    return (lambda: make), settings


@pytest.mark.parametrize("settings", [{"lr": 0.02, "step": "spectral"}, {"lr": 0.05}, {}], ids=str)
def test_gpt2_with_tied_embeddings_and_decay_groups_resumes_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """GPT-2 as it comes, with Conv1D layers and a tied head, saved by the Trainer at the third of six steps."""
    ends = []
    rows = Examples(language_batches(6))
    with bprong.register(Conv1D, like=nn.Linear, transposed=True):
        for resumed in (False, True):
            saves = {} if resumed else {"save_strategy": "steps", "save_steps": 3}
            trainer = Trainer(gpt2(tied=True), arguments(tmp_path, **saves), train_dataset=rows)
            trainer.optimizer_cls_and_kwargs = with_decay_groups(trainer, weight_decay=0.1, **settings)
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resumed else None)
            optimizer = trainer.optimizer.optimizer
            assert isinstance(optimizer, bprong.BPRONG)
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
            ends.append(snapshot(trainer.model))
    assert_unchanged(ends[0], ends[1])


def test_the_trainer_takes_the_class_and_its_arguments(tmp_path: Path) -> None:
    """With "model" among the arguments the Trainer gives the model instead of parameters."""
    with bprong.register(Conv1D, like=nn.Linear, transposed=True):
        model = gpt2()
        plain = gpt2()
        # Drawn targets could differ between two paths that differ by the rounding of the Trainer's loss.
        rule = {"loss": "cross_entropy", "lr": 0.05, "every": 2, "options": {"fisher": "exact"}}
        chosen = (bprong.BPRONG, {"model": model, **rule})
        rows = language_batches(6)
        settings = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        trainer = Trainer(
            model, arguments(tmp_path, **settings), train_dataset=Examples(rows), optimizer_cls_and_kwargs=chosen
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
        trainer.train()
        train(plain, bprong.BPRONG(plain, **rule), rows, inside)
    assert_same_path(snapshot(model), snapshot(plain), 1e-5)
