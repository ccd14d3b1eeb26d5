"""`MLPClassifier` and `MLPRegressor`, with scikit-learn's vocabulary and without a learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin, _fit_context
from sklearn.metrics import accuracy_score, r2_score
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import _check_partial_fit_first_call, type_of_target, unique_labels
from sklearn.utils.validation import validate_data

from bprong.sklearn.base import BaseMLP
from bprong.sklearn.network import Array, Bernoulli, Gaussian, Likelihood, Network, Softmax
from bprong.sklearn.scaling import Scaling

PARAMETERS = """
    Features{targets} are standardised inside, by the training set's means and variances (those of the first call, with
    `warm_start` and `partial_fit`), so that their scales do not matter. The loss is the mean over rows of
    {loss}, plus ½ `alpha` ‖weights‖² divided by the number of rows.
    Up to 1,000 rows training computes in the dtype of X, with more rows in float32.

    Parameters
    ----------
    hidden_layer_sizes : array-like of shape (n_layers - 2,), default=(100,)
        The number of units in each hidden layer.
    activation : {{'identity', 'logistic', 'tanh', 'relu'}}, default='relu'
        The activation of the hidden layers.
    alpha : float, default={alpha}
        The strength of the penalty on the weights, which are those for standardised features. scikit-learn's default
        is 0.0001; a natural-gradient step reaches the minimum, and a larger penalty makes that a good one.
    batch_size : int, default='auto'
        The number of rows in a batch. 'auto': all rows up to 1,000, and about 500 beyond.
    max_iter : int, default=200
        The largest number of iterations over the training set.
    shuffle : bool, default=True
        Whether to shuffle rows before each iteration, if there are several batches.
    random_state : int, RandomState instance or None, default=None
        Determines the initial weights, the validation set, the batches and the targets that are sampled.
    tol : float, default={tol}
        An iteration that improves the loss, or with `early_stopping` the score, by less counts as no improvement.
    verbose : bool, default=False
        Shows progress: a bar on a terminal, one line for each iteration elsewhere.
    warm_start : bool, default=False
        Whether `fit` starts from the weights of the last call.
    early_stopping : bool, default=False
        Whether to hold out a part of the training set, stop when the score on it no longer improves, and return the
        weights of the best score.
    validation_fraction : float, default=0.1
        This part.
    n_iter_no_change : int, default=2
        Training stops when more than so many iterations in a row bring no improvement.

    Attributes
    ----------
{attributes}    loss_, best_loss_ : float
        The loss of the last iteration, before its steps, and the lowest. best_loss_ is None with `early_stopping`.
    loss_curve_ : list of float
        The loss of every iteration.
    validation_scores_, best_validation_score_ : list of float, float
        With `early_stopping`{score}; otherwise None.
    coefs_, intercepts_ : list of ndarray
        Weights (inputs, outputs) and biases of every layer, for features{targets} in their original units.
    n_iter_, t_ : int
        Iterations of the last fit; rows seen in all.
    n_layers_, n_outputs_ : int
        The number of layers, inputs and outputs included, and of outputs.
    out_activation_ : str
        The function between the last layer and the prediction.
    n_features_in_, feature_names_in_ : int, ndarray
        The number of features, and their names if X had names.
"""


def _documented(**words: str) -> Any:
    """Fills the parameters, which both estimators share, into a docstring."""

    def document(cls: type) -> type:
        cls.__doc__ = (cls.__doc__ or "").replace("[parameters]", PARAMETERS.format(**words).strip())
        return cls

    return document


@_documented(
    targets="",
    alpha="1.0",
    tol="1e-3",
    loss="the cross-entropy, summed over labels",
    score=", the accuracy on the rows held out",
    attributes="""    classes_ : ndarray of shape (n_classes,)
        The labels.
""",
)
class MLPClassifier(ClassifierMixin, BaseMLP):
    """A multilayer perceptron for classes or several labels, fitted by bidirectional whitening: no learning rate.

    [parameters]

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> from sklearn.model_selection import cross_val_score
    >>> X, y = load_wine(return_X_y=True)                                   # features from 0.1 to 1,700, not scaled
    >>> print(round(cross_val_score(MLPClassifier(random_state=0), X, y).mean(), 2))
    0.98
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "relu",
        *,
        alpha: float = 1.0,
        batch_size: int | str = "auto",
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-3,
        verbose: bool = False,
        warm_start: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 2,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.verbose = verbose
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change

    @_fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None) -> MLPClassifier:
        """Goes through the given rows once; the next call goes on from there.

        The penalty is divided by the number of rows of all calls so far.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            The features; their scale is taken from the first call.
        y : array-like of shape (n_samples,)
            The labels.
        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.
        classes : array of shape (n_classes,), default=None
            All labels of all calls; required in the first one.

        Returns
        -------
        self : object
            The estimator.
        """
        if _check_partial_fit_first_call(self, classes):
            multilabel = type_of_target(y).startswith("multilabel")
            self._label_binarizer = LabelBinarizer().fit(y if multilabel else classes)
        self._fit(X, y, sample_weight, incremental=True)
        return self

    def predict(self, X: Any) -> Array:
        """The most probable label of every row, or 0 and 1 for each of several labels."""
        return self._labels(self._output(X))

    def predict_proba(self, X: Any) -> Array:
        """The probability of every class, in the order of `classes_`: (n_samples, n_classes)."""
        f = self._output(X)
        p = self._likelihood().mean(f)
        return np.hstack([1 - p, p]) if self.n_outputs_ == 1 else p

    def predict_log_proba(self, X: Any) -> Array:
        """The logarithms of `predict_proba`, also of probabilities that are too small for it."""
        f = self._output(X)
        if self.out_activation_ == "softmax":
            f = f - f.max(axis=1, keepdims=True)
            return f - np.log(np.exp(f).sum(axis=1, keepdims=True))
        log_p = -np.logaddexp(f.dtype.type(0), -f)
        return np.hstack([log_p - f, log_p]) if self.n_outputs_ == 1 else log_p

    def _labels(self, f: Array) -> Array:
        p = self._likelihood().mean(f)
        found: Array = self._label_binarizer.inverse_transform(p.ravel() if self.n_outputs_ == 1 else p)
        return found

    def _checked(self, X: Any, y: Any, incremental: bool, reset: bool) -> tuple[Any, Array]:
        X, y = validate_data(
            self, X, y, accept_sparse=["csr", "csc"], multi_output=True, dtype=(np.float64, np.float32), reset=reset
        )
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        if not hasattr(self, "classes_") or not (self.warm_start or incremental):
            self._label_binarizer = LabelBinarizer().fit(y)
            self.classes_ = self._label_binarizer.classes_
        else:
            self._check_classes(unique_labels(y))
        return X, self._label_binarizer.transform(y)

    def _check_classes(self, classes: Array) -> None:
        """Raises ValueError if later calls have other classes than the first."""
        if self.warm_start and set(classes) != set(self.classes_):
            raise ValueError(
                "warm_start can only be used where `y` has the same classes as in the previous call to fit. Previously "
                f"got {self.classes_}, `y` has {classes}"
            )
        if len(np.setdiff1d(classes, self.classes_, assume_unique=True)):
            raise ValueError(
                f"`y` has classes not in `self.classes_`. `self.classes_` has {self.classes_}. 'y' has {classes}."
            )

    def _likelihood(self) -> Likelihood:
        return Softmax() if self._label_binarizer.y_type_ == "multiclass" else Bernoulli()

    def _stratified(self, Y: Array) -> Array | None:
        return (
            None
            if self._label_binarizer.y_type_.startswith("multilabel")
            else self._label_binarizer.inverse_transform(Y)
        )

    def _validation_score(self, X: Any, Y: Array, weight: Array) -> float:
        true = self._label_binarizer.inverse_transform(Y)
        return float(accuracy_score(true, self._labels(self._output(X, check=False)), sample_weight=weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


@_documented(
    targets=" and targets",
    alpha="3.0",
    tol="1e-4",
    score=", R² on the rows held out",
    loss="half the squared error of standardised targets, summed over outputs",
    attributes="",
)
class MLPRegressor(RegressorMixin, BaseMLP):
    """A multilayer perceptron for one or several numbers, fitted by bidirectional whitening: no learning rate.

    [parameters]

    Examples
    --------
    >>> from sklearn.datasets import make_friedman1
    >>> from sklearn.model_selection import cross_val_score
    >>> X, y = make_friedman1(300, random_state=0)
    >>> print(round(cross_val_score(MLPRegressor(random_state=0), X, 1000 * y).mean(), 1))
    0.9
    """

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: str = "relu",
        *,
        alpha: float = 3.0,
        batch_size: int | str = "auto",
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        verbose: bool = False,
        warm_start: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 2,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.verbose = verbose
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change

    @_fit_context(prefer_skip_nested_validation=True)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> MLPRegressor:
        """Goes through the given rows once; the next call goes on from there.

        The penalty is divided by the number of rows of all calls so far.

        Parameters
        ----------
        X : {array-like, sparse matrix} of shape (n_samples, n_features)
            The features; their scale is taken from the first call.
        y : array-like of shape (n_samples,) or (n_samples, n_outputs)
            The targets; their scale is taken from the first call.
        sample_weight : array-like of shape (n_samples,), default=None
            Sample weights.

        Returns
        -------
        self : object
            The estimator.
        """
        self._fit(X, y, sample_weight, incremental=True)
        return self

    def predict(self, X: Any) -> Array:
        """The predicted numbers: (n_samples,) or (n_samples, n_outputs)."""
        return self._numbers(self._output(X))

    def _numbers(self, f: Array) -> Array:
        found = self._target_scaling.undo(f)
        return found.ravel() if found.shape[1] == 1 else found

    def _checked(self, X: Any, y: Any, incremental: bool, reset: bool) -> tuple[Any, Array]:
        X, y = validate_data(
            self, X, y, accept_sparse=["csr", "csc"], multi_output=True, y_numeric=True, dtype=(np.float64, np.float32),
            reset=reset,
        )  # fmt: skip
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        Y = y.reshape(len(y), -1)
        if not reset and Y.shape[1] != self.n_outputs_:
            raise ValueError(
                f"y has {Y.shape[1]} outputs, but {type(self).__name__} was fitted with {self.n_outputs_}."
            )
        return X, Y

    def _likelihood(self) -> Likelihood:
        return Gaussian()

    def _learn_targets(self, Y: Array, share: Array) -> None:
        self._target_scaling = Scaling.of(Y, share)

    def _network_targets(self, Y: Array) -> Array:
        return self._target_scaling.apply(Y, np.float64)

    def _folded(self) -> Network:
        network = super()._folded()
        network.W[-1][:] = network.W[-1] * self._target_scaling.scale
        network.b[-1][:] = self._target_scaling.undo(network.b[-1])
        return network

    def _validation_score(self, X: Any, Y: Array, weight: Array) -> float:
        return float(r2_score(Y, self._numbers(self._output(X, check=False)), sample_weight=weight))
