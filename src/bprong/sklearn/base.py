"""What both estimators share: from validated tables to a trained network, and back to predictions."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils._param_validation import Interval, Options, StrOptions
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bprong.sklearn.network import ACTIVATIONS, Array, Likelihood, Network
from bprong.sklearn.progress import Progress
from bprong.sklearn.scaling import Scaling
from bprong.sklearn.training import Batch, Trainer

FEW = 1000  # rows; up to so many, a batch is the whole training set. With more, `fit` computes in float32, because
BATCH = 500  # rounding is far below the noise of batches of about so many
DENSE_ENTRIES = 2**22  # of an array that a part of a sparse matrix is converted to


@dataclass
class Rows:
    """Rows of the training set: features, targets shaped like the network's output, and sample weights."""

    X: Any
    Y: Array
    weight: Array

    def __len__(self) -> int:
        return len(self.Y)

    def take(self, index: Any) -> Rows:
        """Some of the rows."""
        return Rows(self.X[index], self.Y[index], self.weight[index])

    @property
    def share(self) -> Array:
        """Each row's share of the weights, float64."""
        return self.weight / self.weight.sum()


class BaseMLP(BaseEstimator, ABC):
    """A multilayer perceptron that is fitted by bidirectionally whitened steps; see the two estimators."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "hidden_layer_sizes": ["array-like", Interval(Integral, 1, None, closed="left")],
        "activation": [StrOptions(set(ACTIVATIONS))],
        "alpha": [Interval(Real, 0, None, closed="left")],
        "batch_size": [StrOptions({"auto"}), Interval(Integral, 1, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "shuffle": ["boolean"],
        "random_state": ["random_state"],
        "tol": [Interval(Real, 0, None, closed="left")],
        "verbose": ["verbose"],
        "warm_start": ["boolean"],
        "early_stopping": ["boolean"],
        "validation_fraction": [Interval(Real, 0, 1, closed="left")],
        "n_iter_no_change": [Interval(Integral, 1, None, closed="left"), Options(Real, {np.inf})],
    }

    _trainer: Trainer | None  # between calls of partial_fit

    # What the estimators define ---------------------------------------------------------------------------------------

    @abstractmethod
    def _checked(self, X: Any, y: Any, incremental: bool, reset: bool) -> tuple[Any, Array]:
        """X and the targets (n, outputs), validated."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """The distribution of the targets."""

    def _learn_targets(self, Y: Array, share: Array) -> None:
        """Called with the targets of the first fit."""

    def _network_targets(self, Y: Array) -> Array:
        """Targets as the network is trained on."""
        return Y

    def _stratified(self, Y: Array) -> Array | None:
        """What the validation set is stratified by."""
        return None

    @abstractmethod
    def _validation_score(self, X: Any, Y: Array, weight: Array) -> float:
        """The score that early stopping maximises."""

    # Fitting ----------------------------------------------------------------------------------------------------------

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BaseMLP:
        """Fits the network to data.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            The features. They need not be scaled.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs)
            Class labels, or numbers for regression.
        sample_weight : array-like of shape (n_samples,), default=None
            A row of weight 2 counts as two rows.

        Returns
        -------
        self : object
            The fitted estimator.
        """
        return self._fit(X, y, sample_weight, incremental=False)

    def _fit(self, X: Any, y: Any, sample_weight: Any, incremental: bool) -> BaseMLP:
        sizes = self._hidden_sizes()
        if incremental and self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True")
        first = not hasattr(self, "_network") or not (self.warm_start or incremental)
        X, Y = self._checked(X, y, incremental, reset=first)
        rows = Rows(X, Y, np.ones(len(Y)))
        if sample_weight is not None:
            rows.weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            rows = rows.take(np.flatnonzero(rows.weight))
            if not len(rows):
                raise ValueError("Sample weights must contain at least one non-zero number.")
        if first:
            self._start(rows, sizes)
        random = check_random_state(self.random_state)
        train, validation = self._divided(rows, random)
        if first:
            self._network = Network.drawn(self._sizes, self.activation, random, X.dtype)
        if first or not incremental or self._trainer is None:
            self._trainer = Trainer(self._network, self._likelihood())
        if not incremental and len(train) > FEW:
            self._network.cast_(np.float32)
        self._train(train, validation, random, incremental)
        self._network.cast_(X.dtype)
        if not incremental:
            self._trainer = None  # its statistics would make pickles large
        if not np.isfinite(self._network.parameters.flat).all():
            raise ValueError(
                "Training produced weights that are not finite. The input data may contain extremely large values."
            )
        return self

    def _hidden_sizes(self) -> list[int]:
        given = self.hidden_layer_sizes
        sizes = list(given) if hasattr(given, "__iter__") else [given]
        if any(size <= 0 for size in sizes):
            raise ValueError(f"hidden_layer_sizes must be > 0, got {sizes}.")
        return sizes

    def _start(self, rows: Rows, sizes: list[int]) -> None:
        """Sets everything that later calls with warm_start, or of partial_fit, go on with."""
        self._sizes = [rows.X.shape[1], *sizes, rows.Y.shape[1]]
        self._scaling = Scaling.of(rows.X, rows.share)
        self._learn_targets(rows.Y, rows.share)
        self._trainer = None
        self._seen = 0.0  # the weight of all rows so far, in partial_fit
        self.n_layers_ = len(self._sizes)
        self.n_outputs_ = rows.Y.shape[1]
        self.out_activation_ = self._likelihood().name
        self.n_iter_ = 0
        self.t_ = 0
        self.loss_curve_: list[float] = []
        self.validation_scores_: list[float] | None = None
        self.best_validation_score_: float | None = None
        self.best_loss_: float | None = None
        self._lowest = np.inf  # loss of this fit

    def _divided(self, rows: Rows, random: np.random.RandomState) -> tuple[Rows, Rows | None]:
        """The rows to train with and, for early stopping, those to validate with."""
        if not self.early_stopping:
            return rows, None
        train, held_out = train_test_split(
            np.arange(len(rows)),
            random_state=random,
            test_size=self.validation_fraction,
            stratify=self._stratified(rows.Y),
        )
        if len(held_out) < 2:
            raise ValueError(
                "The validation set is too small. Increase 'validation_fraction' or the size of your dataset."
            )
        return rows.take(train), rows.take(held_out)

    def _batch_size(self, rows: Rows) -> int:
        n = len(rows)
        if self.batch_size == "auto":
            if n <= FEW and not (sparse.issparse(rows.X) and n * rows.X.shape[1] > DENSE_ENTRIES):
                return n
            return -(-n // max(1, round(n / BATCH)))
        if self.batch_size > n:
            warnings.warn(
                "Got `batch_size` less than 1 or larger than sample size. It is going to be clipped", stacklevel=4
            )
        return int(np.clip(self.batch_size, 1, n))

    def _batches(self, rows: Rows, size: int, penalty: float, random: np.random.RandomState) -> Iterator[Batch]:
        """The batches of one iteration; rows.X is standardised already, unless it is sparse."""
        order = np.arange(len(rows))
        if self.shuffle and size < len(rows):
            random.shuffle(order)
        for part in gen_batches(len(rows), size):
            taken = rows if size >= len(rows) else rows.take(order[part])
            X = self._scaling.apply(taken.X, self._dtype) if sparse.issparse(taken.X) else taken.X
            yield Batch(X, taken.Y, taken.share.astype(self._dtype), penalty, whole=False)

    @property
    def _dtype(self) -> Any:
        return self._network.dtype

    def _train(self, rows: Rows, validation: Rows | None, random: np.random.RandomState, incremental: bool) -> None:
        """Iterations over the rows until the loss, or the validation score, stops improving."""
        assert self._trainer is not None
        size = self._batch_size(rows)
        self._seen = rows.weight.sum() + (self._seen if incremental else 0.0)
        penalty = float(self.alpha / self._seen)
        X = rows.X if sparse.issparse(rows.X) else self._scaling.apply(rows.X, self._dtype)
        rows = Rows(X, self._network_targets(rows.Y).astype(self._dtype), rows.weight)
        whole = None
        if size == len(rows) and not incremental:
            (whole,) = self._batches(rows, size, penalty, random)
            whole.whole = True
        self._reset_improvement(validation is not None, incremental)
        best = self._network.copy()
        progress = Progress(self.verbose, 1 if incremental else self.max_iter)
        self.n_iter_ = 0
        try:
            for _ in range(1 if incremental else self.max_iter):
                batches = self._batches(rows, size, penalty, random) if whole is None else [whole]
                total = sum(self._trainer.step(batch, random) * len(batch.X) for batch in batches)
                self._note(total / len(rows), len(rows))
                score = None if validation is None else self._validated(validation)
                if score is not None and score == self.best_validation_score_:
                    best = self._network.copy()
                progress.iteration(self.n_iter_, self.loss_, score)
                if self._has_stopped(progress):
                    break
            else:
                if not incremental:
                    message = f"Maximum iterations ({self.max_iter}) reached and the optimization hasn't converged yet."
                    warnings.warn(message, ConvergenceWarning, stacklevel=4)
        except KeyboardInterrupt:
            warnings.warn("Training interrupted by user.", stacklevel=4)
        if validation is not None:
            self._network = best

    def _reset_improvement(self, validates: bool, incremental: bool) -> None:
        """Every fit decides for itself when to stop, also if it starts from the weights of the last one."""
        self._without_improvement = 0
        if not incremental:
            self._lowest = np.inf
        if validates and self.validation_scores_ is None:
            self.validation_scores_ = []
            self.best_validation_score_ = -np.inf
        self.best_loss_ = None if validates else min(self.loss_curve_, default=np.inf)

    def _has_stopped(self, progress: Progress) -> bool:
        """Whether more than `n_iter_no_change` iterations in a row brought no improvement."""
        if self._without_improvement <= self.n_iter_no_change:
            return False
        what = "Validation score" if self.early_stopping else "Training loss"
        allowed = self.n_iter_no_change
        progress.end(f"{what} did not improve more than tol={self.tol:f} for {allowed} consecutive epochs. Stopping.")
        return True

    def _note(self, loss: float, rows: int) -> None:
        """Notes the loss of an iteration, and whether it is lower than before."""
        self.n_iter_ += 1
        self.t_ += rows
        self.loss_ = loss
        self.loss_curve_.append(loss)
        if self.best_loss_ is not None:
            self._without_improvement = self._without_improvement + 1 if loss > self._lowest - self.tol else 0
            self._lowest = min(self._lowest, loss)
            self.best_loss_ = min(self.best_loss_, loss)

    def _validated(self, rows: Rows) -> float:
        """The validation score; notes it, and whether it is higher than before."""
        assert self.validation_scores_ is not None
        assert self.best_validation_score_ is not None
        score = self._validation_score(rows.X, rows.Y, rows.weight)
        self.validation_scores_.append(score)
        better = score >= self.best_validation_score_ + self.tol
        self._without_improvement = 0 if better else self._without_improvement + 1
        self.best_validation_score_ = max(self.best_validation_score_, score)
        return score

    # Predicting -------------------------------------------------------------------------------------------------------

    def _output(self, X: Any, check: bool = True) -> Array:
        """The output f of the network, (n, outputs)."""
        if check:
            check_is_fitted(self)
            X = validate_data(self, X, accept_sparse=["csr", "csc"], dtype=(np.float64, np.float32), reset=False)
        if not sparse.issparse(X):
            return self._network.forward(self._scaling.apply(X, self._dtype))[-1]
        rows = max(1, DENSE_ENTRIES // X.shape[1])
        X = X.tocsr()
        parts = [self._scaling.apply(X[part], self._dtype) for part in gen_batches(X.shape[0], rows)]
        return np.concatenate([self._network.forward(part)[-1] for part in parts])

    def _folded(self) -> Network:
        """The network that takes features, and returns outputs, in their original units."""
        check_is_fitted(self)
        network = self._network.copy()
        scaled = network.W[0] / self._scaling.scale[:, None]
        network.b[0][:] = network.b[0] - self._scaling.mean @ scaled
        network.W[0][:] = scaled
        return network

    @property
    def coefs_(self) -> list[Array]:
        """The weights of every layer, (inputs, outputs), for features in their original units."""
        return self._folded().W

    @property
    def intercepts_(self) -> list[Array]:
        """The biases of every layer, for features in their original units."""
        return self._folded().b

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
