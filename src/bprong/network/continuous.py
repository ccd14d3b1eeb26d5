"""Continuous whitening: every batch moves a whitener a little, instead of an exact factorisation from time to time.

Cardoso & Laheld (1996) whiten by the relative gradient  U ← U − μ (E[z†z†ᵀ] − I) U.  As it stands it diverges for large
μ, and on rank-deficient input for any μ. The stable form is exact for the second moment that it tracks,

    S' = (1−μ) S + μ VᵀV,      UᵀU = S⁻¹,   V (n, d) the rows of a batch, VᵀV their second moment with damping,

whose whitener moves by a factor T close to the identity. With V† = V Uᵀ, ρ = μ/(1−μ) and I + ρ V†V†ᵀ = L Lᵀ, (n, n),

    U' = T U,   T = (I − V†ᵀ A V†) / √(1−μ),   A = ρ (Lᵀ+I)⁻¹ L⁻¹,     T⁻¹ = √(1−μ) (I + ρ V†ᵀ (L+I)⁻¹ V†),

for any 0 < μ < 1 (Andrews' square root of Woodbury's identity). To first order T = I − μ/2 (V†ᵀV† − I), the relative
gradient with half of this μ; for one row it is Cardoso & Laheld's normalised algorithm. T depends on V† alone, so the
iteration is equivariant: on inputs A z it gives U A⁻¹.

The damping ε I has full rank, which the rows of a batch have not. It is added as rows √(Kε) e_j for a K-th of the
coordinates at each step, so that all coordinates have been damped within half of the 1/μ steps after which the tracked
moment forgets.

A side is factored exactly at the start (its *anchor*), and again once it has drifted from white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bprong.capture.measure import LayerMoments
from bprong.errors import LinAlgError, WhiteningError
from bprong.linalg.damped_inverse import Damping
from bprong.linalg.moments import finite, float64_device
from bprong.network.coordinates import Change, NearIdentity
from bprong.network.layers import WhitenedLayer
from bprong.whitening.layers import Layer, Layers
from bprong.whitening.side import Side


@dataclass(frozen=True)
class ContinuousSettings:
    """The constants of continuous whitening; docs/continuous.md reports how the first one was chosen."""

    cycles: int = 2  # times that every coordinate is damped within 1/μ steps: ε then stays within 0.77 … 1.27 of itself
    distance_rows: int = 256  # rows from which the distance from white is estimated
    drift: float = 2.0  # a side is anchored again once it is this many times farther from white than after its anchor
    smoothing: float = 0.2  # of the running average of distances, each of which is an estimate from one batch
    settling: int = 20  # steps after an anchor that measure how white it left the side and how much estimates scatter
    least_distance: float = 0.01  # squared, per coordinate; whatever is closer to white counts as this far
    certainty: float = 4.0  # standard errors by which a drift must stand out
    probe_rows: int = 8  # rows on which a step is checked; more would cost as much as the step itself


CONTINUOUS = ContinuousSettings()


def cycle(d: int, mu: float) -> int:
    """K, the number of steps in which every one of d coordinates is damped once."""
    return max(1, min(int(1 / (CONTINUOUS.cycles * mu)), d // 2))  # `distance` needs pairs: two coordinates or more


def damping_rows(U: Tensor, epsilon: Tensor, mu: float, turn: int) -> Tensor:
    """The rows √(Kε) U e_j (m, d) that damp a K-th of the coordinates at step number `turn`; none if ε (d,) is 0.

    The order of the coordinates is a fixed random one, so that each part is a fair sample.

    >>> [damping_rows(torch.eye(4), torch.ones(4), 0.25, turn).argmax(dim=1).tolist() for turn in range(3)]
    [[2, 3], [1, 0], [2, 3]]
    """
    K = cycle(len(epsilon), mu)
    random = torch.Generator().manual_seed(len(epsilon))
    index = torch.randperm(len(epsilon), generator=random, device="cpu")[turn % K :: K].to(U.device)
    rows = (U[:, index] * (K * epsilon.to(U)[index]).sqrt()).mT
    return rows if bool(epsilon.any()) else rows[:0]


def centred_rows(z: Tensor, c: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Rows V of a centred second moment, and the mean c' = (1−μ)c + μz̄ that belongs to it.

    (1−μ)S + μVᵀV is then the moment about c' of the mixture of both, including the distance between their means.
    """
    mean = z.mean(dim=0)
    between = math.sqrt(1 - mu) * (mean - c)
    return torch.cat([(z - mean) / math.sqrt(len(z)), between.unsqueeze(0)]), c + mu * (mean - c)


def distance(z: Tensor, damped: Tensor) -> float:
    """An unbiased estimate of ‖M + E − I‖² / d for M = E[z†z†ᵀ] and E = ε UUᵀ; it can be negative.

    z: (n, d) rows z†. damped: (m, d) rows √ε U e_j for a fair sample of coordinates; none without damping.

    tr M² is estimated by (z†ᵢ·z†ⱼ)² over pairs i ≠ j. The product of a row with itself would add tr(M)²/n, the sampling
    noise for which the moment of a few rows is never white. The rows must not be those that chose U.
    """
    z = z[: CONTINUOUS.distance_rows]
    d = z.shape[-1]
    trace, squares = _trace_and_square(z)
    if len(damped):
        own = damped.square().sum(dim=-1)
        apart = (d - 1) * _trace_and_square(damped)[1]
        squares = squares + d * (own.square().mean() + apart + 2 * (z @ damped.mT).square().mean())
        trace = trace + d * own.mean()
    return float(squares - 2 * trace) / d + 1


def _trace_and_square(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates of tr M and tr M² for M = E[vvᵀ]; the second from pairs of different rows."""
    gram = rows @ rows.mT
    own = gram.diagonal()
    pairs = max(1, len(rows) * (len(rows) - 1))
    return own.mean(), (gram.square().sum() - own.square().sum()) / pairs


@dataclass
class Track:
    """What is remembered about one side between steps, besides its U and c, or its R.

    variance:  (d,) diagonal of the tracked moment, float64, for damping relative to it
    turn:      relative steps taken so far; chooses the coordinates that are damped next
    age:       steps since the anchor, an exact factorisation
    base:      mean distance from white over the first `settling` steps after it
    scatter:   sum of squared deviations from that mean
    smoothed:  running average of the distance from white
    """

    variance: Tensor
    turn: int = 0
    age: int = 0
    base: float = 0.0
    scatter: float = 0.0
    smoothed: float = 0.0

    def step(
        self, U: Tensor, c: Tensor | None, values: Tensor, count: int, mu: float, damping: Damping
    ) -> tuple[NearIdentity, Tensor | None]:
        """T and the new mean; raises WhiteningError if the side has drifted and needs an exact factorisation.

        values: (n, d) rows of a batch, with second moment Σ vvᵀ / count. c: their old mean; None if the side is not
        centred.
        """
        U = U.to(torch.promote_types(U.dtype, torch.float32))
        V = values.to(U) / math.sqrt(count)
        mean = None
        if c is not None:
            V, mean = centred_rows(values.to(U), c.to(U), mu)
        white = V @ U.mT
        self.variance = (1 - mu) * self.variance + mu * V.square().sum(dim=0).to(torch.float64)
        damped = damping_rows(U, damping.amounts(self.variance), mu, self.turn)
        unseen = white * math.sqrt(len(values))
        if c is not None:  # rows about the old mean, which was chosen without this batch
            unseen = unseen[:-1] + white[-1:] / math.sqrt(1 - mu)
        if self._drifted(distance(unseen, damped / math.sqrt(cycle(U.shape[-1], mu))), len(V), U.shape[-1], mu):
            raise WhiteningError("it has drifted from white")
        self.turn += 1
        self.age += 1
        return NearIdentity.whitening(torch.cat([white, damped]), mu), mean

    def _drifted(self, seen: float, n: int, d: int, mu: float) -> bool:
        """Whether the side is significantly farther from white than after its anchor, by the factor `drift`.

        seen: how far from white n rows of a new batch are, in coordinates that were chosen without it

        The side must also be farther than a running average of white rows would be: over n(2−μ)/μ of them, the squared
        distance is d/n · μ/(2−μ).
        """
        self.smoothed += (CONTINUOUS.smoothing if self.age else 1.0) * (seen - self.smoothed)
        if self.age < CONTINUOUS.settling:
            deviation = seen - self.base
            self.base += deviation / (self.age + 1)
            self.scatter += deviation * (seen - self.base)
            return False
        error = math.sqrt(self.scatter / (CONTINUOUS.settling - 1) * CONTINUOUS.smoothing / (2 - CONTINUOUS.smoothing))
        least = max(self.base, d / n * mu / (2 - mu), CONTINUOUS.least_distance)
        allowed = CONTINUOUS.drift**2 * least + CONTINUOUS.certainty * error
        return not self.smoothed <= allowed  # written so that NaN counts as drift


class ContinuousWhitening:
    """Moves the layers of a network by relative steps and says which sides need an exact factorisation, an anchor.

    layers   the layers by name; each belongs to a `WhitenedLayer`
    mu       μ: each step keeps 1 − μ of the moment tracked so far
    carry    is called with a layer and its change of coordinates after each step, to move the optimizer's state
    tracks   the sides that have been factored exactly before
    """

    def __init__(self, layers: Layers, mu: float, carry: Callable[[WhitenedLayer, Change], None]) -> None:
        for name, side in ((layer.name, side) for layer in layers.values() for side in layer.sides):
            if side.blocks.lead or side.blocks.positions > 1:
                raise ValueError(
                    f"layer {name!r}: its {side.name} side is whitened as {side.blocks}, and only a side of one "
                    f'block can be whitened continuously; use refresh="periodic", or whiten_ with a larger max_dim'
                )
        self.tracks: dict[Side, Track] = {}
        self._layers = layers
        self._mu = mu
        self._carry = carry

    def anchor(self, side: Side, second: Tensor) -> None:
        """Takes note that a side was factored exactly, from this second moment."""
        self.tracks[side] = Track(second.diagonal().clone(), self.tracks[side].turn if side in self.tracks else 0)

    def move_(self, layer: Layer, side: Side, measured: LayerMoments, damping: Damping) -> bool:
        """Moves one side by a relative step with the rows measured; False if it needs an anchor instead."""
        rows = measured.z_rows if side.of_inputs else measured.delta_rows
        if side not in self.tracks or not rows or measured.probe is None:
            return side in self.tracks  # a layer without rows waits for its next batch
        module = cast(WhitenedLayer, layer.linear.module)
        matrix = module.U if side.of_inputs else cast(Tensor, module.R)
        centred = side.of_inputs and module.centred
        values = torch.cat(rows)
        count = len(values) if side.of_inputs else measured.targets
        if (side.of_inputs and not centred and bool(module.c.any())) or not finite(values):
            return False  # only an anchor can set c back to 0, and it reports why a batch cannot be used
        try:
            T, mean = self.tracks[side].step(matrix, module.c if centred else None, values, count, self._mu, damping)
            change = module.rewhiten_(side, T.times(matrix.to(T.V)), mean, measured.probe[: CONTINUOUS.probe_rows], T)
        except (WhiteningError, LinAlgError):
            return False
        self._carry(module, change)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on, apart from the layers: tensors and plain values only."""
        return {
            layer.name: {side.name: asdict(self.tracks[side]) for side in layer.sides if side in self.tracks}
            for layer in self._layers.values()
        }

    def tracks_of(self, state: Mapping[str, Any]) -> dict[Side, Track]:
        """The `tracks` of a state; sides that it does not contain are anchored first.

        Raises ValueError if the state belongs to sides of other shapes.
        """
        tracks = {
            side: Track(**saved | {"variance": saved["variance"].to(float64_device(layer.weight))})
            for layer in self._layers.values()
            for side in layer.sides
            if (saved := state.get(layer.name, {}).get(side.name)) is not None
        }
        if wrong := [
            f"layer {layer.name!r}: the state's {side.name} variances have shape {tuple(tracks[side].variance.shape)}, "
            f"and this layer's have shape ({side.blocks.size},)"
            for layer in self._layers.values()
            for side in layer.sides
            if side in tracks and len(tracks[side].variance) != side.blocks.size
        ]:
            raise ValueError(wrong[0])
        return tracks
