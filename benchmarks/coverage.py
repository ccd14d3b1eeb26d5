"""Does `bprong.coverage` predict what a model's whitening takes? Memory against what a process grows by, cost against
seconds, layer by layer.

Run: python benchmarks/coverage.py [--threads 2]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor, nn

import bprong
from bprong.experiments.models import digits_convnet, perceptron, sequence_transformer


def convolutions() -> nn.Module:
    """Layers that take long enough to be timed."""
    layers = [nn.Conv2d(3, 64, 3), nn.Conv2d(64, 128, 3), nn.Conv2d(128, 256, 3, groups=4), nn.Conv2d(256, 512, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(2048, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "paper's network": (lambda: perceptron([784, 100, 100, 100, 10], "relu", 0), lambda: torch.randn(100, 784)),
    "autoencoder": (
        lambda: perceptron([784, 1000, 500, 250, 30, 250, 500, 1000, 784], "tanh", 0),
        lambda: torch.randn(100, 784),
    ),
    "digits convnet": (lambda: digits_convnet(0), lambda: torch.randn(64, 1, 8, 8)),
    "transformer": (lambda: sequence_transformer(0), lambda: torch.randint(1, 33, (64, 12))),
    "50,000 inputs": (
        lambda: nn.Sequential(nn.Linear(50_000, 100), nn.Linear(100, 10)),
        lambda: torch.randn(64, 50_000),
    ),
    "convolutions": (convolutions, lambda: torch.randn(16, 3, 12, 12)),
    "mixed widths": (
        lambda: nn.Sequential(*(layer for a, b in WIDTHS for layer in (nn.Linear(a, b), nn.ReLU()))),
        lambda: torch.randn(100, 64),
    ),
}
WIDTHS = [(64, 128), (128, 2000), (2000, 512), (512, 1024), (1024, 32), (32, 256), (256, 16), (16, 10)]


def resident() -> int:
    """Bytes this process holds in memory, without what its allocator has back and keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def stepped(name: str) -> tuple[bprong.BPRONG, int]:
    """An optimizer after two steps, and what the process grew by between them and a backward pass before."""
    make, batch = MODELS[name]
    model, x = make(), batch()
    for _ in range(2):
        model(x).square().mean().backward()
    other = make()  # whatever torch and its libraries load and set up at their first calls
    warm_up = bprong.BPRONG(other, likelihood="gaussian")
    other(x).square().mean().backward()
    warm_up.step()
    del other, warm_up
    before = resident()
    optimizer = bprong.BPRONG(model, likelihood="gaussian")
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer, resident() - before


def memory(name: str) -> None:
    optimizer, grown = stepped(name)
    predicted = bprong.coverage(optimizer.statistics.model).memory
    print(f"{name:<18}{predicted / 1e6:>12.2f}{grown / 1e6:>12.2f}{grown / predicted:>9.2f}")


def seconds(call: Callable[[], object]) -> float:
    """The median of some calls, after one that is not timed."""
    call()
    spent = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def cost(name: str) -> None:
    """How many pairs of layers are in the order predicted, of those predicted to differ by a factor two or more."""
    optimizer, _ = stepped(name)
    rows = {row.parameter: row for row in bprong.coverage(optimizer.statistics.model).rows}
    found: dict[str, list[tuple[float, float]]] = {"refresh": [], "step": []}
    for layer in optimizer.statistics.layers.values():
        row = rows[optimizer.statistics.name_of(layer.weight)]
        damping = optimizer.statistics.schedule.settings.damping
        gradients = layer.gradients({p: 0 for p in (layer.weight, layer.bias) if p is not None})

        def refresh(layer=layer, damping=damping) -> None:
            for side, moments in list(layer.moments.items()):
                layer.refresh(side, moments, damping[side], layer.like)

        found["refresh"].append((row.refresh, seconds(refresh)))
        found["step"].append((row.step, seconds(lambda layer=layer, g=gradients: layer.direction(*g))))
    for what, pairs in found.items():
        apart = [(a, b) for a, b in combinations(sorted(pairs), 2) if b[0] >= 2 * a[0]]
        right = sum(a[1] < b[1] for a, b in apart)
        print(f"{name:<18}{what:<10}{right:>4} of {len(apart)} pairs in the order predicted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=MODELS, help="memory of one model, in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        memory(options.one)
        return
    print(f"{'memory, MB':<18}{'predicted':>12}{'process':>12}{'ratio':>9}")
    for name in MODELS:  # each in a process of its own: what another has freed would be used again
        subprocess.run([sys.executable, __file__, "--threads", str(options.threads), "--one", name], check=True)
    print()
    for name in ("mixed widths", "autoencoder", "convolutions", "digits convnet"):
        cost(name)


if __name__ == "__main__":
    main()
