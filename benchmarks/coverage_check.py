"""Does `bprong.coverage` predict what whitening costs? Memory against the growth of a process, cost against seconds.

python benchmarks/coverage_check.py
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.command_line import CommandLine
from problems.networks import AUTOENCODER, digits_convnet, paper_network, perceptron, sequence_transformer
from torch import Tensor, nn

import bprong
from bprong.experiments.bench.tables import markdown
from bprong.experiments.bench.timing import seconds_on

WIDTHS = [(64, 128), (128, 2000), (2000, 512), (512, 1024), (1024, 32), (32, 256), (256, 16), (16, 10)]
TIMED = 7  # refreshes and steps of each layer, whose median is taken


def convolutions() -> nn.Module:
    """Layers that take long enough to be timed."""
    layers = [nn.Conv2d(3, 64, 3), nn.Conv2d(64, 128, 3), nn.Conv2d(128, 256, 3, groups=4), nn.Conv2d(256, 512, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(2048, 10))


def mixed_widths() -> nn.Module:
    return nn.Sequential(*(layer for a, b in WIDTHS for layer in (nn.Linear(a, b), nn.ReLU())))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "paper's network": (lambda: paper_network(0), lambda: torch.randn(100, 784)),
    "autoencoder": (lambda: perceptron(AUTOENCODER, "tanh", 0), lambda: torch.randn(100, 784)),
    "digits convnet": (lambda: digits_convnet(0), lambda: torch.randn(64, 1, 8, 8)),
    "transformer": (lambda: sequence_transformer(0), lambda: torch.randint(1, 33, (64, 12))),
    "50,000 inputs": (
        lambda: nn.Sequential(nn.Linear(50_000, 100), nn.Linear(100, 10)),
        lambda: torch.randn(64, 50_000),
    ),
    "convolutions": (convolutions, lambda: torch.randn(16, 3, 12, 12)),
    "mixed widths": (mixed_widths, lambda: torch.randn(100, 64)),
}
TIMED_MODELS = ["mixed widths", "autoencoder", "convolutions", "digits convnet"]


def resident() -> int:
    """Bytes that this process holds in memory, without freed memory that its allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def step(model: nn.Module, x: Tensor, optimizer: bprong.BPRONG | None) -> None:
    model(x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


def growth(name: str) -> tuple[int, int]:
    """Bytes that `coverage` predicts, and bytes by which the process grows in the first two steps."""
    make, batch = MODELS[name]
    model = make()
    x = batch()
    for _ in range(2):
        step(model, x, None)
    other = make()  # a first step, so that torch and its libraries load and set up everything before
    step(other, x, bprong.BPRONG(other, lr=0.01, loss="gaussian"))
    del other
    before = resident()
    optimizer = bprong.BPRONG(model, lr=0.01, loss="gaussian")
    for _ in range(2):
        step(model, x, optimizer)
    return bprong.coverage(model).memory, resident() - before


def memory(names: Sequence[str], threads: int) -> str:
    """Every model in a process of its own, as memory that another model has freed would be used again."""
    lines = []
    for name in names:
        command = [sys.executable, __file__, "--threads", str(threads), "--one", name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        predicted, grown = (int(number) for number in text.split())
        lines.append([name, f"{predicted / 1e6:.2f}", f"{grown / 1e6:.2f}", f"{grown / predicted:.2f}"])
    return markdown(["model", "predicted, MB", "process, MB", "ratio"], lines)


def layer_seconds(model: nn.Module, x: Tensor, parameters: list[nn.Parameter]) -> dict[str, float]:
    """Seconds of a factorisation and of a step of the optimizer when it trains one layer only."""
    settings: dict[str, Any] = {"params": parameters, "every": 1, "options": {"solver": "exact"}}
    optimizer = bprong.BPRONG(model, lr=1e-6, loss="gaussian", **settings)
    spent: dict[str, list[float]] = {"factorisation": [], "step": []}
    for _ in range(TIMED + 1):
        before = {part: seconds_on(optimizer, part) for part in spent}
        step(model, x, optimizer)
        for part, seconds in spent.items():
            seconds.append(seconds_on(optimizer, part) - before[part])
    return {part: median(seconds[1:]) for part, seconds in spent.items()}


def cost(names: Sequence[str]) -> str:
    """How many pairs of layers are in the predicted order, of those predicted to differ by a factor of two or more."""
    lines = []
    for name in names:
        make, batch = MODELS[name]
        model = make()
        x = batch()
        rows = {row.parameter: row for row in bprong.coverage(model).rows if row.refresh}
        found: dict[str, list[tuple[float, float]]] = {"factorisation": [], "step": []}
        for parameter, row in rows.items():
            own = list(model.get_submodule(parameter.rpartition(".")[0]).parameters())
            seconds = layer_seconds(model, x, own)
            found["factorisation"].append((row.refresh, seconds["factorisation"]))
            found["step"].append((row.step, seconds["step"]))
        for part, pairs in found.items():
            apart = [(a, b) for a, b in combinations(sorted(pairs), 2) if b[0] >= 2 * a[0]]
            lines.append([name, part, f"{sum(a[1] < b[1] for a, b in apart)} of {len(apart)}"])
    return markdown(["model", "part", "pairs in the predicted order"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, threads=2)
    parser.add_argument("--one", choices=MODELS, help="print predicted and measured bytes of one model")
    options = parser.parse(arguments)
    if options.one:
        print(*growth(options.one))
        return
    print(memory(["digits convnet"] if options.quick else list(MODELS), options.threads))
    print(f"\n{cost(['digits convnet'] if options.quick else TIMED_MODELS)}")


if __name__ == "__main__":
    main()
