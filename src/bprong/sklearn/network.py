"""A multilayer perceptron in NumPy, with its derivatives written out: outputs, errors, and changes along directions.

    a_i = z_i W_i + b_i,   z_{i+1} = φ(a_i),   f = a_last           rows are examples, as in scikit-learn's coefs_

On tables of a few hundred rows a step of a torch optimizer is nearly all overhead; the same step takes a fifth of the
time here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import expit

Array = npt.NDArray[Any]


class Function(NamedTuple):
    """An activation function: φ(a), which may overwrite a, and φ'(a) as a function of φ(a)."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]


ACTIVATIONS = {
    "identity": Function(lambda a: a, np.ones_like),
    "logistic": Function(lambda a: expit(a, out=a), lambda z: z * (1 - z)),
    "tanh": Function(lambda a: np.tanh(a, out=a), lambda z: 1 - z * z),
    "relu": Function(lambda a: np.maximum(a, 0, out=a), lambda z: (z > 0).astype(z.dtype)),
}


class Direction:
    """A change of all weights and biases, or their gradient.

    flat:    all weights, then all biases
    shapes:  (inputs, outputs) of each layer
    W, b:    views of them
    """

    def __init__(self, flat: Array, shapes: Sequence[tuple[int, int]]) -> None:
        self.flat = flat
        self.shapes = tuple(shapes)
        self.W: list[Array] = []
        self.b: list[Array] = []
        start = 0
        for shape in self.shapes:
            end = start + shape[0] * shape[1]
            self.W.append(flat[start:end].reshape(shape))
            start = end
        self._weights = start
        for _, width in self.shapes:
            self.b.append(flat[start : start + width])
            start += width

    @classmethod
    def of(cls, W: Sequence[Array], b: Sequence[Array]) -> Direction:
        """From the parts of each layer."""
        return Direction(np.concatenate([part.ravel() for part in (*W, *b)]), [part.shape for part in W])

    def times(self, factor: float) -> Direction:
        """All entries multiplied by a number."""
        return Direction(factor * self.flat, self.shapes)

    def dot(self, other: Direction) -> float:
        """The sum of products of all entries."""
        return float(self.flat @ other.flat)

    def dot_weights(self, other: Direction) -> float:
        """The sum of products of the weights' entries, which the penalty is of."""
        return float(self.flat[: self._weights] @ other.flat[: self._weights])


class Network:
    """The weights and biases of all layers, and the activation between layers."""

    def __init__(self, parameters: Direction, activation: str) -> None:
        self.parameters = parameters
        self.activation = activation

    @classmethod
    def drawn(
        cls, sizes: Sequence[int], activation: str, random: np.random.RandomState, dtype: npt.DTypeLike
    ) -> Network:
        """Glorot and Bengio's initial weights, as scikit-learn draws them."""
        W = []
        b = []
        for fan_in, fan_out in pairwise(sizes):
            bound = np.sqrt((2.0 if activation == "logistic" else 6.0) / (fan_in + fan_out))
            W.append(random.uniform(-bound, bound, (fan_in, fan_out)).astype(dtype))
            b.append(random.uniform(-bound, bound, fan_out).astype(dtype))
        return cls(Direction.of(W, b), activation)

    def __getstate__(self) -> tuple[Array, tuple[tuple[int, int], ...], str]:
        return self.parameters.flat, self.parameters.shapes, self.activation

    def __setstate__(self, state: tuple[Array, tuple[tuple[int, int], ...], str]) -> None:
        flat, shapes, self.activation = state
        self.parameters = Direction(flat, shapes)  # its views of `flat` again

    @property
    def W(self) -> list[Array]:
        """(inputs, outputs) of each layer"""
        return self.parameters.W

    @property
    def b(self) -> list[Array]:
        """(outputs,) of each layer"""
        return self.parameters.b

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the weights."""
        return self.parameters.flat.dtype

    @property
    def _phi(self) -> Function:
        return ACTIVATIONS[self.activation]

    def copy(self) -> Network:
        """A network with weights of its own."""
        return Network(Direction(self.parameters.flat.copy(), self.parameters.shapes), self.activation)

    def cast_(self, dtype: npt.DTypeLike) -> None:
        """Changes the precision of the weights."""
        self.parameters = Direction(self.parameters.flat.astype(dtype), self.parameters.shapes)

    def add_(self, update: Direction, factor: float = 1.0) -> None:
        """Moves the weights, all at once, so that an interrupt leaves no part of a step."""
        self.parameters = Direction(self.parameters.flat + factor * update.flat, update.shapes)

    def forward(self, X: Array) -> list[Array]:
        """The inputs of every layer, and the output: z_0 = X, z_1, …, f."""
        z = [X]
        for W, b in zip(self.W, self.b, strict=True):
            a = z[-1] @ W
            a += b
            z.append(self._phi.value(a) if len(z) < len(self.W) else a)
        return z

    def backward(self, z: list[Array], error: Array) -> list[Array]:
        """The errors δ_i = ∂/∂a_i of every layer from that of the output; error: (..., n, outputs)."""
        deltas = [error]
        for W, z_i in zip(self.W[:0:-1], z[-2:0:-1], strict=True):
            deltas.append((deltas[-1] @ W.T) * self._phi.slope(z_i))
        return deltas[::-1]

    def gradient(self, z: list[Array], error: Array) -> Direction:
        """The gradient, from the error of the output."""
        deltas = self.backward(z, error)
        return Direction.of(
            [z_i.T @ delta for z_i, delta in zip(z, deltas, strict=False)], [delta.sum(axis=0) for delta in deltas]
        )

    def change(self, z: list[Array], direction: Direction) -> Array:
        """The change of the output along a direction, to first order (forward-mode differentiation)."""
        da = z[0] @ direction.W[0] + direction.b[0]
        for W, z_i, dW, db in zip(self.W[1:], z[1:], direction.W[1:], direction.b[1:], strict=False):
            da *= self._phi.slope(z_i)
            da = da @ W
            da += z_i @ dW
            da += db
        return da


class Likelihood(ABC):
    """p(y | f) of one row: −log p, its derivative, and the Fisher matrix F at the output. y is shaped like f.

    name: scikit-learn's, of the function from f to `mean`
    """

    name: str

    @abstractmethod
    def nll(self, f: Array, y: Array) -> Array:
        """−log p of every row, (n,), up to a constant that makes it zero for a perfect prediction."""

    @abstractmethod
    def mean(self, f: Array) -> Array:
        """E[y | f]: probabilities or predicted numbers. As these are canonical links, ∂(−log p)/∂f = mean − y."""

    @abstractmethod
    def fisher_times(self, mean: Array, v: Array) -> Array:
        """F v of every row."""

    @abstractmethod
    def roots(self, mean: Array) -> Array:
        """g_k with Σ_k g_k g_kᵀ = F of every row: (k, n, outputs)."""

    @abstractmethod
    def sample(self, mean: Array, random: np.random.RandomState) -> Array:
        """A target drawn from p(y | f), for every row."""


class Softmax(Likelihood):
    """Exclusive classes; f: logits, y: one-hot."""

    name = "softmax"

    def nll(self, f: Array, y: Array) -> Array:
        shifted = f - f.max(axis=1, keepdims=True)
        return np.log(np.exp(shifted).sum(axis=1)) - np.einsum("ij,ij->i", y, shifted)

    def mean(self, f: Array) -> Array:
        p = f - f.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        return p

    def fisher_times(self, mean: Array, v: Array) -> Array:
        """(diag(p) − ppᵀ) v"""
        return mean * (v - np.einsum("ij,ij->i", mean, v)[:, None])

    def roots(self, mean: Array) -> Array:
        """√p_k (p − e_k)"""
        unit = np.eye(mean.shape[1], dtype=mean.dtype)[:, None]
        return np.sqrt(mean.T)[:, :, None] * (mean - unit)

    def sample(self, mean: Array, random: np.random.RandomState) -> Array:
        total = mean.cumsum(axis=1)
        drawn = (total[:, :-1] < random.random_sample((len(mean), 1)) * total[:, -1:]).sum(axis=1)
        return np.eye(mean.shape[1], dtype=mean.dtype)[drawn]


class _Elementwise(Likelihood):
    """Independent outputs."""

    @abstractmethod
    def curvature(self, mean: Array) -> Array:
        """The Fisher information of every output."""

    def fisher_times(self, mean: Array, v: Array) -> Array:
        return self.curvature(mean) * v

    def roots(self, mean: Array) -> Array:
        return np.sqrt(self.curvature(mean)) * np.eye(mean.shape[1], dtype=mean.dtype)[:, None]


class Bernoulli(_Elementwise):
    """Two classes, or labels of which several may hold; f: one logit for each."""

    name = "logistic"

    def nll(self, f: Array, y: Array) -> Array:
        return (np.logaddexp(f.dtype.type(0), f) - y * f).sum(axis=1)

    def mean(self, f: Array) -> Array:
        return expit(f)

    def curvature(self, mean: Array) -> Array:
        return mean * (1 - mean)

    def sample(self, mean: Array, random: np.random.RandomState) -> Array:
        return (random.random_sample(mean.shape) < mean).astype(mean.dtype)


class Gaussian(_Elementwise):
    """Numbers of unit variance; f: their means."""

    name = "identity"

    def nll(self, f: Array, y: Array) -> Array:
        return np.square(f - y).sum(axis=1) / 2

    def mean(self, f: Array) -> Array:
        return f

    def curvature(self, mean: Array) -> Array:
        return np.ones_like(mean)

    def sample(self, mean: Array, random: np.random.RandomState) -> Array:
        return mean + random.standard_normal(mean.shape).astype(mean.dtype)
