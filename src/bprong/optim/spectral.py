"""The spectral step: Muon in whitened coordinates, written in ordinary ones.

    ΔW = −η s Rᵀ msgn(R M Uᵀ) U,   M = M_W − M_b cᵀ        msgn(X) = (XXᵀ)^(-1/2) X

M_W and M_b are averages of the gradients with Nesterov's correction, as in Muon (Jordan et al., 2024), and s gives each
weight a step of the same root mean square. msgn commutes with rotations, so every root R, U of the inverses gives the
same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from bprong.linalg.factors import LOW_RANK_ERROR, Damping, centred
from bprong.linalg.orthogonal import whitened_msgn
from bprong.optim.options import Power, Setup
from bprong.optim.rules import (
    CHOSEN_MOMENTUM,
    Directions,
    Fallback,
    Gradients,
    Group,
    RuleWithDamping,
    decay_,
    kept,
    note_lengths,
)
from bprong.whitening.layer import SIDES, Layer, SideName
from bprong.whitening.layers import Layers, Pairs, WeightAndBias, stacked

AVERAGE = "gradient_average"  # its key in a parameter's state
RANK_ERROR = 2 * LOW_RANK_ERROR  # because the power is half by default
DAMPING: Mapping[SideName, Damping] = dict.fromkeys(SIDES, Damping(1.0, "mean", RANK_ERROR))  # docs/spectral.md
# docs/auto.md
AUTOMATIC_DAMPING: Mapping[SideName, Damping] = {
    **DAMPING,
    "forward": Damping(1.0, "variance", RANK_ERROR),
}  # docs/auto.md
RMS = 0.2  # of a weight's step at lr=1: about that of an Adam step, so that learning rates are alike
SMALLEST = 1e-30  # a direction shorter than this is zero


@dataclass(frozen=True)
class SpectralDirections(Directions):
    """What a spectral step adds to each parameter.

    fallback: the rule of biases and of all parameters that are not whitened
    power:    "whole": UᵀU = (Ž+ε)⁻¹ and RᵀR = (D+ε)⁻¹; "half": (Ž+ε)^(-1/2) and (D+ε)^(-1/2)
    rms:      the root mean square of a weight's step at lr=1; None: the formula as it is, s = 1
    """

    name = "spectral"
    momentum = 0.9
    early_parts = (2,)  # the length of a step does not depend on the statistics: fewer refreshes at first will do
    adapts_damping = False
    keeps_last_update = False  # an average of gradients takes its place

    fallback: Fallback
    power: Power = "half"
    rms: float | None = RMS

    @classmethod
    def of(cls, setup: Setup) -> SpectralDirections:
        return cls(Fallback(setup.options.fallback_betas), setup.options.power)

    @classmethod
    def damping(cls, setup: Setup) -> dict[SideName, Damping]:
        return setup.damping(AUTOMATIC_DAMPING)

    def check_group(self, group: Group) -> None:
        """Raises ValueError if a group has no momentum, because a single gradient is too noisy for a spectral step."""
        if not group["momentum"]:
            raise ValueError('step="spectral" averages gradients: momentum must be above 0; the default is 0.9')

    def by_kind(
        self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]
    ) -> dict[str, dict[Tensor, Tensor]]:
        """One direction, in which Adam's is contained. The averages in the parameters' states advance."""
        values = gradients.values
        whitened = [x for x in layers.values() if x.weight in values and not x.linear.one_hot]  # embeddings follow Adam
        averages = _averages([p for layer in whitened for p in layer.parameters if p in values], gradients)
        weights = {layer.weight for layer in whitened}
        others = {p: g for p, g in values.items() if p not in weights}
        steps = self.fallback.directions(others, gradients.states, rates)
        # A bias has a step of its own, and moves by what centring asks for at the rate of its weight.
        for p, step in layers.by_parameter(averages, partial(self._directions, layers, rates)).items():
            steps[p] = steps[p] + step if p in steps else step
        return {"whitened": steps}

    def _directions(self, layers: Layers, rates: Mapping[Tensor, float], pairs: Pairs) -> dict[Layer, WeightAndBias]:
        """−η s Rᵀ msgn(R M Uᵀ) U of each layer, and zero for its bias."""
        pairs = {layer: pair for layer, pair in pairs.items() if pair[0] is not None}
        directions: dict[Layer, Tensor] = {}
        units: list[Tensor | None] = []
        for stack in layers.stacks(pairs):
            matrices = [centred(cast(Tensor, pairs[layer][0]), pairs[layer][1], layer.c) for layer in stack.layers]
            matrix = cast(Tensor, stacked(matrices))
            factors = [stack.left, stack.right]
            if self.power == "half":
                factors = [factor and factor.root for factor in factors]
            msgn = whitened_msgn(matrix if stack.u is None else matrix / stack.u, *factors)
            units += stack.units
            directions |= zip(stack.layers, [msgn] if len(matrices) == 1 else msgn.unbind(), strict=True)
        if not directions:
            return {}
        steps = list(directions.values())
        scales = [-rates[layer.weight] for layer in directions]
        if self.rms is not None:
            norms = torch._foreach_norm(steps)
            torch._foreach_clamp_min_(norms, SMALLEST)
            torch._foreach_div_(steps, norms)
            scales = [scale * self.rms * math.sqrt(d.numel()) for scale, d in zip(scales, steps, strict=True)]
        torch._foreach_mul_(steps, scales)
        weights_and_biases: dict[Layer, WeightAndBias] = {}
        for layer, step, u in zip(directions, steps, units, strict=True):
            M_b = pairs[layer][1]
            zero = None if M_b is None else torch.zeros_like(M_b)
            weights_and_biases[layer] = step if u is None else step.div_(u), zero
        return weights_and_biases


class Spectral(RuleWithDamping):
    """Spectral steps at the learning rates of the parameter groups, with decoupled weight decay as in AdamW."""

    momentum = SpectralDirections.momentum
    early_parts = SpectralDirections.early_parts

    def __init__(self, setup: Setup) -> None:
        if setup.bound(None) is not None:
            raise ValueError("max_step would have no effect: the length of spectral steps depends on lr alone")
        self.direction = SpectralDirections.of(setup)
        super().__init__(setup.damping(DAMPING), few=setup.has_default_damping)

    def __str__(self) -> str:
        return "spectral steps"

    def check_group(self, group: Group) -> None:
        self.direction.check_group(group)

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rates = {p: float(group["lr"]) for p, group in gradients.groups.items()}
        steps = self.direction.by_kind(gradients, layers, rates)["whitened"]
        decay_(gradients.groups)
        torch._foreach_add_(list(steps), [step.to(p.dtype) for p, step in steps.items()])
        if gradients.noted:
            note_lengths(steps, layers, dict.fromkeys(steps, 1.0))


def _averages(parameters: list[Tensor], gradients: Gradients) -> dict[Tensor, Tensor]:
    """The averages of the gradients, which advance, with Nesterov's correction: what the next average would be."""
    averages = {}
    for p in parameters:
        group = gradients.groups[p]
        # Zero: natural steps, which have none, have lost a race.
        momentum = group.get(CHOSEN_MOMENTUM, group["momentum"]) or SpectralDirections.momentum
        average = kept(gradients.states[p], AVERAGE, p)
        average.lerp_(gradients.values[p], 1 - momentum)
        averages[p] = gradients.values[p].lerp(average, momentum)
    return averages
