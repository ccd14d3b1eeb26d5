"""Which parameters of a model are whitened, how, and at what cost, before anything is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bprong.capture.weights import WeightMatrix, covered_weights, dotted
from bprong.checks import integer, one_of
from bprong.linalg.moments import MAX_DIM, Limits
from bprong.parallel.slices import written_type

FALLBACK = "fallback: Adam"


@dataclass(frozen=True)
class CoverageRow:
    """How one parameter is treated.

    treatment  "two-sided", "forward only", "fallback: Adam" or "frozen"
    reason     why it follows the fallback rule
    inputs, outputs
               the blocks in which its two sides are whitened, e.g. "784", "3 × 64", "20 × 300 blocks", "500 diagonal"
    memory     bytes kept for it beyond the parameter, its gradient and its momentum, with exact inverses; less where
               the optimizer uses low-rank inverses
    refresh    floating-point operations to factor its sides
    per_row    operations to measure one row; a convolution has a row for each output position of each example
    step       operations that a step takes beyond those of SGD
    """

    parameter: str
    shape: tuple[int, ...]
    treatment: str
    reason: str = ""
    inputs: str = ""
    outputs: str = ""
    memory: int = 0
    refresh: int = 0
    per_row: int = 0
    step: int = 0


@dataclass(frozen=True)
class Coverage:
    """A row for each parameter; prints as a table.

    momentum: the bytes of one momentum, or last update, of all parameters that are trained; AdamW keeps twice as much
    """

    rows: list[CoverageRow]
    momentum: int = 0

    @property
    def fallback(self) -> dict[str, str]:
        """The parameters that follow the fallback rule (Adam) instead, with the reason."""
        return {row.parameter: row.reason for row in self.rows if row.treatment == FALLBACK}

    @property
    def memory(self) -> int:
        """The bytes of all rows."""
        return sum(row.memory for row in self.rows)

    def __str__(self) -> str:
        header = ["parameter", "shape", "treatment", "inputs", "outputs", "memory", "refresh", "per row", "step", ""]
        lines = []
        for row in self.rows:
            shape = " × ".join(map(str, row.shape))
            costs = [(row.memory, "B"), (row.refresh, "flop"), (row.per_row, "flop"), (row.step, "flop")]
            amounts = [_amount(count, unit) if count else "" for count, unit in costs]
            lines.append([row.parameter, shape, row.treatment, row.inputs, row.outputs, *amounts, row.reason])
        refresh = sum(row.refresh for row in self.rows)
        step = sum(row.step for row in self.rows)
        return (
            f"{table(header, lines, left_aligned=(0, 1, 2, 3, 4, 9))}\n"
            f"in all {_amount(self.memory, 'B')} beside a momentum of {_amount(self.momentum, 'B')}, "
            f"where AdamW keeps {_amount(2 * self.momentum, 'B')}\n"
            f"{_amount(refresh, 'flop')} to factor all sides at a refresh, "
            f"{_amount(step, 'flop')} more than SGD at a step"
        )


def coverage(model: nn.Module, *, step: str = "auto", backward: bool = True, max_dim: int = MAX_DIM) -> Coverage:
    """How `BPRONG(model)` treats each parameter of a model, and at what cost, before anything is allocated.

    step       as for the optimizer: under "spectral" steps embeddings follow Adam, and biases have Adam's moments.
               "auto": as natural steps; while two kinds of steps are tried, there are weights and factors of both
    backward   False: as `PRONG` does
    max_dim    as for the optimizer

    >>> covered = coverage(nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10), nn.LayerNorm(10)))
    >>> covered.rows[0].treatment, covered.rows[0].inputs, covered.fallback
    ('two-sided', '784', {'3.weight': 'in LayerNorm', '3.bias': 'in LayerNorm'})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"coverage takes a model, not a {type(model).__name__}")
    one_of("step", step, ("auto", "natural", "spectral"))
    model = getattr(model, "_orig_mod", model)
    weights = list(covered_weights(model, Limits(integer("max_dim", max_dim, 1))))
    reasons = fallback_reasons(model, model.parameters())
    rows = []
    for name, p in model.named_parameters():
        weights_of_p = [weight for weight in weights if p is weight.weight or p is weight.bias]
        rows.append(_row(name, p, weights_of_p, backward, step == "spectral", reasons[p]))
    return Coverage(rows, sum(p.nbytes for p in model.parameters() if p.requires_grad))


def _row(
    name: str, parameter: Tensor, weights: list[WeightMatrix], backward: bool, spectral: bool, reason: str
) -> CoverageRow:
    """Return the row of a parameter; weights: those that it belongs to; reason: why there are none, if so."""
    shape = tuple(parameter.shape)
    if not parameter.requires_grad:
        return CoverageRow(name, shape, "frozen")
    moments = 2 * parameter.nbytes  # of Adam
    if not weights:
        return CoverageRow(name, shape, FALLBACK, reason, memory=moments)
    treatment = "two-sided" if backward else "forward only"
    first = weights[0]  # others are packed into the same parameters
    if first.weight is not parameter and any(weight.weight.requires_grad for weight in weights):
        return CoverageRow(name, shape, treatment, "with its weight", memory=moments * spectral)
    times = f"{len(weights)} × " if len(weights) > 1 else ""
    cost = sum((Counter(weight.cost(backward)) for weight in weights), Counter())
    if spectral and first.one_hot:
        return CoverageRow(name, shape, FALLBACK, "an embedding: spectral steps", memory=moments + cost["memory"])
    inputs = f"{times}{first.inputs}"
    outputs = f"{times}{first.outputs}" if backward else ""
    return CoverageRow(name, shape, treatment, "", inputs, outputs, **cost)


def fallback_reasons(model: nn.Module, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
    """Return why each of these parameters is not covered by an optimizer.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    >>> list(fallback_reasons(model, model[1].parameters()).values())
    ['in LayerNorm', 'in LayerNorm']
    """
    holders: dict[Tensor | None, dict[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            holders.setdefault(p, {})[dotted(prefix, name)] = module
    covered = {p for weight in covered_weights(model) for p in weight.parameters}
    return {p: _reason(p, holders.get(p, {}), p in covered) for p in parameters}


def _reason(parameter: Tensor, holders: Mapping[str, nn.Module], covered: bool) -> str:
    """Return why a parameter is not covered; holders: the modules that hold it, by the name that it has there."""
    if len(holders) != 1:
        return f"tied: {', '.join(holders)}" if holders else "not the model's"
    (kind,) = map(written_type, holders.values())
    if kind is nn.Embedding and not covered:
        return "in an Embedding with scale_grad_by_freq or sparse=True"
    if parameter.is_complex():
        return "complex"
    return f"in a {kind.__name__} that the optimizer was not built with" if covered else f"in {kind.__name__}"


def table(header: list[str], rows: list[list[str]], left_aligned: Collection[int] = ()) -> str:
    """Return text in columns, aligned to the right but for those with the numbers `left_aligned`.

    >>> print(table(["a", "size"], [["long", "1"]], left_aligned=[0]))
    a     size
    long     1
    """
    columns = []
    for i, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if i in left_aligned else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _amount(value: int, unit: str) -> str:
    """Return a number with a prefix of its unit.

    >>> _amount(0, "B"), _amount(999, "B"), _amount(2_460_000, "flop")
    ('0 B', '999 B', '2.46 Mflop')
    """
    power = min(4, (len(str(value)) - 1) // 3)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T'][power]}{unit}"
