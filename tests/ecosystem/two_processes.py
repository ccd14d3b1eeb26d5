"""Trained by Lightning or by the Trainer in the processes that these packages or torchrun have started.

    python two_processes.py lightning OUT 2          Lightning starts the second process
    torchrun --nproc-per-node 2 two_processes.py trainer OUT 2

Each rank writes its parameters to OUT.
"""

import sys
from pathlib import Path
from subprocess import Popen

import torch
from torch import nn

import bprong

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "ecosystem"), str(TESTS), str(TESTS / "distributed")]
from leaving import leave  # noqa: E402

import conftest  # noqa: E402, F401  # makes torchvision importable

EXACT = {"fisher": "exact"}


def by_lightning(out: Path, processes: int) -> tuple[nn.Module, list[Popen]]:
    """The trained model, and the processes that Lightning has started from this one."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            self.criterion = nn.CrossEntropyLoss()

        def training_step(self, batch, _index):
            x, y = batch
            return self.criterion(self.net(x), y)

        def configure_optimizers(self):
            return bprong.BPRONG(self.net, self.criterion, lr=0.05, momentum=0.9, every=3, options=EXACT)

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 5, generator=generator, dtype=torch.float64)
    y = x[:, :3].argmax(dim=1)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    rank = trainer.global_rank
    mine = slice(rank, None, processes)
    loader = DataLoader(TensorDataset(x[mine], y[mine]), batch_size=16 // processes)
    trainer.fit(module, loader)
    return module, getattr(trainer.strategy.launcher, "procs", [])


def by_trainer(out: Path, processes: int) -> tuple[nn.Module, list[Popen]]:
    """The trained model; all processes were started by torchrun."""
    from test_frameworks import Examples
    from transformers import Trainer, TrainingArguments

    from tiny import language_batches, llama, optimizer_of

    torch.manual_seed(0)
    model = llama().double()
    arguments = TrainingArguments(
        output_dir=str(out), use_cpu=True, max_steps=4, per_device_train_batch_size=8 // processes, report_to="none",
        save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True, max_grad_norm=0.0, ddp_backend="gloo",
    )  # fmt: skip
    data = Examples(language_batches(4))
    Trainer(model, arguments, train_dataset=data, optimizers=(optimizer_of(model), None)).train()
    return model, []


def main(way: str, out: Path, processes: int) -> None:
    model, children = {"lightning": by_lightning, "trainer": by_trainer}[way](out, processes)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save([p.detach() for p in model.parameters()], out / f"{way}-{processes}-{rank}.pt")
    leave(children)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
