"""lr="auto" on sixty small problems, one setting, beside Adam at the best of five learning rates for each problem.

    python benchmarks/many.py [--only NAME …] [--seeds 0,1] [--out docs]                                      12 minutes

Writes auto-many.csv into --out and prints a table in Markdown of the seeds asked for. What the file holds is not run
again: delete it to begin anew. Minutes are those of one free core, two seeds. All methods of a seed have the same
initial weights and the same batches. The loss is that over the training set, without dropout, at most 4,000 rows of it;
with Batch Normalisation the better one of its two modes. A run has diverged if its loss is not finite or above that of
the untrained network, or if it raised an exception.

Some constants of the rule were adjusted after looking at these problems, with seeds 0 and 1: on those they are not held
out. Seeds 2 and 3 are other initial weights and batches, of the same problems.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from auto_problems import batches
from many_problems import PROBLEMS, Problem
from many_results import ADAM_RATES, Row, read, table, write
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import bprong

EVALUATED = 4000  # rows of the training set, at most
EARLY = (1, 2, 3, 5, 10)  # steps after which the loss is measured, beside every twentieth part of all


class Run:
    """A network in training: its optimizer, its losses, its clock, which only training moves."""

    def __init__(self, name: str, lr: str, seed: int) -> None:
        self.name, self.problem, self.lr, self.seed = name, PROBLEMS[name], lr, seed
        torch.manual_seed(100 + seed)
        self.model = self.problem.model()
        self.x, self.y = self.problem.data()
        self.source = batches(self.x, self.y, self.problem.batch, seed)
        self.losses = [self.measure()]
        self.undone, self.seconds, self.error = 0, 0.0, ""
        torch.manual_seed(seed)
        self.optimizer = self._optimizer()
        self.scheduler = CosineAnnealingLR(self.optimizer, self.problem.steps) if self.problem.cosine else None

    def _optimizer(self) -> Optimizer:
        decay = self.problem.weight_decay
        if self.lr != "auto":
            return Adam(self.model.parameters(), lr=float(self.lr), weight_decay=decay)
        kind = getattr(bprong, self.problem.optimizer)
        optimizer = kind(self.model, likelihood=self.problem.likelihood, lr="auto", weight_decay=decay)
        undo_ = optimizer._rule.undo_

        def counted(*arguments: object) -> bool:
            undone = undo_(*arguments)
            self.undone += undone
            return undone

        optimizer._rule.undo_ = counted
        return optimizer

    def train(self) -> Row:
        """All steps, or up to an exception, which `error` then tells."""
        steps = self.problem.steps
        try:
            for step in range(1, steps + 1):
                wall, processor = time.perf_counter(), time.process_time()
                self._step()
                self.seconds += min(time.perf_counter() - wall, time.process_time() - processor)
                if step % (steps // 20) == 0 or step in (*EARLY, steps):
                    self.losses.append(self.measure())
        except Exception as error:  # whichever it is, this run has failed, and the others are to go on
            self.error = f"{type(error).__name__}: {error}"
            self.losses.append(math.inf)
        method = f"{self.problem.optimizer.lower()}-auto" if self.lr == "auto" else "adam"
        numbers = self.losses[0], self.losses[-1], max(self.losses[1:]), self.undone, self.seconds
        return Row(self.name, method, self.lr, self.seed, *numbers)

    def _step(self) -> None:
        x, y = next(self.source)
        self.optimizer.zero_grad()
        self._loss(x, y).backward()
        if self.problem.clip:
            clip_grad_norm_(self.model.parameters(), self.problem.clip)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.problem.loss(self.model(x), y)
        return loss if self.problem.penalty is None else loss + self.problem.penalty(self.model)

    def measure(self) -> float:
        """The loss over the training set; infinite where it is not finite. Training goes on as if nothing had been."""
        norms = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        found = [self._evaluate(mode) for mode in ([False, True] if norms else [False])]
        self.model.train()
        return min((loss for loss in found if math.isfinite(loss)), default=math.inf)

    @torch.no_grad()
    def _evaluate(self, training: bool) -> float:
        self.model.train(training)
        x, y = self.x[:EVALUATED], self.y[:EVALUATED]
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            loss = float(self._loss(x, y))
        for buffer, before in kept:
            buffer.copy_(before)
        return loss / len(x) if self.problem.summed else loss


def run_all(problems: dict[str, Problem], seeds: list[int], out: Path) -> None:
    rows = read(out)
    for seed in seeds:
        for name in problems:
            for lr in ("auto", *ADAM_RATES):
                if (name, lr, seed) not in rows:
                    run = Run(name, lr, seed)
                    row = rows[name, lr, seed] = run.train()
                    write(out, rows)
                    say(row, run.error)
    print(*table(rows, problems, seeds), sep="\n")


def say(row: Row, error: str) -> None:
    where = f"{row.problem:<22}lr {row.lr:<5} seed {row.seed}"
    end = f"loss {row.start:.4g} → {row.end:.4g}{', diverged' * row.diverged}"
    print(f"{where}: {end} ({row.seconds:.1f} s){f' {error}' if error else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, metavar="NAME", help=", ".join(PROBLEMS))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the CSV (default docs)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_all({name: PROBLEMS[name] for name in options.only or PROBLEMS}, options.seeds, options.out)


if __name__ == "__main__":
    main()
