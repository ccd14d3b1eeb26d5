"""Options of an optimizer that few people change, in one validated dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from bprong.capture.output import Key
from bprong.capture.request import Fisher
from bprong.checks import integer, number, one_of
from bprong.linalg.moments import MAX_DIM
from bprong.optim.fallback import Fallback
from bprong.whitening.layer import Solver
from bprong.whitening.schedule import Mode, Periods, Settings

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
    fallback_betas    Adam's β₁ and β₂ for parameters that are not whitened
    solver            "exact" factors; "low-rank" ones, whose step differs from the exact one by at most half of it in
                      the metric of the side itself; "auto": low rank for wide sides where it makes steps cheaper
    max_dim           sides with more features than this are whitened in blocks
    output            what the loss is computed from, if the model returns more than one tensor: a key or attribute, an
                      index, or a function of what it returns, which may give several tensors of one shape. By default
                      the logits or the first tensor; a loss that the model computes itself is recognised
    """

    fisher: Fisher = "sampled"
    average: float = 0.9
    seed: int | None = None
    power: Power = "half"
    fallback_betas: tuple[float, float] = (0.9, 0.999)
    solver: Solver = "auto"
    max_dim: int = MAX_DIM
    output: Key | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            integer("options['seed']", self.seed, 0)
        one_of("options['power']", self.power, get_args(Power))
        one_of("options['solver']", self.solver, get_args(Solver))
        integer("options['max_dim']", self.max_dim, 1)
        if not isinstance(self.fallback_betas, (tuple, list)) or len(self.fallback_betas) != 2:
            raise ValueError(f"options['fallback_betas'] must be two numbers, not {self.fallback_betas!r}")
        for beta in self.fallback_betas:
            number("options['fallback_betas']", beta, 0, 1)

    @classmethod
    def of(cls, options: Options | Mapping[str, Any] | None) -> Options:
        """The options as they are, or from a mapping."""
        if isinstance(options, Options):
            return options
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options must be a bprong.optim.Options or a mapping, not {options!r}")
        names = [field.name for field in fields(cls)]
        unknown = [name for name in options or {} if name not in names]
        if unknown:
            raise ValueError(f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(names)}")
        return cls(**options or {})

    def fallback(self, rate: float = 1.0) -> Fallback:
        """The rule of parameters that are not whitened; rate: its learning rate, relative to the group's."""
        return Fallback(rate, self.fallback_betas)

    def settings(
        self, every: int | Periods | None, backward: bool, early_steps: tuple[int, ...], early_parts: tuple[int, ...]
    ) -> Settings:
        """The settings of the schedule; refuses what has no effect in the mode that was chosen."""
        periods = every if isinstance(every, Periods) else Periods(1 if every is None else integer("every", every, 1))
        refresh: Mode = "drift" if every is None else one_of("refresh", periods.refresh, get_args(Mode))
        if not backward:
            _refuse(periods.backward_every is not None, "backward_every", "PRONG whitens forward only")
            _refuse(self.fisher != "sampled", "fisher", "PRONG measures no errors")
        _refuse(periods.record_every is not None and refresh == "drift", "record_every", 'it needs refresh="periodic"')
        backward_every = periods.forward_every if periods.backward_every is None else periods.backward_every
        return Settings.checked(
            forward=(periods.forward_every, periods.forward_offset),
            backward=(backward_every, periods.backward_offset if backward else 0),
            fisher=self.fisher, average=self.average, record_every=periods.record_every, seed=self.seed,
            refresh=refresh, overhead=OVERHEAD if every is None else None,
            early_steps=early_steps, early_parts=early_parts,
        )  # fmt: skip


def _refuse(without_effect: bool, name: str, reason: str) -> None:
    if without_effect:
        raise ValueError(f"{name} would have no effect: {reason}")
