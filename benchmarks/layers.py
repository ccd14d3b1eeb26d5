"""The proof for the layers people use: a small convolutional network on scikit-learn's digits, and a small transformer
that sorts sequences, each by SGD with momentum, Adam and BPRONG at an equal number of steps.

Learning rates: seven a method, a third of a decade apart, judged on seed 0 by the loss over the whole training set
after the last step; a run that diverges counts as infinity. A best one at an edge extends that method's grid, and every
other method gets as many trials more. The best is then run on fresh seeds. All methods of a seed have the same initial
weights and the same batches.

    python benchmarks/layers.py run --out docs              rows into docs/layers.csv; goes on where it was stopped
    python benchmarks/layers.py run --out docs --methods bprong --bprong momentum=0.9
    python benchmarks/layers.py figure --out docs           docs/figures/layers.png, and a table in Markdown
"""

from __future__ import annotations

import argparse
import ast
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from layers_results import SELECTION_SEED, Row, Runs, at_edge, best, draw, rate, read, table, tried, write
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import bprong
from bprong.experiments.data import load, sequences_to_sort
from bprong.experiments.models import digits_convnet, sequence_transformer
from bprong.whitening import WhiteningError

BPRONG_SETTINGS: dict[str, Any] = {"momentum": 0.9, "max_step": 0.1}  # everything else at its default
BATCH, EVALUATE_EVERY = 64, 25
TRIALS, MOST_TRIALS = 7, 13  # learning rates a method; the most that edges can make of them
METHODS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
    "adam": lambda model, lr: Adam(model.parameters(), lr=lr),
    "bprong": lambda model, lr, **settings: bprong.BPRONG(model, lr=lr, **settings),
}


def digits() -> tuple[Tensor, Tensor]:
    data = load("digits")
    return data.x_train.view(-1, 1, 8, 8), data.y_train


@dataclass(frozen=True)
class Problem:
    """A network and what it learns; `grids`: of each method, the k of its least learning rate 10^(k/3)."""

    title: str
    model: Callable[[int], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    grids: dict[str, int]


PROBLEMS = {
    "conv": Problem("Convolutions: digits", digits_convnet, digits, 300, {"sgd": -7, "adam": -9, "bprong": -12}),
    "transformer": Problem(
        "Transformer: sorting", sequence_transformer, lambda: sequences_to_sort(4096, seed=0), 500,
        {"sgd": -6, "adam": -11, "bprong": -12},
    ),
}  # fmt: skip


# Training -------------------------------------------------------------------------------------------------------------


def loss_of(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy per target; where y is −100, padding, there is none."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Loss and accuracy per target, over all of x."""
    model.eval()
    loss, right, targets = 0.0, 0, int((y >= 0).sum())
    with torch.no_grad():
        for x_part, y_part in zip(x.split(512), y.split(512), strict=True):
            logits = model(x_part)
            loss += float(loss_of(logits, y_part, "sum"))
            right += int((logits.argmax(-1) == y_part).sum())
    model.train()
    return loss / targets, right / targets


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Whole batches of every epoch's own shuffle, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (part for part in torch.randperm(count, generator=generator).split(BATCH) if len(part) == BATCH)


def train(
    problem: Problem, method: str, lr: float, seed: int, settings: dict[str, Any]
) -> list[tuple[int, float, float]]:
    """Step, loss and accuracy now and then; the last loss is infinite if the run diverged."""
    (x, y), model = problem.data(), problem.model(seed)
    torch.manual_seed(seed)
    optimizer = METHODS[method](model, lr, **settings)
    path = [(0, *evaluate(model, x, y))]
    for step, chosen in zip(range(1, problem.steps + 1), batches(len(x), seed), strict=False):
        optimizer.zero_grad()
        loss_of(model(x[chosen]), y[chosen]).backward()
        try:
            optimizer.step()
        except (FloatingPointError, WhiteningError):  # BPRONG does not go on from what is not finite
            return [*path, (step, math.inf, 0.0)]
        if step % EVALUATE_EVERY == 0 or step == problem.steps:
            path.append((step, *evaluate(model, x, y)))
            if not math.isfinite(path[-1][1]):
                return [*path[:-1], (step, math.inf, 0.0)]
    return path


# Learning rates -------------------------------------------------------------------------------------------------------


def wanted(losses: dict[int, float], first: int, trials: int) -> int | None:
    """The next k to try, if any: the grid, then beyond whichever end is nearer to the best."""
    if missing := [k for k in range(first, first + TRIALS) if k not in losses]:
        return missing[0]
    if len(losses) < trials or (at_edge(losses) and len(losses) < MOST_TRIALS):
        low, high = min(losses), max(losses)
        return low - 1 if best(losses) - low <= high - best(losses) else high + 1
    return None


def known(folder: Path) -> Runs:
    """The runs on disk; those of another length are not to be compared with ours."""
    runs = read(folder)
    for last in (rows[-1] for rows in runs.values()):
        if math.isfinite(last.train_loss) and last.step != (steps := PROBLEMS[last.problem].steps):
            raise SystemExit(f"{folder}/layers.csv: {last} does not end at step {steps}; begin in another folder")
    return runs


def run_all(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    settings = BPRONG_SETTINGS | {key: ast.literal_eval(value) for key, value in (s.split("=") for s in options.bprong)}
    names = {m: "-".join([m, *options.bprong]) if m == "bprong" else m for m in options.methods}
    runs = known(options.out)

    def run(problem: str, method: str, k: int, seed: int) -> None:
        lr, start = rate(k), time.perf_counter()
        key = (problem, names[method], lr, seed)
        if key in runs:
            return
        path = train(PROBLEMS[problem], method, lr, seed, settings if method == "bprong" else {})
        runs[key] = [Row(*key, *point) for point in path]
        write(options.out, runs)
        step, loss, accuracy = path[-1]
        end = f"loss {loss:.4g}, accuracy {accuracy:.3f}" if math.isfinite(loss) else f"diverged by step {step}"
        line = f"{problem:<12}{names[method]:<8} lr {lr:<8g} seed {seed}: {end} ({time.perf_counter() - start:.1f} s)"
        print(line, flush=True)

    for problem in options.problems:
        select(problem, names, runs, run)
        for seed in options.seeds:
            for method, name in names.items():
                run(problem, method, best(tried(runs, problem, name)), seed)


def select(problem: str, names: dict[str, str], runs: Runs, run: Callable[[str, str, int, int], None]) -> None:
    """Run the grids on the seed of selection until no best is at an edge and all have had as many trials."""
    going = True
    while going:
        going = False
        everyone = {method for name, method, _, _ in runs if name == problem} | set(names.values())
        trials = max(TRIALS, *(len(tried(runs, problem, name)) for name in everyone))
        for method, name in names.items():
            losses = tried(runs, problem, name)
            k = wanted(losses, PROBLEMS[problem].grids[method], trials)
            if k is not None:
                if len(losses) >= TRIALS:
                    reason = "its best is at an edge" if at_edge(losses) else "others have had more trials"
                    print(f"{problem}: {name} is given lr {rate(k):g} in addition, {reason}", flush=True)
                run(problem, method, k, SELECTION_SEED)
                going = True


def show(options: argparse.Namespace) -> None:
    runs = known(options.out)
    titles = {name: problem.title for name, problem in PROBLEMS.items() if any(key[0] == name for key in runs)}
    methods = sorted({key[1] for key in runs}, key=lambda name: (list(METHODS).index(name.split("-")[0]), name))
    path = draw(options.out, runs, titles, methods)
    print(*table(runs, titles, methods), f"\n{path}", sep="\n")


def names_of(choices: dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known are {', '.join(choices)}")
        return text.split(",")

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(call=run_all)
    command.add_argument("--problems", type=names_of(PROBLEMS), default=list(PROBLEMS))
    command.add_argument("--methods", type=names_of(METHODS), default=list(METHODS))
    command.add_argument(
        "--seeds", type=lambda text: [int(seed) for seed in text.split(",") if seed], default=[1, 2, 3]
    )
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--bprong", action="append", default=[], metavar="NAME=VALUE", help="a setting of BPRONG")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("figure")
    command.set_defaults(call=show)
    command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
