"""The spectral step: Muon in whitened coordinates, written in ordinary ones.

    ΔW = −η s Rᵀ msgn(R M Uᵀ) U,   M = M_W − M_b cᵀ        msgn(X) = (XXᵀ)^(-1/2) X

M_W and M_b are averages of the gradients with Nesterov's correction, as in Muon (Jordan et al., 2024), and s gives each
weight a step of the same root mean square. msgn commutes with rotations, so every root R, U of the inverses gives the
same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor

from bprong.linalg.factors import Damping, centred
from bprong.linalg.orthogonal import Metric, WhitenedMsgn
from bprong.optim.fallback import Fallback, States
from bprong.optim.options import Power
from bprong.optim.rules import Directions, Gradients, Group, RuleWithDamping, Setup, note_lengths
from bprong.whitening.layer import SIDES, Layer, SideName, WeightAndBias
from bprong.whitening.layers import Layers

AVERAGE = "gradient_average"  # its key in a parameter's state
EARLY_PARTS = (2,)  # the length of a step does not depend on the statistics, so that they need fewer refreshes at first
MOMENTUM = 0.9
DAMPING: Mapping[SideName, Damping] = dict.fromkeys(SIDES, Damping(1.0, "mean"))  # docs/spectral.md
RMS = 0.2  # of a weight's step at lr=1: about that of an Adam step, so that learning rates are alike


@dataclass(frozen=True)
class SpectralDirections(Directions):
    """What a spectral step adds to each parameter.

    fallback: the rule of biases and of all parameters that are not whitened
    power:    "whole": UᵀU = (Ž+ε)⁻¹ and RᵀR = (D+ε)⁻¹; "half": (Ž+ε)^(-1/2) and (D+ε)^(-1/2)
    rms:      the root mean square of a weight's step at lr=1; None: the formula as it is, s = 1
    """

    name: ClassVar[str] = "spectral"
    momentum: ClassVar[float] = MOMENTUM
    early_parts: ClassVar[tuple[int, ...]] = EARLY_PARTS
    keeps_last_update: ClassVar[bool] = False  # an average of gradients takes its place

    fallback: Fallback
    power: Power = "half"
    rms: float | None = RMS

    @classmethod
    def of(cls, setup: Setup) -> SpectralDirections:
        return cls(setup.options.fallback(1.0), setup.options.power)

    def check_group(self, group: Group) -> None:
        """Raises ValueError if a group has no momentum, because a single gradient is too noisy for a spectral step."""
        if not group["momentum"]:
            raise ValueError('step="spectral" averages gradients: momentum must be above 0; the default is 0.9')

    def by_kind(
        self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]
    ) -> dict[str, dict[Tensor, Tensor]]:
        """One direction, in which Adam's is contained."""
        return {"whitened": self.steps(gradients, layers, rates)}

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        """Creates the states of the parameters."""
        trained = _moved(gradients, layers)
        weights = {layer.weight for layer in trained}
        for p in {p for layer in trained for p in layer.parameters} & gradients.values.keys():
            _average(p, gradients.states)
        for p, g in gradients.values.items():
            if p not in weights:
                self.fallback.prepare(g, gradients.states[p])

    def steps(self, gradients: Gradients, layers: Layers, rates: Mapping[Tensor, float]) -> dict[Tensor, Tensor]:
        """The steps by parameter; rates: their learning rates. The averages in the parameters' states advance."""
        trained = _moved(gradients, layers)
        weights = {layer.weight for layer in trained}
        averages = _averages([p for layer in trained for p in layer.parameters if p in gradients.values], gradients)
        others = {p: g for p, g in gradients.values.items() if p not in weights}
        steps = self.fallback.directions(others, gradients.states, rates)
        compute = partial(self._directions, layers, trained, rates)
        # A bias has a step of its own, and moves by what centring asks for at the rate of its weight.
        for p, step in layers.by_parameter(averages, compute).items():
            steps[p] = steps[p] + step if p in steps else step
        return steps

    def _directions(
        self,
        all_layers: Layers,
        moved: Sequence[Layer],
        rates: Mapping[Tensor, float],
        averages: Mapping[Tensor, Tensor],
    ) -> dict[Layer, WeightAndBias]:
        """−η s Rᵀ msgn(R M Uᵀ) U of each layer, and zero for its bias."""
        layers = moved if all_layers.sharding is None else [layer for layer in moved if all_layers.is_own(layer)]
        if not layers:
            return {}
        pairs = [layer.gradients(averages) for layer in layers]
        matrices = [centred(cast(Tensor, M_W), M_b, layer.c) for layer, (M_W, M_b) in zip(layers, pairs, strict=True)]
        dtypes = [M.dtype for M in matrices]
        key = tuple([layer.name for layer in layers]), tuple(dtypes), self.power
        msgn = all_layers.cached(
            key, lambda: WhitenedMsgn(matrices, [self._metric(*x) for x in zip(layers, dtypes, strict=True)])
        )
        steps = msgn(matrices)
        factors = [-rates[layer.weight] for layer in layers]
        if self.rms is not None:
            norms = torch._foreach_norm(steps)
            torch._foreach_clamp_min_(norms, SMALLEST)
            torch._foreach_div_(steps, norms)
            factors = [factor * self.rms * math.sqrt(d.numel()) for factor, d in zip(factors, steps, strict=True)]
        torch._foreach_mul_(steps, factors)
        zeros = [None if M_b is None else torch.zeros_like(M_b) for _, M_b in pairs]
        return dict(zip(layers, zip(steps, zeros, strict=True), strict=True))

    def _metric(self, layer: Layer, dtype: torch.dtype) -> Metric:
        """The factors of a layer."""
        factors = [side.factor for side in (layer.backward, layer.forward)]
        if self.power == "whole":
            return Metric(*factors)
        return Metric(*[None if factor is None else factor.root for factor in factors])


class Spectral(RuleWithDamping):
    """Spectral steps at the learning rates of the parameter groups, with decoupled weight decay as in AdamW."""

    momentum = MOMENTUM
    early_parts = EARLY_PARTS

    def __init__(self, damping: Mapping[SideName, Damping], direction: SpectralDirections, few: bool = False) -> None:
        super().__init__(damping, few)
        self.direction = direction

    @classmethod
    def of(cls, setup: Setup) -> Spectral:
        if setup.bound(None) is not None:
            raise ValueError("max_step would have no effect: the length of spectral steps depends on lr alone")
        return cls(setup.damping(DAMPING), SpectralDirections.of(setup), setup.has_default_damping)

    def check_group(self, group: Group) -> None:
        self.direction.check_group(group)

    def prepare(self, gradients: Gradients, layers: Layers) -> None:
        self.direction.prepare(gradients, layers)

    def step_(self, gradients: Gradients, layers: Layers) -> None:
        rates = {p: float(group["lr"]) for p, group in gradients.groups.items()}
        steps = self.direction.steps(gradients, layers, rates)
        for p, group in gradients.groups.items():
            if group["weight_decay"]:
                p.mul_(1 - rates[p] * group["weight_decay"])
        torch._foreach_add_(list(steps), [step.to(p.dtype) for p, step in steps.items()])
        if gradients.noted:
            note_lengths(steps, layers)


SMALLEST = 1e-30  # a direction shorter than this is zero


def _moved(gradients: Gradients, layers: Layers) -> list[Layer]:
    """The layers that make spectral steps: those with a gradient, without embeddings."""
    return [layer for layer in layers.values() if layer.weight in gradients.values and not layer.linear.one_hot]


def _average(parameter: Tensor, states: States) -> Tensor:
    """The average of a parameter's gradients, which starts at zero; converted, if the model was."""
    state = states[parameter]
    average: Tensor | None = state.get(AVERAGE)
    if average is None:
        average = torch.zeros_like(parameter)
    elif average.dtype is not parameter.dtype:
        average = average.to(parameter.dtype)
    state[AVERAGE] = average
    return average


def _averages(parameters: Sequence[Tensor], gradients: Gradients) -> dict[Tensor, Tensor]:
    """The averages of the gradients, which advance, with Nesterov's correction: what the next average would be."""
    corrected_averages: dict[Tensor, Tensor] = {}
    kinds: dict[float, list[Tensor]] = {}
    for p in parameters:
        kinds.setdefault(gradients.groups[p]["momentum"], []).append(p)
    for momentum, members in kinds.items():
        values = [gradients.values[p] for p in members]
        averages = [_average(p, gradients.states) for p in members]
        torch._foreach_lerp_(averages, [g.to(p.dtype) for p, g in zip(members, values, strict=True)], 1 - momentum)
        converted = [average.to(g.dtype) for average, g in zip(averages, values, strict=True)]
        corrected = torch._foreach_lerp(values, converted, momentum)
        corrected_averages |= dict(zip(members, corrected, strict=True))
    return corrected_averages
