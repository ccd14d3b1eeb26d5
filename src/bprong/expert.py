"""Expert settings of an optimizer: what few people change, in one validated mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bprong.schedule import Settings
from bprong.whitening import Damping

__all__ = ["Expert"]


@dataclass(frozen=True)
class Expert:
    """Expert settings of an optimizer, given as `options={…}`.

    fisher            targets behind D: "sampled", "exact" or "empirical" (the data's: from `observe(x, y)`, or, for
                      classes and bits, read off the gradient at the model's output)
    forward_every, forward_offset, backward_every, backward_offset
                      the paper's τ₁, c₁, τ₂, c₂; by default both sides together, every `every` steps
    average           what the running average of the statistics keeps at each new measurement; 0: no average
    record_every      measure, without refreshing, every so many steps too
    examples          measure on this many examples of a batch at most
    seed              of the targets drawn; by default torch's initial seed
    """

    fisher: str = "sampled"
    forward_every: int | None = None
    forward_offset: int = 0
    backward_every: int | None = None
    backward_offset: int = 0
    average: float = 0.9
    record_every: int | None = None
    examples: int | None = None
    seed: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Expert:
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options or {} if name not in known]
        if unknown:
            raise ValueError(f"options has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")
        expert = cls(**options or {})
        for name in ("examples", "seed"):
            value = getattr(expert, name)
            if value is not None and not (isinstance(value, int) and value >= (1 if name == "examples" else 0)):
                raise ValueError(f"options[{name!r}] must be a whole number, of at least 1 for examples, not {value!r}")
        return expert

    def settings(self, every: int, forward_damping: float | Damping, backward_damping: float | Damping) -> Settings:
        return Settings.of(
            forward_every=every if self.forward_every is None else self.forward_every,
            backward_every=every if self.backward_every is None else self.backward_every,
            forward_offset=self.forward_offset, backward_offset=self.backward_offset,
            forward_damping=forward_damping, backward_damping=backward_damping,
            fisher=self.fisher, average=self.average, record_every=self.record_every, seed=self.seed,
        )  # fmt: skip
