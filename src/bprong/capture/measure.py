"""Calls → moments: z and δ of the recorded calls of some weights.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.backprop import Fisher, Graph, nonzero_rows, of_targets, roots_of
from bprong.capture.calls import Call, Calls
from bprong.capture.output import Head, Output
from bprong.capture.own_pass import recorded_run
from bprong.capture.weights import WeightMatrix
from bprong.likelihood.families import Likelihood
from bprong.linalg.moments import Moments, Sums
from bprong.parallel.slices import is_sliced


@dataclass
class LayerMoments:
    """What was measured of one layer.

    z, delta:     moments of its inputs and of its errors; None: not asked for, or nothing reached the layer
    called:       whether it was called
    empty:        whether it was called without any row
    probe:        the input of its last call in a pass of our own, on which outputs of the layer can be compared
    unexplained:  whether its weight is also used in ways that were not recorded
    targets:      the number of targets whose errors were measured, whether they reached the layer or not
    """

    z: Moments | None = None
    delta: Moments | None = None
    called: bool = False
    empty: bool = False
    probe: Tensor | None = None
    unexplained: bool = False
    targets: int = 0

    def merge(self, other: LayerMoments) -> LayerMoments:
        """Return the moments of two batches, this one the earlier, as if they had been one."""
        delta = _merged_moments(self.delta, other.delta)
        for batch in (self, other):
            if delta and not batch.delta:  # the errors of a batch that did not reach the layer are zero
                delta = replace(delta, weight=delta.weight + batch.targets)
        return LayerMoments(
            z=_merged_moments(self.z, other.z),
            delta=delta,
            called=self.called or other.called,
            empty=self.empty or other.empty,
            probe=self.probe if other.probe is None else other.probe,
            unexplained=self.unexplained or other.unexplained,
            targets=self.targets + other.targets,
        )


def _merged_moments(earlier: Moments | None, later: Moments | None) -> Moments | None:
    """Return the moments of two batches, one of which may have none."""
    return earlier.merge(later) if earlier and later else earlier or later


def merged(parts: Sequence[LayerMoments]) -> LayerMoments:
    """The moments of several batches, as if they had been one."""
    return reduce(LayerMoments.merge, parts)


def gathered(
    earlier: Mapping[str, LayerMoments], later: Mapping[str, LayerMoments]
) -> tuple[Mapping[str, LayerMoments], Mapping[str, LayerMoments]]:
    """Two batches, with the moments of the layers that both have moved to the later one."""
    emptied = dict(earlier)
    sums = dict(later)
    for name in earlier.keys() & later.keys():
        emptied[name] = LayerMoments(called=earlier[name].called, empty=earlier[name].empty)
        sums[name] = earlier[name].merge(later[name])
    return emptied, sums


@dataclass(frozen=True)
class Measurement:
    """What is to be measured.

    likelihood:      of the targets, given the output; None: measure inputs only
    inputs, errors:  of which layers to measure z, and δ, by name; inputs alone need no backward pass
    fisher:          the targets behind δ: drawn from the model, all of them, or those of the data
    rows:            keep the rows themselves in the moments
    verify:          find out whether all uses of the layers' weights are recorded
    """

    likelihood: Likelihood | None
    inputs: Set[str]
    errors: Set[str]
    fisher: Fisher = "sampled"
    rows: bool = False
    verify: bool = False


def record(
    model: nn.Module,
    weights: Mapping[WeightMatrix, bool],
    x: Any,
    y: Tensor | None,
    wanted: Measurement,
    *,
    counted: Tensor | None = None,
    class_dim: int | None = None,
    head: Head | None = None,
    seed: int,
) -> dict[str, LayerMoments]:
    """Run `model` on x and measure the layers of some weights, given with whether their z is centred.

    class_dim:  see `output.laid_out`
    head:       finds the output; for the other arguments see `measure`
    """
    centred = {weight.name: centre for weight, centre in weights.items()}
    needs_graph = bool(wanted.errors) or counted is not None or wanted.verify
    with recorded_run(model, weights, x, seed, needs_graph, head) as (parts, calls):
        measured = measure(centred, Output.of(parts, class_dim), calls, y, wanted, counted)
        for call in calls:
            measured[call.weight.name].probe = call.z
        return measured


def measure(
    centred: Mapping[str, bool],
    output: Output,
    recorded: Calls,
    y: Tensor | None,
    wanted: Measurement,
    counted: Tensor | None = None,
) -> dict[str, LayerMoments]:
    """The moments of recorded calls that led to an output.

    centred:     the layers to measure, by name, and whether their z is centred
    y:           the targets of the data, used by fisher="empirical" only
    counted:     which targets the loss counts, without the output's last dimension; None: all
    """
    likelihood = wanted.likelihood
    if likelihood is not None:
        likelihood.check(output.values)
        counted = likelihood.counted(output.values, counted)
    graph = Graph(output)
    calls = graph.leading(recorded)
    called = {call.weight.name for call in calls}
    measured = {name: LayerMoments(called=name in called, empty=name in recorded.empty) for name in centred}
    reached: dict[Call, Tensor] = {}
    with recorded.quiet():
        if wanted.errors and likelihood is not None:
            roots = roots_of(output.values, y, likelihood, wanted.fisher)
            reached = _add_errors(measured, graph, calls, roots, likelihood.targets(output.values), wanted, counted)
        counted_rows = {} if counted is None else graph.rows_that_count(calls, counted, reached)
        unexplained = graph.unexplained(calls) if wanted.verify else set()
    padding = _padding(recorded.masks, calls, reached)
    sums = {name: Sums(centre, wanted.rows) for name, centre in centred.items()}
    for call in calls:
        if call.weight.name in wanted.inputs:
            rows = counted_rows.get(call)
            if call.is_sequence and call.shape[:-1] in padding:
                real = ~padding[call.shape[:-1]]
                rows = real if rows is None else rows & real
            call.add_inputs(sums[call.weight.name], rows)
    for name, layer in measured.items():
        layer.z = sums[name].moments() if sums[name].rows else None
        layer.unexplained = name in unexplained
    return measured


def _add_errors(
    measured: Mapping[str, LayerMoments],
    graph: Graph,
    calls: Sequence[Call],
    roots: Iterable[Tensor],
    targets: int,
    wanted: Measurement,
    counted: Tensor | None,
) -> dict[Call, Tensor]:
    """Measures δ; returns masks (rows,) of the rows that errors came back to, of the calls where that decides."""
    if counted is not None:
        roots = map(partial(of_targets, counted=counted), roots)
        targets = int(counted.sum())
    sums: dict[str, Sums] = defaultdict(partial(Sums, centre=False, keep_rows=wanted.rows))
    reached: dict[Call, Tensor] = {}

    def take(call: Call, delta: Tensor) -> None:
        if counted is not None or call.is_sequence:
            reached[call] = nonzero_rows(call, delta) | reached.get(call, False)
        call.add_errors(delta, sums[call.weight.name])

    chosen = [call for call in calls if call.weight.name in wanted.errors]
    for root in roots:
        graph.send_back(chosen, root, take)
    for name in wanted.errors & measured.keys():
        measured[name].targets = targets
        if name in sums:
            measured[name].delta = sums[name].moments(float(targets))
    return reached


def _padding(
    masks: Iterable[Tensor], calls: Sequence[Call], reached: Mapping[Call, Tensor]
) -> dict[torch.Size, Tensor]:
    """Return which positions of sequences are padding, (rows,), by the shape of the positions.

    A mask of positions tells it: one that the model or its attention is given, as lengths or position by position, or
    that of an embedding with a `padding_idx`. Errors tell which of its two values stands for padding: in no layer do
    they come back to any position that has it. Errors alone cannot tell, because none come back to a position that
    loses a maximum either.
    """
    used: dict[torch.Size, Tensor] = {}
    for call, rows in reached.items():
        if call.is_sequence:
            used[call.shape[:-1]] = rows | used.get(call.shape[:-1], False)
    embedded = [call.ignored.view(call.shape[:-1]) for call in calls if call.ignored is not None and call.is_sequence]
    padding: dict[torch.Size, Tensor] = {}
    for values in (*masks, *embedded) if used else ():
        for marked in _marked(values, used):
            if marked.shape in used:
                positions = marked.flatten().to(used[marked.shape].device)
                if not bool((positions & used[marked.shape]).any()):
                    padding[marked.shape] = positions | padding.get(marked.shape, False)
    return padding


def _marked(values: Tensor, shapes: Iterable[torch.Size]) -> Iterator[Tensor]:
    """Yield the positions, (B, T) or time-first, that a mask may mean, or that are beyond lengths of sequences (B,)."""
    if values.ndim == 1:
        for rows, columns in [shape for shape in shapes if len(shape) == 2]:
            if len(values) == rows:
                yield torch.arange(columns, device=values.device) >= values.unsqueeze(1)
            if len(values) == columns:
                yield torch.arange(rows, device=values.device).unsqueeze(1) >= values
        return
    mask = _as_mask(values)
    if mask is not None:
        yield from (mask, ~mask, mask.T, ~mask.T)


def _as_mask(values: Tensor) -> Tensor | None:
    """Return a tensor with two values as a mask (B, T); None: it is none.

    Of attention's mask (B, …, queries, keys): the keys that any query looks at.
    """
    if values.numel() == 0:
        return None
    high = values == values.amax()
    is_mask = bool((high | (values == values.amin())).all()) and not bool(high.all())
    mask = high if values.ndim == 2 else high.flatten(1, -2).any(dim=1)
    return mask if is_mask else None


# Which layers were reached --------------------------------------------------------------------------------------------


def with_gradient(weights: Iterable[WeightMatrix]) -> list[str]:
    """The names of the weights with a gradient, of themselves or of their bias, that is not zero, or sharded."""
    names = []
    for weight in weights:
        for part, parameter in ((weight.own, weight.weight), (weight.vector, weight.bias)):
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and (is_sliced(gradient) or bool(part(gradient).any())):
                names.append(weight.name)
                break
    return names


def without_errors(measured: Mapping[str, LayerMoments]) -> list[str]:
    """The names of the layers that were called and that no error came back to."""
    return [name for name, m in measured.items() if m.called and m.delta is None]
