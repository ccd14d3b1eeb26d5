"""The scikit-learn estimators: scikit-learn's contract, exact cases of weights and scales, and what users do."""

import io
import itertools
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_iris,
    load_wine,
    make_classification,
    make_friedman1,
)
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from bprong.sklearn import MLPClassifier, MLPRegressor
from bprong.sklearn.progress import Progress
from bprong.sklearn.training import Trainer

ESTIMATORS = [MLPClassifier, MLPRegressor]
NEEDS = ("pandas", "SCIPY_ARRAY_API", "decision_function")  # checks of these are skipped where there is none


def problem(estimator, rows=120, seed=0):
    """Features whose scales differ by a factor of a million, and targets."""
    random = np.random.RandomState(seed)
    X = random.randn(rows, 4)
    a = X @ random.randn(4, 3) + np.sin(2 * X[:, :3])
    y = a.argmax(axis=1) if estimator is MLPClassifier else 1e3 * (a[:, 0] + 5)
    return X * [1e-3, 1.0, 30.0, 1e3] + [0.0, 5.0, -1e3, 1e4], y


def fitted(estimator, rows=120, **parameters):
    X, y = problem(estimator, rows)
    return estimator(random_state=0, **parameters).fit(X, y), X, y


def outputs(model, X):
    return model.predict_proba(X) if isinstance(model, MLPClassifier) else model.predict(X)


# The contract ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # the checks themselves warn
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_of_scikit_learns_checks_pass(estimator):
    results = check_estimator(estimator(), on_skip=None)
    assert len(results) > 50
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    skipped = [str(result["exception"]) for result in results if result["status"] == "skipped"]
    assert all(any(need in reason for need in NEEDS) for reason in skipped), skipped


def test_scikit_learn_is_optional():
    """bprong does not import it; without it, bprong.sklearn says how to get it."""
    code = """
        import sys, bprong
        assert "sklearn" not in sys.modules
        sys.modules["sklearn"] = None
        try:
            import bprong.sklearn
        except ImportError as error:
            print(error)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "pip install 'scikit-learn>=1.6'" in found.stdout


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_pickles_and_clones(estimator):
    model, X, y = fitted(estimator)
    read = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(outputs(read, X), outputs(model, X))
    np.testing.assert_array_equal(outputs(clone(model).fit(X, y), X), outputs(model, X))
    with pytest.raises(NotFittedError):
        clone(model).predict(X)
    assert len(pickle.dumps(model)) < 20_000  # no statistics


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_works_in_pipelines_and_searches(estimator):
    X, y = problem(estimator)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), estimator(random_state=0, max_iter=20, tol=0.02)),
        {f"{estimator.__name__.lower()}__alpha": [0.1, 10.0]},
        cv=2,
    ).fit(X, y)
    assert search.best_score_ > 0.7


@pytest.mark.rest
def test_works_in_several_processes():
    X, y = problem(MLPClassifier)
    scores = cross_val_score(MLPClassifier(random_state=0), X, y, cv=2, n_jobs=2)
    np.testing.assert_array_equal(scores, cross_val_score(MLPClassifier(random_state=0), X, y, cv=2))


@pytest.mark.parametrize("rows", [100, 2500])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_seed_decides_everything_and_nothing_global_changes(estimator, rows):
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    first, X, _ = fitted(estimator, rows, max_iter=200, tol=0.01)
    second, _, _ = fitted(estimator, rows, max_iter=200, tol=0.01)
    np.testing.assert_array_equal(outputs(first, X), outputs(second, X))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.get_num_threads() == threads


# Scores ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "least"), [(load_iris, 0.94), (load_wine, 0.97), (load_breast_cancer, 0.96), (load_diabetes, 0.42)]
)
def test_scores_on_data_as_they_are(load, least):
    X, y = load(return_X_y=True)
    estimator = MLPRegressor if load is load_diabetes else MLPClassifier
    assert cross_val_score(estimator(random_state=0), X, y).mean() > least


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_more_rows_than_a_batch(estimator):
    if estimator is MLPClassifier:
        X, y = make_classification(2500, n_informative=6, random_state=0)
    else:
        X, y = make_friedman1(2500, noise=1.0, random_state=0)
    model = estimator(random_state=0).fit(X[:2200], y[:2200])
    assert model.score(X[2200:], y[2200:]) > 0.9
    assert model.t_ == model.n_iter_ * 2200


# Exact cases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scales_and_shifts_of_features_do_not_matter(estimator):
    model, X, y = fitted(estimator)
    scale = np.array([1e6, 1e-4, 3.0, 1e-2])
    other = estimator(random_state=0).fit(X * scale - 7 * scale, y)
    np.testing.assert_allclose(outputs(other, X * scale - 7 * scale), outputs(model, X), rtol=1e-5, atol=1e-6)


def test_units_of_the_targets_do_not_matter():
    model, X, y = fitted(MLPRegressor)
    other = MLPRegressor(random_state=0).fit(X, 1e6 * y - 3e8)
    np.testing.assert_allclose(other.predict(X), 1e6 * model.predict(X) - 3e8, rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_weight_of_two_is_a_row_twice(estimator):
    """In the loss of every iteration, as long as the whole training set is one batch."""
    X, y = problem(estimator)
    counts = np.random.RandomState(1).randint(0, 4, len(X))
    weighted = estimator(random_state=0, max_iter=15, tol=0, n_iter_no_change=100)
    repeated = clone(weighted)
    with pytest.warns(ConvergenceWarning):
        weighted.fit(X, y, sample_weight=counts)
    with pytest.warns(ConvergenceWarning):
        repeated.fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(weighted.loss_curve_, repeated.loss_curve_, rtol=1e-7)
    np.testing.assert_allclose(outputs(weighted, X), outputs(repeated, X), rtol=1e-5, atol=1e-7)
    assert weighted.loss_curve_[0] == pytest.approx(repeated.loss_curve_[0], rel=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_loss_is_the_one_in_the_docstring(estimator):
    model, X, y = fitted(estimator, max_iter=300, tol=1e-7)
    if estimator is MLPClassifier:
        nll = -np.log(model.predict_proba(X)[np.arange(len(y)), y]).mean()
        weights = model.coefs_
    else:
        nll = ((model.predict(X) - y) ** 2).mean() / y.var() / 2
        weights = [W / (y.std() if i == len(model.coefs_) - 1 else 1) for i, W in enumerate(model.coefs_)]
    weights[0] = weights[0] * X.std(axis=0)[:, None]
    penalty = model.alpha / len(X) / 2 * sum((W**2).sum() for W in weights)
    assert model.loss_ == pytest.approx(nll + penalty, rel=1e-4)  # that of the step before
    assert model.loss_ == model.loss_curve_[-1]
    assert model.best_loss_ == min(model.loss_curve_)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_coefs_are_for_features_in_their_own_units(estimator):
    model, X, _ = fitted(estimator, hidden_layer_sizes=(8, 6), activation="tanh")
    z = X
    for W, b in zip(model.coefs_[:-1], model.intercepts_[:-1], strict=True):
        z = np.tanh(z @ W + b)
    f = z @ model.coefs_[-1] + model.intercepts_[-1]
    if estimator is MLPClassifier:
        p = np.exp(f - f.max(axis=1, keepdims=True))
        f = p / p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(f.squeeze(), outputs(model, X), rtol=1e-6)
    assert (model.n_layers_, model.n_outputs_) == (4, f.shape[1])
    assert model.out_activation_ == ("softmax" if estimator is MLPClassifier else "identity")


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_array])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sparse_features_are_the_same_as_dense_ones(estimator, form, monkeypatch):
    X, y = problem(estimator)
    X = np.maximum(X, X.mean(axis=0)) - X.mean(axis=0)
    dense = estimator(random_state=0, max_iter=10, tol=0.05).fit(X, y)
    model = estimator(random_state=0, max_iter=10, tol=0.05).fit(form(X), y)
    np.testing.assert_allclose(outputs(model, form(X)), outputs(dense, X), rtol=1e-6)
    monkeypatch.setattr("bprong.sklearn.base.DENSE_ENTRIES", 64)
    np.testing.assert_allclose(outputs(model, form(X)), outputs(dense, X), rtol=1e-6)
    assert estimator(random_state=0).fit(form(X), y).score(form(X), y) > 0.5  # in several batches


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_float32_stays_float32(estimator):
    X, y = problem(estimator)
    model = estimator(random_state=0).fit(X.astype(np.float32), y)
    assert outputs(model, X.astype(np.float32)).dtype == np.float32
    assert {part.dtype for part in [*model.coefs_, *model.intercepts_]} == {np.dtype(np.float32)}
    assert model.score(X.astype(np.float32), y) > 0.9


# Targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_labels_may_be_strings(classes):
    X, y = problem(MLPClassifier)
    y = np.minimum(y, classes - 1)
    names = np.array(["red", "green", "blue"])[:classes]
    model = MLPClassifier(random_state=0).fit(X, names[y])
    assert list(model.classes_) == sorted(names)
    assert accuracy_score(names[y], model.predict(X)) > 0.9
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)
    assert (model.classes_[p.argmax(axis=1)] == model.predict(X)).all()
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(p), rtol=1e-8, atol=1e-12)


def test_log_probabilities_do_not_underflow():
    X = np.array([[0.0], [1.0]] * 20)
    for y in (X.ravel(), np.arange(40) % 4):
        model = MLPClassifier(random_state=0, alpha=1e-6, max_iter=30, tol=0.1).fit(X, y.astype(int))
        assert np.isfinite(model.predict_log_proba([[1e9], [-1e9]])).all()


def test_several_labels():
    X, y = problem(MLPClassifier)
    Y = np.stack([y == 0, y == 1, X[:, 1] > 5], axis=1).astype(int)
    model = MLPClassifier(random_state=0).fit(X, Y)
    assert model.predict(X).shape == model.predict_proba(X).shape == Y.shape
    assert model.score(X, Y) > 0.85
    np.testing.assert_array_equal(model.predict(X), model.predict_proba(X) > 0.5)
    assert model.out_activation_ == "logistic"


def test_several_numbers():
    X, y = problem(MLPRegressor)
    Y = np.stack([y, -1e-3 * y**2], axis=1)
    model = MLPRegressor(random_state=0).fit(X, Y)
    assert model.predict(X).shape == Y.shape
    assert model.score(X, Y) > 0.85


def test_constant_features_and_targets():
    X = np.c_[np.ones(30), np.full(30, 1e6), np.arange(30.0)]
    assert MLPRegressor(random_state=0).fit(X, np.full(30, 7.0)).predict(X) == pytest.approx(7, abs=0.5)
    assert (MLPClassifier(random_state=0).fit(X, np.full(30, 3)).predict(X) == 3).all()


# Going on -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_warm_start_goes_on_from_the_weights(estimator):
    X, y = problem(estimator)
    model = estimator(random_state=0, warm_start=True, max_iter=3)
    with pytest.warns(ConvergenceWarning, match=r"Maximum iterations \(3\) reached"):
        model.fit(X, y)
    before = outputs(model, X)
    reached = model.loss_
    with pytest.warns(ConvergenceWarning):
        model.fit(X, y)
    assert model.loss_curve_[3] < reached
    assert len(model.loss_curve_) == 6
    assert (outputs(model, X) != before).any()
    with pytest.warns(ConvergenceWarning):
        cold = clone(model).set_params(warm_start=False).fit(X, y)
    with pytest.warns(ConvergenceWarning):
        cold.fit(X, y)
    np.testing.assert_array_equal(outputs(cold, X), before)


def test_a_warm_start_on_other_data_is_a_fit_of_its_own():
    """It goes on although the loss is higher than before, and early stopping may be switched on and off."""
    X, y = problem(MLPRegressor)
    model = MLPRegressor(random_state=0, warm_start=True).fit(X, y)
    model.fit(X, -y)
    assert model.n_iter_ > 5
    assert model.score(X, -y) > 0.9
    assert model.set_params(early_stopping=True).fit(X, y).best_loss_ is None
    assert len(model.validation_scores_) == model.n_iter_
    assert model.set_params(early_stopping=False).fit(X, y).best_loss_ == min(model.loss_curve_)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_partial_fit(estimator):
    """Also in a copy that was pickled on the way."""
    X, y = problem(estimator, 2000)
    classes = {"classes": [0, 1, 2]} if estimator is MLPClassifier else {}
    model = estimator(random_state=0)
    copy = None
    for i in itertools.chain(range(0, 2000, 100), range(0, 2000, 100)):
        model.partial_fit(X[i : i + 100], y[i : i + 100], **classes)
        copy = copy and copy.partial_fit(X[i : i + 100], y[i : i + 100])
        copy = copy or pickle.loads(pickle.dumps(model))
        classes = {}
    np.testing.assert_array_equal(outputs(copy, X), outputs(model, X))
    assert model.score(X, y) > 0.88
    assert model.n_iter_ == 1
    assert model.t_ == 4000


def test_early_stopping_returns_the_best_weights(monkeypatch):
    X, y = make_friedman1(300, noise=3.0, random_state=0)
    model = MLPRegressor(random_state=0, alpha=0, early_stopping=True, validation_fraction=0.3, tol=0).fit(X, y)
    scores = model.validation_scores_
    assert model.best_validation_score_ == max(scores) > scores[-1]
    assert len(scores) == model.n_iter_ < 200
    assert model.best_loss_ is None
    assert model.score(X, y) < 0.99
    X, y = problem(MLPClassifier)
    assert MLPClassifier(random_state=0, early_stopping=True).fit(X, y).best_validation_score_ > 0.8


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_interrupt_keeps_the_weights_reached(estimator, monkeypatch):
    X, y = problem(estimator)
    steps = []

    def step(self, *arguments):
        steps.append(None)
        if len(steps) > 5:
            raise KeyboardInterrupt
        return original(self, *arguments)

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    with pytest.warns(UserWarning, match="Training interrupted by user"):
        interrupted = estimator(random_state=0).fit(X, y)
    assert interrupted.n_iter_ == 5
    monkeypatch.undo()
    with pytest.warns(ConvergenceWarning):
        five = estimator(random_state=0, max_iter=5).fit(X, y)
    np.testing.assert_array_equal(outputs(interrupted, X), outputs(five, X))


# Messages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"alpha": -1}, "The 'alpha' parameter of MLPClassifier must be a float in the range"),
        ({"activation": "swish"}, "The 'activation' parameter of MLPClassifier must be a str among"),
        ({"hidden_layer_sizes": (5, 0)}, r"hidden_layer_sizes must be > 0, got \[5, 0\]"),
        ({"early_stopping": True, "validation_fraction": 0.001}, "The test_size = 1 should be greater"),
    ],
)
def test_parameters_are_checked_as_by_scikit_learn(parameters, message):
    X, y = problem(MLPClassifier)
    with pytest.raises(ValueError, match=message):
        MLPClassifier(**parameters).fit(X, y)


def test_targets_and_weights_are_checked():
    X, y = problem(MLPClassifier)
    model = MLPClassifier(random_state=0, max_iter=500)
    with pytest.raises(ValueError, match="Sample weights must contain at least one non-zero number"):
        model.fit(X, y, sample_weight=np.zeros(len(y)))
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        model.fit(X, y, sample_weight=-np.ones(len(y)))
    model = clone(model)
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        model.partial_fit(X, y)
    model.partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="`y` has classes not in `self.classes_`"):
        model.partial_fit(X, y + 1)
    with pytest.raises(ValueError, match="warm_start can only be used where `y` has the same classes"):
        model.set_params(warm_start=True).fit(X, y + 1)
    with pytest.raises(ValueError, match="partial_fit does not support early_stopping=True"):
        model.set_params(early_stopping=True).partial_fit(X, y)
    with pytest.raises(ValueError, match="y has 2 outputs, but MLPRegressor was fitted with 1"):
        MLPRegressor(random_state=0).partial_fit(X, y).partial_fit(X, np.c_[y, y])
    with pytest.warns(UserWarning, match="larger than sample size. It is going to be clipped"):
        MLPClassifier(random_state=0, batch_size=1000).fit(X, y)


def test_progress_is_shown_as_lines_or_as_a_bar(capsys):
    X, y = problem(MLPClassifier)
    model = MLPClassifier(random_state=0, verbose=True).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Iteration 1, loss = {model.loss_curve_[0]:.8f}"
    assert lines[-1] == "Training loss did not improve more than tol=0.001000 for 2 consecutive epochs. Stopping."
    assert len(lines) == model.n_iter_ + 1
    MLPClassifier(random_state=0, verbose=True, early_stopping=True).fit(X, y)
    assert "Validation score: " in capsys.readouterr().out

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    progress = Progress(True, 10, terminal)
    progress.iteration(5, 0.25, None)
    progress.iteration(10, 0.125, 0.5)
    progress.end("Done.")
    half, whole = terminal.getvalue().split("\r")[1:]
    assert half == "█" * 15 + "░" * 15 + " 5/10  loss 0.250000"
    assert whole == "█" * 30 + " 10/10  loss 0.125000  validation score 0.5000\nDone.\n"
