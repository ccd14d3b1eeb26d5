"""Calls → moments: z and δ of the recorded calls of some weights.

δ is measured per example, for the *summed* negative log-likelihood of targets drawn from the model, so it does not
depend on how the user's loss is reduced or scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from bprong.capture.backprop import (
    Fisher,
    leading_to,
    nonzero_rows,
    of_targets,
    roots_of,
    rows_that_count,
    send_back,
    unexplained,
)
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


def merged(parts: Sequence[LayerMoments]) -> LayerMoments:
    """The moments of several batches, as if they had been one."""
    if len(parts) == 1:
        return parts[0]
    delta = _together(part.delta for part in parts)
    if delta is not None:  # the errors of batches that did not reach the layer are zero
        delta = replace(delta, weight=delta.weight + sum(part.targets for part in parts if part.delta is None))
    return LayerMoments(
        z=_together(part.z for part in parts),
        delta=delta,
        probe=next((part.probe for part in reversed(parts) if part.probe is not None), None),
        called=any(part.called for part in parts),
        empty=any(part.empty for part in parts),
        unexplained=any(part.unexplained for part in parts),
        targets=sum(part.targets for part in parts),
    )


def gathered(
    earlier: Mapping[str, LayerMoments], later: Mapping[str, LayerMoments]
) -> tuple[Mapping[str, LayerMoments], Mapping[str, LayerMoments]]:
    """Two batches, with the moments of the layers that both have moved to the later one."""
    both = earlier.keys() & later.keys()
    sums = {name: merged([earlier[name], later[name]]) for name in both}
    emptied = {name: LayerMoments(called=earlier[name].called, empty=earlier[name].empty) for name in both}
    return {**earlier, **emptied}, {**later, **sums}


def _together(found: Iterable[Moments | None]) -> Moments | None:
    present = [moments for moments in found if moments is not None]
    return reduce(Moments.merge, present) if present else None


def record(
    model: nn.Module,
    weights: Mapping[WeightMatrix, bool],
    x: Any,
    y: Tensor | None,
    *,
    likelihood: Likelihood | None,
    fisher: Fisher,
    inputs: Set[str] | None = None,
    errors: Set[str] | None = None,
    rows: bool = False,
    counted: Tensor | None = None,
    class_dim: int | None = None,
    verify: bool = False,
    head: Head | None = None,
    seed: int,
) -> dict[str, LayerMoments]:
    """Run `model` on x and measure the layers of some weights, given with whether their z is centred.

    inputs, errors: of which layers to measure z, and δ, by name; None: of all
    class_dim:  see `output.laid_out`
    head:       finds the output; for the other arguments see `measure`
    """
    centred = {weight.name: centre for weight, centre in weights.items()}
    errors = centred.keys() if errors is None else errors
    with recorded_run(model, weights, x, seed, bool(errors) or counted is not None or verify, head) as (parts, calls):
        measured = measure(
            centred, Output.of(parts, class_dim), calls, y, likelihood=likelihood, fisher=fisher,
            inputs=centred.keys() if inputs is None else inputs, errors=errors, rows=rows, counted=counted,
            verify=verify,
        )  # fmt: skip
        for call in calls:
            measured[call.weight.name].probe = call.z
        return measured


def measure(
    centred: Mapping[str, bool], output: Output, recorded: Calls, y: Tensor | None, *,
    likelihood: Likelihood | None, fisher: Fisher, inputs: Set[str], errors: Set[str], rows: bool = False,
    counted: Tensor | None = None, verify: bool = False,
) -> dict[str, LayerMoments]:  # fmt: skip
    """The moments of recorded calls that led to an output.

    centred:     the layers to measure, by name, and whether their z is centred
    y:           the targets of the data, used by fisher="empirical" only
    likelihood:  None: measure inputs only
    inputs, errors: of which layers to measure z, and δ, by name; inputs alone need no backward pass
    rows:        keep the rows themselves in the moments
    counted:     which targets the loss counts, without the output's last dimension; None: all
    verify:      find out whether all uses of the layers' weights are recorded
    """
    calls = leading_to(output, recorded)
    called = {call.weight.name for call in calls}
    measured = {name: LayerMoments(called=name in called, empty=name in recorded.empty) for name in centred}
    values = output.values
    if likelihood is not None:
        likelihood.check(values)
        counted = likelihood.counted(values, counted)
    counted = None if counted is None else counted.flatten()
    reached: dict[Call, Tensor] = {}
    if errors and likelihood is not None:
        roots = roots_of(values, y, likelihood, fisher)
        targets = likelihood.targets(values)
        if counted is not None:
            roots = map(partial(of_targets, counted=counted), roots)
            targets = int(counted.sum())
        chosen = [call for call in calls if call.weight.name in errors]
        masked = {call for call in chosen if counted is not None or call.is_sequence}
        reached = _add_errors(measured, output, chosen, roots, targets, rows, masked)
        for name in errors & measured.keys():
            measured[name].targets = targets
    counted_rows = (
        _without_padding(calls, reached) if counted is None else rows_that_count(output, calls, counted, reached)
    )
    sums = {name: Sums(centre, rows) for name, centre in centred.items()}
    for call in calls:
        if call.weight.name in inputs:
            call.add_inputs(sums[call.weight.name], counted_rows.get(call))
    for name, own in sums.items():
        measured[name].z = own.moments() if own.rows else None
    for name in unexplained(output, calls) if verify else ():
        measured[name].unexplained = True
    return measured


def _add_errors(
    measured: Mapping[str, LayerMoments], output: Output, calls: Sequence[Call], roots: Iterable[Tensor], targets: int,
    keep_rows: bool, masked: Set[Call],
) -> dict[Call, Tensor]:  # fmt: skip
    """Measures δ; returns for some of the calls masks (rows,) of the rows that errors came back to."""
    sums: dict[str, Sums] = defaultdict(partial(Sums, centre=False, keep_rows=keep_rows))
    reached: dict[Call, Tensor] = {}

    def take(call: Call, delta: Tensor) -> None:
        if call in masked:
            reached[call] = nonzero_rows(call, delta) | reached.get(call, False)
        call.add_errors(delta, sums[call.weight.name])

    for root in roots:
        send_back(output, calls, root, take)
    for name, own in sums.items():
        measured[name].delta = own.moments(float(targets))
    return reached


def _without_padding(calls: Iterable[Call], reached: Mapping[Call, Tensor]) -> dict[Call, Tensor]:
    """Masks (rows,) of the positions of sequences that errors come back to in some layer; padding is where they do not.

    Only calls of one shape are compared; where no errors were measured, there is no mask.
    """
    used: dict[torch.Size, Tensor] = {}
    for call, own in reached.items():
        if call.is_sequence:
            used[call.shape[:-1]] = own | used.get(call.shape[:-1], False)
    return {call: used[call.shape[:-1]] for call in calls if call.is_sequence and call.shape[:-1] in used}


# Which layers were reached --------------------------------------------------------------------------------------------


def with_gradient(weights: Iterable[WeightMatrix]) -> list[str]:
    """The names of the weights with a gradient, of themselves or of their bias, that is not zero, or sharded."""
    return [
        weight.name
        for weight in weights
        if any(
            p is not None and p.grad is not None and (is_sliced(p.grad) or bool(own(p.grad).any()))
            for own, p in ((weight.own, weight.weight), (weight.vector, weight.bias))
        )
    ]


def without_errors(measured: Mapping[str, LayerMoments]) -> list[str]:
    """The names of the layers that were called and that no error came back to."""
    return [name for name, m in measured.items() if m.called and m.delta is None]
