"""lr="auto": how far to go along the whitened direction and the last update, and how much to damp, from measurements.

    d = α Δ + β Δ_Adam + μ Δ₀       minimises       M(d) = ½ dᵀ (F + λ) d + ∇Lᵀ d

Δ is the whitened direction, Δ_Adam that of parameters no whitener covers, Δ₀ the last update; dᵀFd comes from forward
mode (Martens & Grosse 2015, section 6). What makes this safe at every batch size, found by experiment (docs/auto.md):

- The slope along Δ is taken s times. Δ contains the batch's own noise, so ∇Lᵀ Δ promises more than other data keep;
  the next batch's gradient tells how much of it was true.
- The step's ½dᵀFd, how far the predictions move, is bounded by a part of the loss that is left; and α ∇LᵀΔ by twice
  the loss, since no minimum keeps more than half of such a promise.
- λ, split between Ž and D by their mean eigenvalues, doubles when the loss fell by less than a quarter of what the
  model promised, comes down slowly when it kept its promise, and stays within bounds; on a plateau, where nothing but
  λ holds the step, it comes down fast and has no bound.
- α and μ are averaged over evaluations, and those are made at every tenth step after the first twenty.
- A step that raised the loss by far is taken back; the next goes a quarter as far, and twenty are all evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bprong.evaluation import ENOUGH, Evaluation, Scale
from bprong.moments import widened
from bprong.preconditioner import Layer
from bprong.quadratic import minimiser, shortened
from bprong.recording import Measured
from bprong.schedule import Side
from bprong.whitening import Damping

__all__ = ["EARLY", "Auto", "Parts"]

EARLY = (2, 6)  # steps at which statistics are looked at again, since the first steps are the largest
FIRST, EVERY = 20, 10  # evaluations at each of the first ten steps, every second of ten more, then every tenth
CAREFUL = 20  # steps that are evaluated, all of them, after one that was taken back
LAMBDA, LEAST, MOST = 1e-3, 1e-4, 1.0  # λ at the start, and its bounds
FAINT = 0.01  # of λ: a D that is less, of outputs that are certain, counts as that
YOUNG = 0.1  # of tr/N that is added to ε: what N observations leave uncertain of an eigenvalue
KEEP = 0.7  # of the averaged coefficients at each evaluation
HONEST = 0.8  # of the sums behind s at each evaluation
LEAST_TRUE = 0.05  # of a slope: with few batches an epoch, the next one is biased against the last
AT_MOST = {"last": 0.95, "adam": 10.0}  # μ, and β in thousandths
RECENT = 0.9  # of the averaged loss at each evaluation, to the tenth power where those are ten steps apart
NATS, PART, LATE = 0.1, 0.05, 0.25  # the bound on ½dᵀFd: PART of the loss, or NATS while that is less than LATE of it
GENTLE, SHORTEST = 0.25, 1e-6  # of that bound for the first step, twice as much after each that was good; the least
PROMISE = 2.0  # of the loss: a slope that promises more, of which its minimum keeps half, cannot be true
SURPRISE = 4.0  # times more or less of Δ than the average: what one evaluation is believed, if it asks for as much
ASTRAY = 10.0  # times the loss at first: more than that, and the last update is taken back
HELD = 0.01  # of λ's part in a step's curvature: where F's is less, λ holds the step alone, and falls below its bound
SPREAD = 1e4  # of variances, above which each is the unit of its own damping
Parts = dict[str, float]  # by "whitened", "adam", "last": coefficients, slopes


@dataclass
class Memory:
    """What outlives a step: plain values, all of them in checkpoints."""

    lam: float = LAMBDA
    true: float = 1.0  # the sums whose ratio is s
    promised: float = 1.0
    loss: float | None = None
    first: float | None = None  # the user's loss by its scale, at first and by now, with all that is in it
    now: float = 0.0
    coefficients: Parts = field(default_factory=dict)
    length: float = 0.0  # ½dᵀFd of the last step, measured or estimated
    curvature: Parts = field(default_factory=dict)  # dᵢᵀFdᵢ at the last evaluation
    slope: float = 0.0  # ∇LᵀΔ there
    expected: float = 0.0  # (Qc) of Δ there: by how much the step made was to change it
    seen: float = 1.0  # F's part in the curvature of the last evaluated step, by λ's
    ratio: float | None = None
    careful: int = 0  # the step until which all are evaluated
    limit: float | None = None  # the part of the bound that is allowed, at first and after a step that was taken back
    scale: float = 1.0  # the user's loss by the mean −log p of a target, and how many targets those were
    targets: int = 0
    scales: list[tuple[float, int, float]] = field(default_factory=list)


class Auto:
    """The rule; numbers in, numbers out. Tensors stay with the optimizer."""

    def __init__(self, fixed: bool = False, bound: float | None = None, free: bool = False) -> None:
        """fixed: damping was given; bound: so was this; free: −log p is known but for a constant, as your own may be"""
        self.fixed, self.bound, self.free = fixed, bound, free
        self.memory, self.forward_mode, self.relative = Memory(), True, set[str]()

    def evaluates(self, t: int) -> bool:
        """Whether the quadratic model is made at step t."""
        return t < max(FIRST // 2, self.memory.careful) or (t < FIRST and t % 2 == 0) or t % EVERY == 0

    @property
    def s(self) -> float:
        """How much of a slope along Δ is true."""
        m = self.memory
        return min(1.0, max(LEAST_TRUE, m.true / max(m.promised, 1e-300)))

    def damping(self, layer: Layer, side: Side) -> Damping | None:
        """λ's share of a side: ε₁ε₂ = λ, in the proportion of the sides' mean eigenvalues; more while N is small."""
        if self.fixed or side not in layer.level:
            return None
        (z, _), (d, n) = (layer.level.get(name, (1.0, layer.level[side][1])) for name in ("forward", "backward"))
        z = 1.0 if layer.name in self.relative or not z > 0 else z
        d = max(d, FAINT * self.memory.lam) if "backward" in layer.level else 1.0  # biases know no damping but D's
        own, other = (z, d) if side == "forward" else (d, z)
        blocks = layer.inputs if side == "forward" else layer.outputs
        young = 0.0 if layer.unit.one_hot and side == "forward" else YOUNG * own * blocks.size * blocks.count / n
        relative = side == "forward" and layer.name in self.relative
        return Damping(math.sqrt(self.memory.lam * own / other) + young, "variance" if relative else "one")

    def look(self, measured: Mapping[str, Measured]) -> None:
        """Finds the layers whose inputs differ in scale so much that each is damped by its own variance."""
        self.relative = {name for name, m in measured.items() if m.probe is not None and badly_scaled(m.probe)}

    def judge(self, slope: float) -> None:
        """The next batch's slope along the Δ of the last evaluation tells how much of that batch's own was true."""
        m = self.memory
        m.true = HONEST * m.true + (1 - HONEST) * (m.expected - slope)
        m.promised = HONEST * m.promised - (1 - HONEST) * m.slope

    def choose(
        self, t: int, slopes: Parts, found: Evaluation | None, metric: tuple[Tensor, Tensor] | None, rate: float = 1.0
    ) -> Parts:
        """The coefficients of a step.

        slopes: of the loss along the directions, penalty and all; between evaluations that of Δ alone is enough
        metric: (k, k) the directions' products, which λ multiplies, and the penalty's curvature
        rate:   the group's lr, a multiplier on α
        """
        if found is not None and metric is not None:
            return self._evaluated(t, slopes, found, metric, rate)
        return self._between(slopes, rate)

    def _between(self, slopes: Parts, rate: float) -> Parts:
        """The coefficients of the last evaluation."""
        m = self.memory
        c = {name: x * (1.0 if name == "last" else rate) for name, x in m.coefficients.items()}
        coefficients = torch.tensor(list(c.values()), dtype=torch.float64)
        short, m.length = self._shortened(coefficients, self._estimated(c, slopes), slopes["whitened"])
        return dict(zip(c, short.tolist(), strict=True))

    def _shortened(self, c: Tensor, length: float, slope: float) -> tuple[Tensor, float]:
        """c and ½dᵀFd within the bound, and such that α ∇LᵀΔ promises no more than a part of the loss there is: what F
        does not see of a loss, a penalty on activations, could make it promise anything."""
        c, length = shortened(c, length, self._limit())
        promised, m = -float(c[0]) * slope, self.memory
        if m.loss is None or self.free:
            return c, length
        most = PROMISE * (m.now if m.now > ASTRAY * m.loss else m.loss)
        part = most / promised if promised > most else 1.0
        return c * part, length * part**2

    def _evaluated(self, t: int, slopes: Parts, found: Evaluation, metric: tuple[Tensor, Tensor], rate: float) -> Parts:
        m, names = self.memory, list(slopes)
        few = 1 - found.examples / ENOUGH  # of the average that small batches keep: together they are as many as ENOUGH
        self._note(t, found.loss, few)
        b = torch.tensor([slopes[name] for name in names], dtype=torch.float64)
        if not b.any():
            return self._between(slopes, rate)  # a gradient of zero tells nothing
        m.slope, m.curvature = float(b[0]), dict(zip(names, found.Q.diagonal().tolist(), strict=True))
        b[0] *= self.s
        Q, (G, penalty) = found.Q, metric
        c = minimiser(Q + penalty + m.lam * G, b, [AT_MOST.get(name, math.inf) for name in names])
        c, _ = self._shortened(c, float(c @ Q @ c) / 2, m.slope)
        if t >= FIRST:
            c = self._averaged(names, c)
        m.coefficients = dict(zip(names, c.tolist(), strict=True))
        c = c * torch.tensor([1.0 if name == "last" else rate for name in names], dtype=c.dtype)
        c, m.length = self._shortened(c, float(c @ Q @ c) / 2, m.slope)
        m.expected, m.seen = float((Q + penalty)[0] @ c), float(c @ Q @ c) / max(m.lam * float(c @ G @ c), 1e-300)
        return dict(zip(names, c.tolist(), strict=True))

    def _note(self, t: int, loss: float | None, few: float) -> None:
        """The averaged loss."""
        if loss is not None:
            m, keep = self.memory, max(few, RECENT ** (1 if t < FIRST else EVERY))
            m.loss = loss if m.loss is None else keep * m.loss + (1 - keep) * loss
            m.limit = GENTLE if t == 0 else m.limit

    def _averaged(self, names: list[str], c: Tensor) -> Tensor:
        before = self.memory.coefficients
        old = torch.tensor([before.get(name, float(x)) for name, x in zip(names, c, strict=True)], dtype=c.dtype)
        if old[0] > 0:  # of a batch that is fitted already any step looks right, of another none
            c[0] = c[0].clamp(old[0] / SURPRISE, old[0] * SURPRISE)
        mean = KEEP * old + (1 - KEEP) * c
        mean[0] = min(float(mean[0]), 2 * float(c[0]))  # today's batch may know better that a step would be too long
        return mean

    def _estimated(self, c: Parts, slopes: Parts) -> float:
        """½dᵀFd between evaluations: curvature along Δ goes with its slope, along Δ₀ with what the last step's was."""
        m = self.memory
        along = m.curvature.get("whitened", 0.0) * max(0.0, slopes["whitened"] / min(m.slope, -1e-300))
        length = c.get("whitened", 0.0) ** 2 * along / 2 + c.get("last", 0.0) ** 2 * m.length
        return length + c.get("adam", 0.0) ** 2 * m.curvature.get("adam", 0.0) / 2

    def _bound(self) -> float:
        loss = self.memory.loss
        own = NATS if loss is None or self.free else max(PART * loss, min(NATS, LATE * loss))
        return own if self.bound is None else min(own, self.bound)

    def _limit(self) -> float:
        """The bound, or, at first and after a step that was taken back, a part of it."""
        return self._bound() * (1.0 if self.memory.limit is None else self.memory.limit)

    def astray(self, loss: float) -> bool:
        """Notes the user's loss by its scale, and says whether a step has led it far above where it began: evaluations
        are of a part of a batch, not at every step, and know nothing of what is in a loss beside −log p."""
        m = self.memory
        m.first, m.now = loss if m.first is None else m.first, loss
        return loss > ASTRAY * max(m.first, m.loss or 0.0) and m.first > 0

    def learn(self, found: Evaluation, c: Parts, change: float) -> bool:
        """λ from what the loss did; False: it went up so much, or out of all bounds, that the step is to be undone."""
        m = self.memory
        coefficients = torch.tensor(list(c.values()), dtype=torch.float64)
        assert found.slopes is not None
        promised = float(found.slopes @ coefficients + coefficients @ found.Q @ coefficients / 2)
        m.ratio = change / promised if promised < 0 else None
        good = math.isfinite(change) and change <= 2 * self._bound()
        if good and m.limit is not None:
            m.limit = 2 * m.limit if m.limit < 0.5 else None
        if not good or (m.ratio is not None and m.ratio < 0.25):
            m.lam = min(MOST, m.lam * 2)
        elif m.ratio is not None and m.ratio > 0.75:
            m.lam = self._lower(m.lam)
        return good

    def _lower(self, lam: float) -> float:
        """λ after a promise that was kept. Where predictions do not move for it, on a plateau, it has no bound."""
        if self.memory.seen < HELD:
            return lam / 4
        return max(LEAST, lam / 1.1) if lam >= LEAST else 2 * lam if self.memory.seen > 1 else lam

    def undone(self, t: int) -> None:
        """Step t was taken back: the next goes on from where it stood, by itself and more carefully."""
        m = self.memory
        part = m.length / self._bound() if self._bound() > 0 else 1.0
        m.careful, m.limit = t + 1 + CAREFUL, max(SHORTEST, part / 4)
        m.coefficients = {name: x / 2 for name, x in m.coefficients.items()}
        m.length = 0.0

    def told(self) -> dict[str, float | None]:
        """For the report."""
        m = self.memory
        alpha, mu = (m.coefficients.get(name) for name in ("whitened", "last"))
        return {"alpha": alpha, "mu": mu, "lambda": m.lam, "ratio": m.ratio}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.memory) | {"relative": sorted(self.relative), "forward_mode": self.forward_mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = dict(state)
        self.relative, self.forward_mode = set(kept.pop("relative")), kept.pop("forward_mode")
        self.memory = Memory(**kept)
        self.memory.scales = [(scale, n, value) for scale, n, value in self.memory.scales]

    def scale(self) -> Scale:
        """κ of the user's loss so far; what it notes is remembered."""
        return Scale(self.memory.scales)


def badly_scaled(z: Tensor) -> bool:
    """Whether inputs (rows, d) have scales that differ a hundredfold and more, and none of them is rarely active.

    Damping relative to each variance makes steps invariant to such scales; but it would let a pixel that is rarely on,
    or a unit that is nearly dead, take huge steps on the few examples that show it. Those have few rows behind their
    variance: n E[z²]² / E[z⁴] of them.

    >>> _ = torch.manual_seed(0)
    >>> z = torch.randn(100, 3)
    >>> badly_scaled(z), badly_scaled(z * torch.tensor([1.0, 1e3, 1e-3])), badly_scaled(z * (torch.rand(100, 3) < 0.02))
    (False, True, False)
    """
    if z.ndim != 2 or not z.is_floating_point() or len(z) < 2:
        return False
    z = widened(z.detach())
    squares = (z - z.mean(dim=0)).square()
    second, fourth = squares.mean(dim=0), squares.square().mean(dim=0)
    live = second > 0
    if not live.any():
        return False
    behind = len(z) * second[live] ** 2 / fourth[live]
    return bool(second[live].max() > SPREAD * second[live].min() and behind.min() >= max(4, len(z) / 20))
