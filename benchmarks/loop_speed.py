"""How much of a hand-written loop's speed does the experiment's training loop keep, and what does each method cost?

The paper's literal networks and the drop-in optimizer, refreshes included; all loops take turns within one process.

    python benchmarks/loop_speed.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from harness.command_line import CommandLine
from problems import Data
from problems.data import mnist
from problems.networks import paper_network
from torch import Tensor

from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import interleaved
from bprong.experiments.methods import METHODS, Problem
from bprong.experiments.training import train_epoch

BATCH = 100


def hand_written(data: Data, order: Tensor) -> Callable[[], None]:
    """The loop that one would write by hand for SGD."""
    model = paper_network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch() -> None:
        for chosen in order.split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data.x[chosen]), data.y[chosen]).backward()
            optimizer.step()

    return epoch


def experiment(name: str, data: Data, order: Tensor) -> Callable[[], object]:
    """The experiment's loop with one of its methods."""
    method = METHODS[name]
    problem = Problem(paper_network(0), 0.01, data.x, data.y, 0, method.whitening)
    trainee = method.start(problem, updates=len(data.x) // BATCH)
    return lambda: train_epoch(trainee, data.x, data.y, order, BATCH)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2)
    parser.setting("rounds", 7, 2, "rounds, whose median is taken")
    parser.setting("steps", 200, 10, "steps of a loop in one round")
    options = parser.parse(arguments)
    data = mnist()
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[: options.steps * BATCH]
    loops: dict[str, Callable[[], object]] = {"hand-written loop": hand_written(data, order)}
    loops |= {name: experiment(name, data, order) for name in METHODS}
    spent = interleaved(loops, options.rounds)
    lines = []
    for name, seconds in spent.items():
        ratio = median(a / b for a, b in zip(seconds, spent["hand-written loop"], strict=True))
        lines.append([name, f"{options.steps / median(seconds):.0f}", f"{ratio:.2f}"])
    print(f"medians of {options.rounds} rounds, {options.threads} threads\n")
    print(markdown(["loop", "updates per second", "time / hand-written loop's"], lines))


if __name__ == "__main__":
    main()
