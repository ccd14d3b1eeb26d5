"""What would whitening cost on a large cluster? A count of operations, bytes and messages, checked against runs here.

The counts are those of the code: of `bprong.parallel` for what is exchanged, of the formulas of docs/scaling.md for
operations. They are compared with docs/several-processes.csv, then carried to a transformer of 10⁹ parameters. Seconds
come from the speeds of a GPU and of a network that are stated below; they are an estimate, not a measurement.

    python benchmarks/scaling_model.py       tables in Markdown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.command_line import DOCS, CommandLine
from several_processes import WIDTHS, Row

from bprong.experiments.bench.rows import grouped, read
from bprong.experiments.bench.tables import markdown
from bprong.whitening.ranks import FLAGS, NUMBERS

FLOAT32, FLOAT64 = 4, 8
GPU = 1.25e14  # operations a second of training: 40 % of an A100's 312 · 10¹² in bfloat16
FACTORING = 5e12  # of factorisations in float32 and float64
PRODUCTS = 6e13  # of products in float32, with TF32
NETWORK = 2.5e10  # bytes a second that a GPU sends and receives: 200 Gbit/s
LATENCY = 3e-5  # seconds of a message among 64 ranks; it grows with the logarithm of their number


@dataclass(frozen=True)
class Matrix:
    """The weight of a layer (outputs, inputs), whose sides are whitened in blocks of at most 4,096 features."""

    outputs: int
    inputs: int

    @property
    def blocks(self) -> list[int]:
        """The sizes of all blocks of both sides."""
        return [min(side, 4096) for side in (self.inputs, self.outputs) for _ in range(max(1, side // 4096))]

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True)
class Cost:
    """Of one rank: operations, bytes that it receives, messages.

    measuring, factoring, products: operations of statistics, of factorisations, of preconditioning gradients
    """

    measuring: float = 0.0
    factoring: float = 0.0
    products: float = 0.0
    bytes: float = 0.0
    messages: int = 0

    def seconds(self, ranks: int) -> float:
        latency = LATENCY * max(1.0, ranks.bit_length() / 7)
        computing = self.measuring / GPU + self.factoring / FACTORING + self.products / PRODUCTS
        return computing + self.bytes / NETWORK + self.messages * latency


def entries(matrices: Sequence[Matrix]) -> int:
    return sum(d * d for matrix in matrices for d in matrix.blocks)


def refresh(matrices: Sequence[Matrix], rows: int, ranks: int, sharded: bool) -> Cost:
    """A refresh of all sides; rows: tokens or examples of a rank."""
    sides = 2 * len(matrices)
    flags = 1 + 3 + len(FLAGS) * len(matrices)
    means = sum(matrix.inputs for matrix in matrices)
    tables = 2 + flags + means + 1 + NUMBERS * sides
    sent = FLOAT64 * (tables + entries(matrices)) + (0 if sharded else FLOAT32 * entries(matrices))
    back = 2 * rows * sum(matrix.size for matrix in matrices)  # the sampled errors on their way back
    return Cost(
        measuring=rows * entries(matrices) + back,
        factoring=sum(d**3 for matrix in matrices for d in matrix.blocks) / ranks,
        bytes=sent,
        messages=3 + 3 * len(matrices) + (0 if sharded else sides),
    )


def step(matrices: Sequence[Matrix], ranks: int, sharded: bool) -> Cost:
    """A step of a natural rule at a fixed rate.

    Sharded, slices of each gradient are gathered, and its owner broadcasts the direction, parameter by parameter.
    """
    products = sum(2 * m.size * (min(m.inputs, 4096) + min(m.outputs, 4096)) for m in matrices)
    if not sharded:
        return Cost(products=products)
    parameters = sum(m.size + m.outputs for m in matrices)
    return Cost(products=products / ranks, bytes=2 * FLOAT32 * parameters, messages=4 * len(matrices))


def validation(rows: Sequence[Row]) -> str:
    matrices = [Matrix(m, n) for n, m in pairwise(WIDTHS)]
    lines = []
    for (way, processes), own in grouped(rows, "way", "processes").items():
        if way == "shared":
            expected = refresh(matrices, 0, processes, sharded=False)
            found = own[0]
            lines.append([
                processes, f"{expected.bytes / 1e6:.3f}", f"{(found.refresh_bytes - found.step_bytes) / 1e6:.3f}",
                expected.messages, found.refresh_messages - found.step_messages,
            ])  # fmt: skip
    return markdown(["processes", "MB of a refresh: counted", "sent", "messages: counted", "sent"], lines)


def transformer(width: int, depth: int) -> list[Matrix]:
    """Query, key, value and output, and a perceptron of four times the width, in each block."""
    block = [Matrix(width, width)] * 4 + [Matrix(4 * width, width), Matrix(width, 4 * width)]
    return block * depth


def projection(tokens: int) -> str:
    """A transformer of 10⁹ parameters with as many tokens in each GPU's batch."""
    matrices = transformer(2048, 20)
    parameters = sum(matrix.size for matrix in matrices)
    training = 6 * parameters * tokens / GPU
    lines = []
    for sharded in (False, True):
        for ranks in (64, 256, 1024):
            each = step(matrices, ranks, sharded).seconds(ranks)
            refreshing = refresh(matrices, tokens, ranks, sharded).seconds(ranks)
            share = each / training
            period = f"{refreshing / max(1e-9, 0.1 * training - each):.0f}" if share < 0.1 else "–"
            state = entries(matrices) * (FLOAT64 + FLOAT32) / (ranks if sharded else 1)
            lines.append([
                "sharded" if sharded else "shared", ranks, f"{1000 * training:.0f}", f"{1000 * each:.0f}",
                f"{share:.1%}", f"{1000 * refreshing:.0f}", period, f"{state / 1e9:.2f}",
            ])  # fmt: skip
    titles = ["way", "GPUs", "training step, ms", "whitening of a step, ms", "of the step", "refresh, ms"]
    return markdown([*titles, "steps between refreshes for 10 % in all", "state, GB"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__)
    parser.setting("tokens", [16384, 65536], [64], "tokens of a GPU's batch")
    options = parser.parse(arguments)
    print(validation(read(DOCS / "several-processes.csv", Row)))
    for tokens in options.tokens:
        print(f"\n{tokens:,} tokens on each GPU:\n\n{projection(tokens)}")


if __name__ == "__main__":
    main()
