"""Options of an optimizer that few people change, in one validated dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from bprong.capture.backprop import Fisher
from bprong.checks import integer, number, one_of
from bprong.optim.fallback import Fallback
from bprong.optim.spectral import Power
from bprong.whitening.schedule import Mode, Periods, Settings

OVERHEAD = 0.1  # of run time, where no period is given


@dataclass(frozen=True)
class Options:
    """Options of `BPRONG` and `PRONG` that few people change; a mapping with these keys does as well.

    fisher            targets behind D: "sampled" from the model, "exact" (no sampling, one backward pass for each
                      output of a target) or "empirical" (the data's: from `observe(x, y)` or, for classes and bits,
                      recovered from the gradient at the model's output)
    refresh           "periodic": refresh every side at its period. "drift": at each period measure the sides that have
                      been drifting, and refresh those that have drifted. Default: "drift", unless a period is given
    overhead          the share of run time to spend on statistics and factorisations if no period is given; None: 0.1
    average           the factor on the weight of past statistics at each measurement (exponential decay); 0: no average
    seed              of sampled targets; by default torch's initial seed
    sharded           in several processes: each keeps the factors of some layers and computes their steps, which are
                      then exchanged. It saves memory and work, and costs an exchange at each step. state_dict() must
                      then be called by all processes
    nesterov          Nesterov's form of momentum, as for SGD; by default for spectral steps only
    power             of step="spectral": "half", whitening by (Ž+ε)^(-1/4) and (D+ε)^(-1/4), or "whole", by
                      (Ž+ε)^(-1/2) and (D+ε)^(-1/2), which is Muon on W† of the paper's network
    fallback_rate     the learning rate of parameters that are not whitened, relative to lr; default: 0.1, and 1 for
                      spectral steps
    fallback_betas    Adam's β₁ and β₂ for these parameters
    """

    fisher: Fisher = "sampled"
    refresh: Mode | None = None
    overhead: float | None = None
    average: float = 0.9
    seed: int | None = None
    sharded: bool = False
    nesterov: bool | None = None
    power: Power = "half"
    fallback_rate: float | None = None
    fallback_betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        if self.seed is not None:
            integer("options['seed']", self.seed, 0)
        one_of("options['refresh']", self.refresh, (None, *get_args(Mode)))
        one_of("options['sharded']", self.sharded, (False, True))
        one_of("options['nesterov']", self.nesterov, (None, False, True))
        one_of("options['power']", self.power, get_args(Power))
        number("options['fallback_rate']", self.fallback_rate or 0.0, 0)
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
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options or {} if name not in known]
        if unknown:
            raise ValueError(
                f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}. solver and "
                f"max_dim are keyword arguments of the optimizer"
            )
        return cls(**options or {})

    def fallback(self, usual: float = 1.0) -> Fallback:
        """The rule of parameters that are not whitened; usual: its rate, unless one was given."""
        return Fallback(usual if self.fallback_rate is None else self.fallback_rate, self.fallback_betas)

    def settings(
        self, every: int | Periods | None, backward: bool, early_steps: tuple[int, ...], early_parts: tuple[int, ...]
    ) -> Settings:
        """The settings of the schedule; refuses options that have no effect in the mode they choose."""
        periods = every if isinstance(every, Periods) else Periods(1 if every is None else integer("every", every, 1))
        refresh = self.refresh or ("drift" if every is None else "periodic")
        overhead = self.overhead
        _refuse(overhead is not None and every is not None, "overhead", "a period is given; leave one of them out")
        if not backward:
            _refuse(periods.backward_every is not None, "backward_every", "PRONG whitens forward only")
            _refuse(self.fisher != "sampled", "fisher", "PRONG measures no errors")
        _refuse(periods.record_every is not None and refresh == "drift", "record_every", 'it needs refresh="periodic"')
        backward_every = periods.forward_every if periods.backward_every is None else periods.backward_every
        share = None
        if every is None:
            share = number("overhead", OVERHEAD if overhead is None else overhead, 0.001, 1)
        return Settings.checked(
            forward=(periods.forward_every, periods.forward_offset),
            backward=(backward_every, periods.backward_offset if backward else 0),
            fisher=self.fisher, average=self.average, record_every=periods.record_every, seed=self.seed,
            refresh=refresh, overhead=share, early_steps=early_steps, early_parts=early_parts,
        )  # fmt: skip


def _refuse(without_effect: bool, name: str, reason: str) -> None:
    if without_effect:
        raise ValueError(f"{name} would have no effect: {reason}")
