"""Bidirectionally whitened steps without a learning rate, for a multilayer perceptron in NumPy.

    ΔW = −(Ž+ε₁)⁻¹ (g_W − c g_bᵀ) (D+ε₂)⁻¹,   Δb = −(D+ε₂)⁻¹ g_b − cᵀ ΔW          W is (inputs, outputs) here

is the step of `bprong.BPRONG`, and how far to go along it and along the last update is chosen by the rule of lr="auto"
(`bprong.optim.auto.rule`, docs/auto.md). What differs is where the numbers come from: the passes are written out for
this kind of network, and if a batch is the whole training set, every step is evaluated on all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy.linalg.lapack import dpotrf, dpotri

from bprong.optim.auto.rule import AutoRule, Evaluation
from bprong.sklearn.network import Array, Direction, Likelihood, Network

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Constants of training, chosen on the problems of docs/scikit-learn.md.

    refresh_every    steps between refreshes of the statistics, beyond the first ones,
    early_refreshes  which are at these steps
    average          what the statistics of a batch keep of those of the batches before
    exact_entries    if a batch has at most this many rows × outputs, D is integrated over targets, and otherwise over
                     one draw for each row
    max_dim          a side with more features is whitened by its variances alone
    """

    refresh_every: int = 5
    early_refreshes: tuple[int, ...] = (0, 2, 6)
    average: float = 0.9
    exact_entries: int = 4096
    max_dim: int = 2048


SETTINGS = Settings()


@dataclass
class Batch:
    """Rows of the training set.

    X, Y:     inputs, and targets shaped like the output
    share:    (n,) the weight of each row in the loss; they sum to one
    penalty:  the loss has ½ penalty ‖W‖² beside −log p
    whole:    these are all rows of the training set
    """

    X: Array
    Y: Array
    share: Array
    penalty: float
    whole: bool


@dataclass(frozen=True, kw_only=True)
class PenalisedEvaluation(Evaluation):
    """Of a loss that contains the penalty `alpha`.

    penalty:  (k, k) its curvature along the directions
    """

    penalty: Array

    def curvature(self, lam: float = 0.0) -> Array:
        return super().curvature(lam) + self.penalty


class Pass(NamedTuple):
    """A forward pass of a batch: the inputs of all layers and the output, E[y | f], and the mean −log p."""

    z: list[Array]
    mean: Array
    nll: float


@dataclass
class Side:
    """Ž or D of a layer: its second moment, (d, d) or, of a wide side, its diagonal (d,); and its damped inverse."""

    second: Array = field(default_factory=lambda: np.zeros(0))
    weight: float = 0.0  # of past batches, for the average
    inverse: Array = field(default_factory=lambda: np.zeros(0))

    def record(self, rows: Array, share: Array, keep: float, wide: bool) -> None:
        """Averages E[rows rowsᵀ] with that of the batches before."""
        if wide:
            now = share @ np.square(rows)
        else:
            scaled = rows * np.sqrt(share)[:, None]
            now = scaled.T @ scaled
        total = keep * self.weight + 1
        self.second = now.astype(np.float64) if total == 1 else (keep * self.weight * self.second + now) / total
        self.weight = total

    @property
    def mean_eigenvalue(self) -> float:
        return float(self._diagonal().mean())

    def _diagonal(self) -> Array:
        return self.second if self.second.ndim == 1 else self.second.diagonal()

    def factor(self, epsilon: float, dtype: np.dtype[Any]) -> None:
        """(second + ε)⁻¹ by Cholesky, in float64; a matrix that is not positive definite by rounding is damped more."""
        if self.second.ndim == 1:
            self.inverse = (1 / (self.second + epsilon)).astype(dtype)
            return
        while True:
            damped = self.second.copy(order="F")
            damped.ravel(order="K")[:: len(damped) + 1] += epsilon
            L, failed = dpotrf(damped, lower=1, overwrite_a=1)  # its upper triangle is zero
            if not failed:
                inverse, failed = dpotri(L, lower=1, overwrite_c=1)
            if not failed or not math.isfinite(epsilon):
                break
            epsilon = max(10 * epsilon, 1e-12 * self.mean_eigenvalue)
        inverse = inverse + inverse.T
        np.fill_diagonal(inverse, inverse.diagonal() / 2)
        self.inverse = inverse.astype(dtype, copy=False)


class Layer:
    """The statistics of one layer: the centre c of its inputs, Ž of its inputs and D of its errors."""

    def __init__(self) -> None:
        self.c = np.zeros(0)
        self.inputs = Side()
        self.errors = Side()

    def record(self, z: Array, deltas: Array, share: Array, keep: float, max_dim: int, same: bool) -> None:
        """z: (n, inputs); deltas: (k, n, outputs), of whose products the sum over k is meant.

        same: Ž is that of these inputs already
        """
        if not same:
            mean = share @ z
            total = keep * self.inputs.weight + 1
            self.c = mean if total == 1 else (self.c * (total - 1) + mean) / total
            self.inputs.record(z - self.c.astype(z.dtype), share, keep, z.shape[1] > max_dim)
        flat = deltas.reshape(-1, deltas.shape[-1])
        self.errors.record(flat, np.tile(share, len(deltas)), keep, flat.shape[1] > max_dim)

    def factor(self, lam: float, least: float, dtype: np.dtype[Any]) -> None:
        """ε₁ε₂ = λ, in the proportion of the mean eigenvalues of both sides; least: a lower bound on that of D."""
        z = self.inputs.mean_eigenvalue or 1.0
        d = max(self.errors.mean_eigenvalue, least)
        self.inputs.factor(math.sqrt(lam * z / d), dtype)
        self.errors.factor(math.sqrt(lam * d / z), dtype)

    def step(self, g_W: Array, g_b: Array) -> tuple[Array, Array]:
        """ΔW and Δb."""
        c = self.c.astype(g_W.dtype)
        left, right = self.inputs.inverse, self.errors.inverse
        d_W = g_W - np.outer(c, g_b)
        d_W = -(left @ d_W if left.ndim == 2 else left[:, None] * d_W)
        d_W = d_W @ right if right.ndim == 2 else d_W * right
        d_b = -(right @ g_b if right.ndim == 2 else right * g_b)
        return d_W, d_b - c @ d_W


class Trainer:
    """Makes steps and remembers, between them, what they need: the rule, the statistics and the last update.

    last:     Δ₀
    pending:  Δ of the last step, if that was evaluated on a part of the training set; the next batch checks its slope
    t:        the number of steps made
    """

    def __init__(self, network: Network, likelihood: Likelihood, settings: Settings = SETTINGS) -> None:
        self.network = network
        self.likelihood = likelihood
        self.settings = settings
        self.rule = AutoRule()
        self.layers = [Layer() for _ in network.W]
        self.last: Direction | None = None
        self.pending: Direction | None = None
        self.t = 0
        self._refreshed = 0
        self._known: Pass | None = None  # of the whole training set, at the present weights

    def step(self, batch: Batch, random: np.random.RandomState) -> float:
        """One step; returns the loss before it, penalty included."""
        rule = self.rule
        known = self._known or self._passed(batch)
        parameters = self.network.parameters
        gradient = self.network.gradient(known.z, (known.mean - batch.Y) * batch.share[:, None])
        for g, W in zip(gradient.W, parameters.W, strict=True):
            np.add(g, batch.penalty * W, out=g)
        if self.pending is not None:
            rule.update_trust(gradient.dot(self.pending))
        if self._due():
            self._refresh(known, batch, random)
        directions = {"whitened": self._whitened(gradient)}
        if self.last is not None:
            directions["last"] = self.last
        if batch.whole:  # every step is evaluated, and its loss needs no average
            rule.evaluate_until = self.t + 1
            rule.loss = None
        slopes = {name: gradient.dot(d) for name, d in directions.items()}
        evaluation = None
        if rule.evaluates(self.t):
            evaluation = self._evaluated(known, list(directions.values()), batch)
        c = rule.choose(self.t, slopes, evaluation)
        self._update_(directions, c)
        self.t += 1
        self.pending = None if batch.whole or evaluation is None else directions["whitened"]
        loss = known.nll + self._penalty(parameters, batch)
        if evaluation is not None:
            now = self._passed(batch)
            self._known = now if batch.whole else None
            change = now.nll + self._penalty(self.network.parameters, batch) - loss
            # λ is judged by the whole loss: at its minimum the slopes of −log p and of the penalty cancel.
            whole = replace(evaluation, slopes=np.array(list(slopes.values())))
            if not rule.update_damping(whole, c, change):
                self._undo_()
        return loss

    @staticmethod
    def _penalty(parameters: Direction, batch: Batch) -> float:
        return batch.penalty * parameters.dot_weights(parameters) / 2

    def _passed(self, batch: Batch) -> Pass:
        """A forward pass."""
        z = self.network.forward(batch.X)
        nll = float(batch.share @ self.likelihood.nll(z[-1], batch.Y))
        return Pass(z, self.likelihood.mean(z[-1]), nll)

    def _whitened(self, gradient: Direction) -> Direction:
        """Δ"""
        steps = [layer.step(W, b) for layer, W, b in zip(self.layers, gradient.W, gradient.b, strict=True)]
        return Direction.of([d_W for d_W, _ in steps], [d_b for _, d_b in steps])

    def _update_(self, directions: dict[str, Direction], c: Mapping[str, float]) -> None:
        """Δ₀ ← αΔ + μΔ₀, θ ← θ + Δ₀."""
        update = directions["whitened"].times(c.get("whitened", 0.0))
        if self.last is not None:
            update.flat += c.get("last", 0.0) * self.last.flat
        self.network.add_(update)
        self.last = update

    def _undo_(self) -> None:
        """Undoes the last update; the next starts without momentum."""
        if self.last is not None:
            self.network.add_(self.last, -1.0)
        self.last = None
        self.pending = None
        self._known = None
        self.rule.undone(self.t - 1)

    # Statistics and the quadratic model -------------------------------------------------------------------------------

    def _due(self) -> bool:
        return self.t in self.settings.early_refreshes or self.t - self._refreshed >= self.settings.refresh_every

    def _refresh(self, known: Pass, batch: Batch, random: np.random.RandomState) -> None:
        """Measures all layers on a batch and factors what was measured."""
        self._refreshed = self.t
        settings = self.settings
        mean = known.mean
        if mean.size <= settings.exact_entries:
            errors = self.likelihood.roots(mean)
        else:
            errors = (mean - self.likelihood.sample(mean, random))[None]
        deltas = self.network.backward(known.z, errors)
        keep = 0.0 if batch.whole else settings.average
        lam = self.rule.lam + batch.penalty
        for layer, z, delta in zip(self.layers, known.z, deltas, strict=False):
            same = batch.whole and z is batch.X and layer.inputs.weight > 0
            layer.record(z, delta, batch.share, keep, settings.max_dim, same)
            layer.factor(lam, self.rule.settings.faint * lam, mean.dtype)

    def _evaluated(self, known: Pass, directions: list[Direction], batch: Batch) -> PenalisedEvaluation:
        """The quadratic model of −log p and of the penalty along the directions."""
        V = [self.network.change(known.z, d) for d in directions]
        FV = [batch.share[:, None] * self.likelihood.fisher_times(known.mean, v) for v in V]
        return PenalisedEvaluation(
            Q=_table(V, FV, np.vdot),
            G=_table(directions, directions, Direction.dot),
            penalty=batch.penalty * _table(directions, directions, Direction.dot_weights),
            loss=known.nll,
            slopes=np.zeros(len(V)),
            targets=len(known.mean),
        )


def _table(left: list[T], right: list[T], product: Callable[[T, T], float]) -> Array:
    """The symmetric matrix of the products."""
    table = np.empty((len(left), len(left)))
    for i, first in enumerate(left):
        for j, second in enumerate(right[: i + 1]):
            table[i, j] = table[j, i] = product(first, second)
    return table
