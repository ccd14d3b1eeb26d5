"""What do refreshes and steps cost in several processes: seconds, bytes, messages and memory of each rank?

The deep autoencoder on random numbers; processes of one thread each on this machine, which needs as many cores. Ways:

    alone        one process with the batches of all ranks
    replicated   every rank factors all sides (what sharing saves, for comparison)
    shared       the default: each side is factored by one rank, and all ranks receive the factor

Bytes are those of the tensors that a rank puts into collective operations; what the network makes of them depends on
the backend. "Beyond" is what remains after the moments and the factors themselves.

    python benchmarks/several_processes.py             rows into docs/several-processes.csv, then as below
    python benchmarks/several_processes.py --draw      tables in Markdown
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness.command_line import CommandLine
from problems.networks import perceptron
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bprong
from bprong.experiments.bench.rows import columns_of, grouped, read, write
from bprong.experiments.bench.tables import markdown, median_and_range
from bprong.parallel.processes import Ranks
from bprong.whitening import refresh

WIDTHS = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
SMALL = [20, 30, 10, 20]
BATCH = 250  # of all processes together
WAYS = ["alone", "replicated", "shared"]


@dataclass(frozen=True)
class Row:
    """One round of one rank: a step with a refresh of everything, and a step without one.

    refresh:  seconds of the refresh, waiting for other ranks included
    work:     seconds of a processor that the refresh takes, without waiting
    """

    way: str
    processes: int
    rank: int
    round: int
    refresh: float
    work: float
    refresh_bytes: int
    refresh_messages: int
    least_bytes: int
    step_bytes: int
    step_messages: int
    state: int


class Traffic:
    """Counts what a process puts into collective operations of ours."""

    def __init__(self) -> None:
        self.bytes = self.messages = 0
        for name in ("gathered", "sum_", "received"):
            setattr(Ranks, name, self._counting(getattr(Ranks, name)))

    def _counting(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(ranks: Ranks, values: Tensor, *others: Any) -> Any:
            self.bytes += values.nbytes
            self.messages += 1
            return send(ranks, values, *others)

        return counted

    def taken(self) -> tuple[int, int]:
        """What was counted since the last call."""
        found = self.bytes, self.messages
        self.bytes = self.messages = 0
        return found


def factored_by_all(_pending: Any, _ranks: Ranks) -> Any:
    """Replaces the sharing of factors: every rank computes all of them."""
    return {}


def measured(rank: int, processes: int, way: str, rounds: int, widths: Sequence[int]) -> list[Row]:
    torch.set_num_threads(1)
    traffic = Traffic()
    if way == "replicated":
        refresh.shared_factors = factored_by_all  # type: ignore[assignment]
    model: nn.Module = perceptron(widths, "tanh", 0)
    wrapped = DistributedDataParallel(model) if processes > 1 else model
    criterion = nn.MSELoss()
    optimizer = bprong.BPRONG(wrapped, criterion, lr=0.01, every=2, options={"solver": "exact"})
    x = torch.rand(BATCH // processes, widths[0], generator=torch.Generator().manual_seed(rank))
    whitening = optimizer._whitening
    found = []
    for i in range(-1, rounds):
        before = whitening.seconds["statistics"] + whitening.seconds["factorisation"]
        works, traffics = [], []
        for _ in range(2):  # with a refresh, and without one
            optimizer.zero_grad()
            if processes > 1:
                dist.barrier()
            start = process_time()
            criterion(wrapped(x), x).backward()
            optimizer.step()
            works.append(process_time() - start)
            traffics.append(traffic.taken())
        times = whitening.seconds["statistics"] + whitening.seconds["factorisation"] - before, works[0] - works[1]
        if i >= 0:
            state = sum(map(_bytes, [whitening.layers, optimizer.state]))
            (refreshed, messages), (stepped, step_messages) = traffics
            least = least_bytes(whitening.layers, way) if processes > 1 else 0
            found.append(
                Row(way, processes, rank, i, *times, refreshed, messages, least, stepped, step_messages, state)
            )
    return found


def least_bytes(layers: Any, way: str) -> int:
    """All moments in float64 and, if all ranks receive them, all factors in float32."""
    entries = sum(side.blocks.entries for layer in layers.values() for side in layer.sides)
    return entries * (12 if way == "shared" else 8)


def _bytes(held: Any) -> int:
    """The bytes of all tensors behind layers, or behind the states of parameters."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        return sum(map(_bytes, held.values()))
    if isinstance(held, bprong.whitening.layers.Layer):
        kept = [side.moments.values for side in held.sides if side.moments is not None]
        factors = [getattr(side.factor, "inverse", None) for side in held.sides]
        return sum(map(_bytes, [*kept, *(factor for factor in factors if factor is not None)]))
    return 0


def work(rank: int, processes: int, way: str, rounds: int, widths: Sequence[int], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    write(Path(folder) / f"{rank}.csv", measured(rank, processes, way, rounds, widths), columns_of(Row))
    dist.barrier()  # a process whose peers are gone may abort while it closes its connections
    gc.collect()  # a model that holds the group would keep its threads, and at exit the process might abort
    dist.destroy_process_group()


def run(way: str, processes: int, rounds: int, widths: Sequence[int]) -> list[Row]:
    if processes == 1:
        return measured(0, 1, way, rounds, widths)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (processes, way, rounds, widths, folder), nprocs=processes)  # type: ignore[no-untyped-call]
        return [row for rank in range(processes) for row in read(Path(folder) / f"{rank}.csv", Row)]


def tables(rows: Sequence[Row]) -> str:
    groups = grouped(rows, "way", "processes")
    bases = {n: median([row.work for row in own]) for (way, n), own in groups.items() if way == "replicated"}
    alone = groups.get(("alone", 1), rows)
    lines = []
    for (way, processes), own in groups.items():
        beyond = [(row.refresh_bytes - row.step_bytes) / row.least_bytes - 1 for row in own if row.least_bytes]
        lines.append([
            way, processes,
            f"{1000 * median([row.refresh for row in own]):.0f}",
            f"{1000 * median([row.work for row in own]):.0f}",
            f"{median([row.work for row in own]) / bases[processes]:.2f}" if processes in bases else "–",
            f"{(own[0].refresh_bytes - own[0].step_bytes) / 1e6:.2f}", own[0].refresh_messages - own[0].step_messages,
            f"{median(beyond):.1%}" if beyond else "–",
            f"{own[0].step_bytes / 1e6:.2f}", own[0].step_messages,
            f"{max(row.state for row in own) / alone[0].state:.2f}",
        ])  # fmt: skip
    titles = [
        "way", "processes", "refresh, ms", "its work, ms", "replicated = 1", "MB of a refresh", "messages", "beyond",
        "MB of a step", "messages", "state, alone = 1",
    ]  # fmt: skip
    return markdown(titles, lines) + f"\n\nRefresh alone: {median_and_range([1000 * row.refresh for row in alone])} ms."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.setting("rounds", 5, 1, "measured refreshes of each way in a turn, after one that is not")
    parser.setting("turns", 3, 1, "turns of all ways")
    parser.setting("processes", [2, 4], [2], "numbers of processes")
    options = parser.parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = options.out / "several-processes.csv"
    if not options.draw:
        widths = SMALL if options.quick else WIDTHS
        rows = []
        for _ in range(options.turns):  # the ways take turns, because the speed of a machine changes
            rows += run("alone", 1, options.rounds, widths)
            for processes in options.processes:
                for way in WAYS[1:]:
                    rows += run(way, processes, options.rounds, widths)
        write(path, rows, columns_of(Row))
    print(tables(read(path, Row)))


if __name__ == "__main__":
    main()
