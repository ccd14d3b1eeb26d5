"""Continuous whitening in the drop-in optimizer: how white it stays, and what it costs, against its other refreshes.

Network, batches and measures are those of `continuous.py`.

    python benchmarks/continuous_optimizer.py run --out docs      continuous_optimizer.csv
    python benchmarks/continuous_optimizer.py table --out docs    a table in Markdown on stdout
    python benchmarks/continuous_optimizer.py widths              one side, a step against a refresh, on stdout
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from continuous import EPSILON, Run, advance, read, table
from torch import Tensor

import bprong
from bprong.experiments.models import perceptron
from bprong.moments import input_moments
from bprong.recording import record
from bprong.tracking import Rows, Track
from bprong.whitening import Damping, inverse

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "drift (default)": {},
    "drift, exact inverses": {"options": {"solver": "exact"}},
    "periodic 100": {"every": 100, "options": {"solver": "exact"}},
    "periodic 25, average 0.95": {"every": 25, "options": {"solver": "exact", "average": 0.95}},
    "periodic 7, average 0.95": {"every": 7, "options": {"solver": "exact", "average": 0.95}},
    "periodic 10, average 0.95": {"every": 10, "options": {"solver": "exact", "average": 0.95}},
    "periodic 50, average 0.95 of every 5th": {
        "every": 50, "options": {"solver": "exact", "average": 0.95, "record_every": 5},
    },
    "continuous every 5, rate 0.05": {"options": {"refresh": "continuous", "rate": 0.05}},
    "continuous every 10, rate 0.1": {"every": 10, "options": {"refresh": "continuous", "rate": 0.1}},
    "continuous every 25, rate 0.1": {"every": 25, "options": {"refresh": "continuous", "rate": 0.1}},
}  # fmt: skip


class Optimized(Run):
    """The same by the drop-in optimizer, on the model as it is."""

    def __post_init__(self) -> None:
        self.model = perceptron([784, 100, 100, 100, 10], "relu", seed=0)
        settings = OPTIMIZERS[self.name]
        options = {"seed": 0} | settings.get("options", {})
        self.optimizer = bprong.BPRONG(self.model, **settings | {"options": options})
        for layer in self.optimizer.statistics.layers.values():
            layer.refresh = self.counted(layer.refresh)  # type: ignore[method-assign]

    def counted(self, refresh: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: Any) -> None:
            self.anchors += 1
            refresh(*args)

        return counting

    def refresh(self, x: Tensor) -> None:
        """The optimizer does it, and watches its time."""
        seconds = self.optimizer.statistics.watch.seconds
        self.refreshing = seconds["statistics"] + seconds["factorisation"]

    def distances(self, held: Tensor) -> dict[tuple[str, str], float]:
        layers = self.optimizer.statistics.layers
        likelihood = bprong.likelihood.likelihood_of("categorical")
        self.model.eval()  # in training mode the optimizer would take these images for its own
        seen = record(
            self.model, {name: (layer.unit, True) for name, layer in layers.items()}, held, None,
            likelihood=likelihood, fisher="exact", seed=0,
        )  # fmt: skip
        self.model.train()
        found = {}
        for name, layer in layers.items():
            z, delta = seen[name].z, seen[name].delta
            off = z.mean - layer.c.double()
            forward, backward = z.second + torch.outer(off, off), delta.second
            for side, UU, S in (("forward", layer.UU, forward), ("backward", layer.RR, backward)):
                one = torch.eye(len(S), dtype=S.dtype)
                product = (UU @ (S + EPSILON[side] * one).to(UU.dtype)).double() - one
                found[name, side] = math.sqrt(float((product * product.T).sum()) / len(S))
        return found


def widths() -> None:
    """Milliseconds, medians of five: a step of one side, and what an exact refresh of it takes, factored in float32."""
    epsilon, n, trace = Damping(0.2), 20, 20  # a trace as small as float32 asks for
    print("| width | refresh | of which factoring | step, rate 0.05 | step, rate 0.02 |\n|---|---|---|---|---|")
    for d in (250, 500, 1000, 2000, 4000):
        z, seen = (torch.randn(rows, d) * math.sqrt(trace / d) for rows in (n, 1000))
        kept = input_moments(seen)
        UU, c = inverse(kept.second, epsilon).float(), kept.mean.float()
        ways: list[Callable[[], Any]] = [
            lambda kept=kept, z=z: inverse(kept.average(input_moments(z), 0.9).second, epsilon, torch.float32),
            lambda kept=kept: inverse(kept.second, epsilon, torch.float32),
        ]
        for rate in (0.05, 0.02):
            track = Track()
            track.anchor(kept.second)
            ways.append(lambda track=track, UU=UU, c=c, z=z, r=rate: track.move(UU, c, Rows(z, 1.0), r, epsilon))
        print(f"| {d} | {' | '.join(f'{1e3 * timed(way):.1f}' for way in ways)} |", flush=True)


def timed(way: Callable[[], Any]) -> float:
    way()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table", "widths"])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    path = options.out / "continuous_optimizer.csv"
    if options.command == "run":
        advance([Optimized(name) for name in OPTIMIZERS], path, options.steps)
    elif options.command == "table":
        table(read(path), OPTIMIZERS)
    else:
        widths()


if __name__ == "__main__":
    main()
