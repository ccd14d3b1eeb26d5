"""Expert settings of an optimizer: what few people change, in one validated mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

from bprong.blocks import MAX_DIM
from bprong.checks import number, one_of, whole
from bprong.schedule import Settings
from bprong.solver import Solver
from bprong.whitening import Damping

__all__ = ["Expert"]


@dataclass(frozen=True)
class Expert:
    """Expert settings of an optimizer, given as `options={…}`.

    fisher            targets behind D: "sampled", "exact" or "empirical" (the data's: from `observe(x, y)`, or, for
                      classes and bits, read off the gradient at the model's output)
    forward_every, forward_offset, backward_every, backward_offset
                      the paper's τ₁, c₁, τ₂, c₂; by default both sides together, every `every` steps
    refresh           "periodic", or "drift": at each period only those sides are looked at that have been moving, and
                      those refreshed that have moved; by default "drift", unless a period is given. "continuous": at
                      each period, 5 steps unless one is given, the batch moves the inverses, exact ones whatever the
                      solver, which are factored at the start and where a side has drifted from white; convolutions,
                      embeddings and layers whitened in blocks are refreshed as by "drift"
    rate              μ of continuous whitening: each batch leaves 1 − μ of what came before
    overhead          the share of time that statistics and factorisation may take, which sets the period where none is
                      given; continuous whitening keeps to its period
    average           what the running average of the statistics keeps at each new measurement; 0: no average. What is
                      whitened continuously averages by its rate
    record_every      measure, without refreshing, every so many steps too
    examples          measure on this many examples of a batch at most
    seed              of the targets drawn; by default torch's initial seed
    max_dim           sides with more features than this are whitened in blocks, or by the channels of a convolution
    solver            "exact" inverses, "low-rank" ones, within half of the exact step in the metric of the side itself,
                      or "auto": low rank for wide sides where it makes steps cheaper
    channels          whiten the inputs of convolutions by their channels alone, whatever their size
    """

    fisher: str = "sampled"
    forward_every: int | None = None
    forward_offset: int = 0
    backward_every: int | None = None
    backward_offset: int = 0
    refresh: str | None = None
    rate: float = 0.05
    overhead: float = 0.1
    average: float = 0.9
    record_every: int | None = None
    examples: int | None = None
    seed: int | None = None
    max_dim: int = MAX_DIM
    solver: Solver = "auto"
    channels: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Expert:
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options or {} if name not in known]
        if unknown:
            raise ValueError(f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
        expert = cls(**options or {})
        for name, least in (("examples", 1), ("seed", 0), ("max_dim", 1)):
            if getattr(expert, name) is not None:
                whole(f"options[{name!r}]", getattr(expert, name), least)
        number("options['overhead']", expert.overhead, 0.001, 1)
        number("options['rate']", expert.rate, 1e-6, 1)
        if expert.refresh == "continuous" and expert.record_every is not None:
            raise ValueError('refresh="continuous" measures at its period alone: leave out record_every')
        one_of("options['solver']", expert.solver, get_args(Solver))
        one_of("options['channels']", expert.channels, (False, True))
        return expert

    def settings(
        self, every: int | None, forward_damping: float | Damping, backward_damping: float | Damping
    ) -> Settings:
        given = [period for period in (every, self.forward_every, self.backward_every) if period is not None]
        continuous = self.refresh == "continuous"
        common = given[0] if given else 5 if continuous else 1
        return Settings.of(
            forward_every=common if self.forward_every is None else self.forward_every,
            backward_every=common if self.backward_every is None else self.backward_every,
            forward_offset=self.forward_offset, backward_offset=self.backward_offset,
            forward_damping=forward_damping, backward_damping=backward_damping,
            fisher=self.fisher, average=self.average, record_every=self.record_every, seed=self.seed,
            refresh=self.refresh or ("periodic" if given else "drift"),
            overhead=None if given or continuous else self.overhead, rate=self.rate,
        )  # fmt: skip
