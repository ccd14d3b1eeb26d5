"""Continuous whitening: every batch moves a whitener a little, instead of an exact factorisation from time to time.

The paper leaves open whether this is better. It is not (docs/continuous.md), so it is an experiment.

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

A side is factored exactly at the start (its *anchor*), and again once it has drifted from white. If S is the moment of
the batches, tr(V†ᵀV†)/d is 1 on average, whatever the sampling noise. A side has drifted when the running average of
this, which starts at 1 and forgets as S does, leaves ½ … 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.request import LayerMoments, Request
from bprong.checks import number
from bprong.errors import LinAlgError, WhiteningError
from bprong.likelihood.declared import Declaration
from bprong.linalg.factors import Damping
from bprong.linalg.moments import Moments, at_least_float32, to_float64
from bprong.network.coordinates import Multiplier
from bprong.network.rewhitening import Refresh, Rewhitening
from bprong.whitening.layer import Layer, Side, SideName

PROBE_ROWS = 8  # rows on which a relative step is checked; more would cost as much as the step itself
CYCLES = 2  # times that every coordinate is damped within 1/μ steps: ε then stays within 0.77 … 1.27 of itself
DRIFT = 2.0  # a side is anchored again once its whitened rows are this many times too long or too short, squared


class Track(NamedTuple):
    """What is remembered about one side between steps, besides its U and c, or its R.

    length:  running average of tr(V†ᵀV†)/d, the squared length of whitened rows per coordinate
    turn:    relative steps since the anchor; chooses the coordinates that are damped next
    """

    length: float = 1.0
    turn: int = 0

    def step(self, U: Tensor, V: Tensor, mu: float, damping: Damping) -> tuple[Multiplier, Track]:
        """Return T of the relative step by rows V (n, d) of a batch, VᵀV their second moment, and the track after it.

        Raises WhiteningError if the side has drifted and needs an exact factorisation.
        """
        epsilon = damping.amounts(V.square().sum(dim=0))  # relative damping is linear in these, and averages like them
        rows = torch.cat([V @ U.mT, damping_rows(U, epsilon, mu, self.turn)])
        length = (1 - mu) * self.length + mu * float(rows.square().sum()) / len(U)
        if not 1 / DRIFT <= length <= DRIFT:  # written so that NaN counts as drift
            raise WhiteningError("it has drifted from white")
        return near_identity(rows, mu), Track(length, self.turn + 1)


def damping_rows(U: Tensor, epsilon: Tensor, mu: float, turn: int) -> Tensor:
    """Return the rows √(Kε) U e_j (m, d) that damp every K-th of the coordinates at step number `turn`, for ε (d,).

    >>> [damping_rows(torch.eye(4), torch.ones(4), 0.25, turn).argmax(dim=1).tolist() for turn in range(3)]
    [[0, 2], [1, 3], [0, 2]]
    """
    K = max(1, int(1 / (CYCLES * mu)))
    damped = slice(turn % K, None, K)
    return (U[:, damped] * (K * epsilon[damped]).sqrt()).mT


def centred_rows(V: Tensor, mean: Tensor, c: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """Return rows V of a second moment about the mean z̄ as rows about c' = (1−μ)c + μz̄, and c'.

    (1−μ)S + μVᵀV is then the moment about c' of the mixture of both, including the distance between their means.
    """
    between = math.sqrt(1 - mu) * (mean - c)
    return torch.cat([V, between.unsqueeze(0)]), c + mu * (mean - c)


def near_identity(V: Tensor, mu: float) -> Multiplier:
    """Return T with T ((1−μ) I + μ VᵀV) Tᵀ = I, for rows V (n, d) in whitened coordinates."""
    if len(V) > V.shape[-1]:
        V = torch.linalg.qr(V, mode="r").R  # d rows with the same VᵀV
    rho = mu / (1 - mu)
    gram = to_float64(V @ V.mT)
    one = torch.eye(len(V), dtype=gram.dtype, device=gram.device)
    L = torch.linalg.cholesky(one + rho * (gram + gram.mT) / 2)
    # Triangular solves of the batch's size cost little in float64; the products with V keep its own precision.
    B = torch.linalg.solve_triangular(L + one, rho * one, upper=False)
    A = torch.linalg.solve_triangular(L.mT, B, upper=True).mT
    gain = (1 - mu) ** -0.5
    return Multiplier(partial(_times, gain, V, -A.to(V)), partial(_times, 1 / gain, V, B.mT.to(V)))


def _times(gain: float, V: Tensor, C: Tensor, M: Tensor) -> Tensor:
    """Return gain · (I + VᵀCV) M, for V (n, d), C (n, n) and M (d, k): 4ndk operations."""
    V = V.to(M)
    return torch.addmm(M, V.mT, C.to(M) @ (V @ M), alpha=gain, beta=gain)


class ContinuousRewhitening(Rewhitening):
    """Moves the coordinates of the paper's network a little with every batch that is given to `step`.

    An exact factorisation, an anchor, takes place only at the start and when a side has drifted from white; `step`
    returns the anchors. It works in one process, and for sides of one block.

    rate     μ, such as 0.05: a relative step keeps 1 − μ of the statistics before it
    options  those of `bprong.Rewhitening`, without average; every fifth batch is measured by default

    >>> from bprong import whiten_
    >>> model = whiten_(nn.Sequential(nn.Linear(4, 3)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> rewhitening = ContinuousRewhitening(model, optimizer, "cross_entropy", rate=0.05, backward_offset=0)
    >>> [len(rewhitening.step(torch.randn(20, 4))) for _ in range(11)]
    [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        loss: Declaration | None = None,
        *,
        rate: float,
        forward_every: int = 5,
        **options: Any,
    ) -> None:
        self._mu = number("rate", rate, 1e-6, 1)
        if options.get("average"):
            raise ValueError("continuous whitening averages over batches by its rate: leave out average")
        super().__init__(model, optimizer, loss, forward_every=forward_every, **options)
        # By layer and side: of those that have an anchor.
        self._tracks: dict[str, dict[SideName, Track]] = {name: {} for name in self._layers}
        for layer in self._layers.values():
            for side in layer.sides:
                if side.blocks.lead:
                    raise ValueError(
                        f"layer {layer.name!r}: its {side.name} side is whitened as {side.blocks}, and only a side of "
                        f"one block can be whitened continuously; use Rewhitening, or whiten_ with a larger max_dim"
                    )

    def step(self, x: Any, y: Tensor | None = None) -> list[Refresh]:
        """Do what is due at this iteration with batch x (and targets y, for the empirical Fisher matrix)."""
        if self._ranks.size > 1:
            raise ValueError("continuous whitening works in one process only: use Rewhitening in several")
        return super().step(x, y)

    def _request(self) -> Request:
        """Return what to measure: relative steps need the rows of z and δ."""
        return replace(super()._request(), rows=True)

    def _take(
        self,
        measured: Mapping[str, LayerMoments],
        refreshed: list[Refresh],
        layer: Layer,
        side: Side,
        moments: Moments,
        damping: Damping,
        factor: object,
    ) -> None:
        """Move one side by a relative step or, if it has no anchor or has drifted, to the root of new moments."""
        tracks = self._tracks[layer.name]
        probe = cast(Tensor, measured[layer.name].probe)[:PROBE_ROWS]
        if side.name in tracks:
            try:
                tracks[side.name] = self._follow(tracks[side.name], layer, side, moments, damping, probe)
                side.moments = None
                return
            except (WhiteningError, LinAlgError):
                pass  # it needs an anchor; if the batch is not finite, this reports why it cannot be used
        super()._take(measured, refreshed, layer, side, moments, damping, factor)
        tracks[side.name] = Track()

    def _follow(
        self, track: Track, layer: Layer, side: Side, moments: Moments, damping: Damping, probe: Tensor
    ) -> Track:
        """Move one side by a relative step with the rows measured, and return its track; an error changes nothing."""
        module = layer.linear.module
        U = module.U if side.of_inputs else module.R
        U = U.to(at_least_float32(U.dtype))
        V = moments.values.to(U) / math.sqrt(moments.weight)
        mean = None
        if moments.mean is not None:
            V, mean = centred_rows(V, moments.mean.to(U), module.c.to(U), self._mu)
        T, track = track.step(U, V, self._mu, damping)
        self._move(layer, side, T.times(U), mean, probe, T)
        return track

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on: tensors and plain values only."""
        tracks = {}
        for name, sides in self._tracks.items():
            tracks[name] = {side: [*track] for side, track in sides.items()}
        return super().state_dict() | {"tracks": tracks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        super().load_state_dict(state)
        for name, sides in state["tracks"].items():
            self._tracks[name] = {side: Track(*track) for side, track in sides.items()}
