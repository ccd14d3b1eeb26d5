"""Standardisation of features and targets, with sample weights, for dense and sparse arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.utils.sparsefuncs import mean_variance_axis

from bprong.sklearn.network import Array


@dataclass(frozen=True)
class Scaling:
    """mean and scale of every column, float64: (x − mean) / scale has mean 0 and variance 1."""

    mean: Array
    scale: Array

    @classmethod
    def of(cls, X: Any, share: Array) -> Scaling:
        """The scaling of the rows of X, (n, columns), with these weights, which sum to one.

        >>> Scaling.of(np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([0.5, 0.5]))
        Scaling(mean=array([2., 5.]), scale=array([1., 1.]))
        """
        size: Any = 1.0  # of the largest deviation, whose square may be beyond what a number can be
        if sparse.issparse(X):
            mean, variance = mean_variance_axis(X.astype(np.float64), axis=0, weights=share)
        else:
            X = X.astype(np.float64)
            mean = share @ X
            size = np.maximum(np.abs(X - mean).max(axis=0, initial=0.0), np.finfo(np.float64).tiny)
            variance = share @ np.square((X - mean) / size)
        scale = size * np.sqrt(variance)
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)  # up to rounding
        return cls(mean, np.where(constant, 1.0, scale))

    def apply(self, X: Any, dtype: npt.DTypeLike) -> Array:
        """Standardised rows, dense."""
        dense = X.toarray() if sparse.issparse(X) else X
        return ((dense - self.mean) / self.scale).astype(dtype, copy=False)

    def undo(self, X: Array) -> Array:
        """Rows in the original units."""
        return (X * self.scale + self.mean).astype(X.dtype, copy=False)
