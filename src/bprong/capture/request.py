"""What is asked of a training call, and what it gives: moments of the inputs and of the errors of layers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from bprong.capture.weights import WeightMatrix
from bprong.likelihood.families import Likelihood
from bprong.linalg.moments import Moments

Fisher = Literal["sampled", "exact", "empirical"]


@dataclass(frozen=True)
class Request:
    """What is to be measured at a step.

    weights:         of the layers to measure, with whether their z is centred
    inputs, errors:  of which of them to measure z, and δ, by name; inputs alone need no backward pass
    likelihood:      of the targets, given the output; None: errors are not measured
    fisher:          the targets behind δ: drawn from the model, all of them, or those of the data
    seed:            of the targets that are drawn
    rows:            whether to keep the rows themselves in the moments
    precise:         whether products of errors are summed in float64 where float32 would do for a step
    verify:          whether to find out if all uses of the layers' weights are recorded
    """

    weights: Mapping[WeightMatrix, bool]
    inputs: Set[str]
    errors: Set[str]
    likelihood: Likelihood | None
    fisher: Fisher = "sampled"
    seed: int = 0
    rows: bool = False
    precise: bool = False
    verify: bool = False


@dataclass
class LayerMoments:
    """What was measured of one layer.

    z, delta:     moments of its inputs and of its errors; None: not asked for, or nothing reached the layer
    called:       whether it was called, if only without any row
    unexplained:  whether its weight is also used in ways that were not recorded
    targets:      the number of targets whose errors were measured, whether they reached the layer or not
    probe:        the input of its last call in a pass of our own, on which outputs of the layer can be compared
    """

    z: Moments | None = None
    delta: Moments | None = None
    called: bool = False
    unexplained: bool = False
    targets: int = 0
    probe: Tensor | None = None

    def merge(self, other: LayerMoments) -> LayerMoments:
        """Return the moments of two batches, this one the earlier, as if they had been one."""
        targets = self.targets + other.targets
        delta = _merged_moments(self.delta, other.delta)
        return LayerMoments(
            z=_merged_moments(self.z, other.z),
            delta=delta and replace(delta, weight=float(targets)),  # errors that do not reach the layer are zero
            called=self.called or other.called,
            unexplained=self.unexplained or other.unexplained,
            targets=targets,
        )


def _merged_moments(earlier: Moments | None, later: Moments | None) -> Moments | None:
    """Return the moments of two batches, one of which may have none."""
    return earlier.merge(later) if earlier and later else earlier or later
