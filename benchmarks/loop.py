"""How much of a bare hand-written loop's speed the experiment's loop keeps, and what each method's step costs: the
paper's literal networks, and the drop-in optimizer (bprong-fast), refreshes and all.

Interleaved within one process: seconds on a shared machine mean nothing by themselves, ratios do.
Run: python benchmarks/loop.py [--threads 2] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.experiments.data import load
from bprong.experiments.methods import METHODS, Problem
from bprong.experiments.models import perceptron
from bprong.experiments.runner import train_epoch


def bare(x: Tensor, y: Tensor, order: Tensor) -> Callable[[], None]:
    """The loop one would write by hand for SGD."""
    model = perceptron([784, 100, 100, 100, 10], "relu", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch() -> None:
        for i in range(0, len(order), 100):
            chosen = order[i : i + 100]
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()

    return epoch


def ours(name: str, x: Tensor, y: Tensor, order: Tensor) -> Callable[[], None]:
    method, plain = METHODS[name], perceptron([784, 100, 100, 100, 10], "relu", seed=0)
    trainee = method.prepare(Problem(plain, 0.01, x, y, 0, method.whitening))
    return lambda: train_epoch(trainee, x, y, order, 100) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    data = load("mnist")
    order = torch.randperm(len(data.x_train), generator=torch.Generator().manual_seed(0))[:20_000]
    loops = {"bare loop": bare(data.x_train, data.y_train, order)}
    loops |= {name: ours(name, data.x_train, data.y_train, order) for name in METHODS}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop()
            seconds[name].append(time.perf_counter() - start)
    base = seconds["bare loop"]
    print(f"medians of {options.rounds} rounds, {options.threads} threads")
    print(f"{'loop':<12}{'updates/s':>12}{'× bare loop':>14}")
    for name, spent in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(spent, base, strict=True))
        print(f"{name:<12}{200 / statistics.median(spent):>12.0f}{ratio:>14.2f}")


if __name__ == "__main__":
    main()
