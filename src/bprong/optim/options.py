"""What a user sets: options of an optimizer that few people change, and all that a step rule is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from torch import nn

from bprong.capture.request import Fisher
from bprong.capture.tape import Head, Key
from bprong.checks import integer, one_of, positive
from bprong.likelihood.loss import Loss
from bprong.linalg.factors import Damping
from bprong.linalg.moments import MAX_DIM
from bprong.optim.auto.evaluation import LossModel
from bprong.optim.rules import Defaults
from bprong.parallel.processes import Ranks
from bprong.whitening.layer import SideName, Solver
from bprong.whitening.layers import Layers
from bprong.whitening.schedule import Mode, Periods, Schedule

Power = Literal["half", "whole"]
OVERHEAD = 0.1  # the share of run time to spend on statistics and factorisations, where no period is given


@dataclass(frozen=True)
class Options:
    """Options of `BPRONG` and `PRONG` that few people change; a mapping with these keys does as well.

    fisher            targets behind D: "sampled" from the model, "exact" (no sampling, one backward pass for each
                      output of a target) or "empirical" (the data's: those of the loss, or of `observe(x, y)`)
    average           the factor on the weight of past statistics at each measurement (exponential decay); 0: no average
    seed              of sampled targets; by default torch's initial seed
    power             of step="spectral": "half", whitening by (Ž+ε)^(-1/4) and (D+ε)^(-1/4), or "whole", by
                      (Ž+ε)^(-1/2) and (D+ε)^(-1/2), which is Muon on W† of the paper's network
    solver            "exact" factors; "low-rank" ones, whose steps differ from exact ones by at most 0.4 of these in
                      the metric of the side itself; "auto": low rank for wide sides where it makes steps cheaper
    max_dim           sides with more features than this are whitened in blocks
    output            what the loss is computed from, if the model returns more than one tensor: a key or attribute, or
                      an index. By default the logits or the first tensor; a loss that the model computes itself is
                      recognised
    """

    fisher: Fisher = "sampled"
    average: float = 0.9
    seed: int | None = None
    power: Power = "half"
    solver: Solver = "auto"
    max_dim: int = MAX_DIM
    output: Key | None = None

    def __post_init__(self) -> None:
        one_of("options['power']", self.power, get_args(Power))
        one_of("options['solver']", self.solver, get_args(Solver))
        integer("options['max_dim']", self.max_dim, 1)

    @classmethod
    def of(cls, options: Options | Mapping[str, Any] | None) -> Options:
        """The options as they are, or from a mapping."""
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options must be a bprong.optim.Options or a mapping, not {options!r}")
        names = cls.__dataclass_fields__
        if unknown := [name for name in options or {} if name not in names]:
            raise ValueError(f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(names)}")
        return cls(**options or {})

    def schedule(self, layers: Layers, every: int | Periods | None, backward: bool, rule: Defaults) -> Schedule:
        """The schedule of layers; refuses what has no effect in the mode that was chosen."""
        if isinstance(every, Periods):
            periods = every
        else:
            periods = Periods(1, refresh="drift") if every is None else Periods(integer("every", every, 1))
        one_of("refresh", periods.refresh, get_args(Mode))
        if not backward and periods.backward_every is not None:
            raise ValueError("backward_every would have no effect: PRONG whitens forward only")
        if not backward and self.fisher != "sampled":
            raise ValueError("fisher would have no effect: PRONG measures no errors")
        overhead = OVERHEAD if every is None else None
        return Schedule(
            layers, periods, self.fisher, self.average, self.seed, overhead, rule.early_steps, rule.early_parts
        )


@dataclass(frozen=True)
class Setup:
    """What a rule is made from.

    dampings:    of the sides, as the user gave them; the others have the rule's default
    max_step:    the user's bound on the length of a step; "auto": the rule's default
    both_sides:  whether errors are whitened too
    """

    model: nn.Module
    loss: Loss
    head: Head
    options: Options
    dampings: Mapping[SideName, float | Damping]
    max_step: float | Literal["auto"] | None
    both_sides: bool
    ranks: Ranks

    @cached_property
    def loss_model(self) -> LossModel:
        """The quadratic model of the loss, which all automatic rules of one optimizer share."""
        return LossModel(self.model, self.loss.likelihood, self.head, self.ranks)

    @property
    def has_default_damping(self) -> bool:
        return not self.dampings

    def damping(self, defaults: Mapping[SideName, float | Damping]) -> dict[SideName, Damping]:
        """The damping of each side."""
        return {name: Damping.of(damping) for name, damping in {**defaults, **self.dampings}.items()}

    def bound(self, default: float | None) -> float | None:
        """The bound on the length of a step; None: there is none."""
        if self.max_step == "auto":
            return default
        if isinstance(self.max_step, str):
            raise ValueError(f'max_step must be a number above 0, "auto" or None, not {self.max_step!r}')
        return None if self.max_step is None else positive("max_step", self.max_step)
