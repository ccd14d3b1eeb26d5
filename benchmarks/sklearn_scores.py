"""Do bprong.sklearn's estimators reach the scores of scikit-learn's, in what time, and without scaled features?

scikit-learn's MLPClassifier and MLPRegressor run with lbfgs and with adam at three learning rates, all else at its
default; the regressor with targets as they are and with standardised ones. bprong's run with their defaults. Scores are
those of five folds (accuracy, or R²), all methods on the same folds; the seed is the number of the fold. Seconds are
those of `fit`, one thread, processor time; below 1,000 rows the least of three fits.

Each problem is run twice. "standardised": features with means 0 and variances 1, by the training fold, not timed.
"raw": the bundled data sets as they are; of generated ones, each column is shifted by one and multiplied by a power of
ten between −3 and 3.

The constants of training and the defaults of `alpha`, `tol` and `n_iter_no_change` were chosen with these problems in
view, without the three called "kept aside".

    python benchmarks/sklearn_scores.py            20 minutes on one core; runs what docs/scikit-learn.csv lacks
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
from harness.command_line import CommandLine
from sklearn import datasets
from sklearn.base import is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

import bprong.sklearn
from bprong.experiments.bench.rows import Log, grouped
from bprong.experiments.bench.tables import markdown

FOLDS = 5
SMALL = 1000  # rows; below it a fit is timed three times
RATES = ("1e-4", "1e-3", "1e-2")
BPRONG = "bprong"


@dataclass(frozen=True)
class Row:
    """One fit."""

    problem: str
    rows: int
    features: str
    method: str
    fold: int
    score: float
    seconds: float
    iterations: int


Loader = Callable[[], tuple[Any, Any]]

BUNDLED: dict[str, Loader] = {
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "breast_cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True, scaled=False),
}
GENERATED: dict[str, Loader] = {
    "moons": lambda: datasets.make_moons(500, noise=0.25, random_state=0),
    "classification": lambda: datasets.make_classification(800, n_informative=8, n_classes=3, random_state=0),
    "friedman1": lambda: datasets.make_friedman1(800, noise=1.0, random_state=0),
    "classification, large": lambda: datasets.make_classification(6000, n_informative=10, n_classes=4, random_state=1),
    "friedman1, large": lambda: datasets.make_friedman1(6000, noise=1.0, random_state=1),
}
KEPT_ASIDE: dict[str, Loader] = {
    "circles": lambda: datasets.make_circles(400, noise=0.15, factor=0.5, random_state=3),
    "quantiles": lambda: datasets.make_gaussian_quantiles(n_samples=3000, n_features=8, n_classes=4, random_state=3),
    "friedman2": lambda: datasets.make_friedman2(2500, noise=100.0, random_state=3),
}
PROBLEMS = BUNDLED | GENERATED | KEPT_ASIDE


def data(name: str, raw: bool) -> tuple[Any, Any]:
    """Features and targets; for raw generated ones, with columns of very different scales."""
    X, y = PROBLEMS[name]()
    if raw and name not in BUNDLED:
        scale = 10.0 ** np.linspace(-3, 3, X.shape[1])[np.random.RandomState(0).permutation(X.shape[1])]
        X = (X + 1) * scale
    return X, y


def methods(regression: bool) -> dict[str, Callable[[int], Any]]:
    """By name: the estimator with a seed."""
    kind = MLPRegressor if regression else MLPClassifier
    settings = {"lbfgs": {"solver": "lbfgs"}}
    settings |= {f"adam {rate}": {"solver": "adam", "learning_rate_init": float(rate)} for rate in RATES}
    own = bprong.sklearn.MLPRegressor if regression else bprong.sklearn.MLPClassifier
    found: dict[str, Callable[[int], Any]] = {BPRONG: lambda seed: own(random_state=seed)}
    for name, setting in settings.items():
        found[name] = lambda seed, setting=setting: kind(random_state=seed, **setting)
        if regression:
            found[f"{name}, targets standardised"] = lambda seed, setting=setting: TransformedTargetRegressor(
                kind(random_state=seed, **setting), transformer=StandardScaler()
            )
    return found


def folds(y: Any) -> Any:
    regression = y.dtype.kind == "f"
    return (KFold if regression else StratifiedKFold)(FOLDS, shuffle=True, random_state=0).split(y[:, None], y)


def run(name: str, features: str, fold: int, only: Sequence[str] | None = None) -> list[Row]:
    """All methods, or some of them, on one fold."""
    X, y = data(name, features == "raw")
    train, test = list(folds(y))[fold]
    if features != "raw":
        X = StandardScaler().fit(X[train]).transform(X)
    found = []
    for method, estimator in methods(y.dtype.kind == "f").items():
        if only is None or method in only:
            score, seconds, iterations = fitted(estimator(fold), X, y, train, test)
            found.append(Row(name, len(X), features, method, fold, score, seconds, iterations))
    return found


def fitted(estimator: Any, X: Any, y: Any, train: Any, test: Any) -> tuple[float, float, int]:
    """The score on the test fold, the seconds of `fit`, and its iterations."""
    seconds = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, that it has not converged; of overflow with raw features
        for _ in range(3 if len(X) < SMALL else 1):
            start = time.process_time()
            try:
                estimator.fit(X[train], y[train])
            except ValueError:  # weights that are not finite
                return -math.inf if is_regressor(estimator) else 0.0, time.process_time() - start, 0
            seconds = min(seconds, time.process_time() - start)
        score = estimator.score(X[test], y[test])
    return float(score), seconds, getattr(estimator, "regressor_", estimator).n_iter_


# Tables ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Means over the folds of one method; error: the standard error of the mean score."""

    method: str
    score: float
    error: float
    seconds: float

    @classmethod
    def of(cls, method: str, rows: Sequence[Row]) -> Result:
        scores = [row.score for row in rows]
        return cls(method, mean(scores), stdev(scores) / math.sqrt(len(rows)), mean(row.seconds for row in rows))


def results(rows: Sequence[Row], problem: str, features: str) -> tuple[Result, Result] | None:
    """bprong's result and scikit-learn's best: the highest mean score, the fastest of equal ones."""
    own = [row for row in rows if (row.problem, row.features) == (problem, features)]
    found = {method: Result.of(method, of) for (method,), of in grouped(own, "method").items() if len(of) > 1}
    others = [result for method, result in found.items() if method != BPRONG]
    if BPRONG not in found or not others:
        return None
    return found[BPRONG], max(others, key=lambda result: (round(result.score, 6), -result.seconds))


def table(rows: Sequence[Row]) -> str:
    """One line for each problem. In bold: scores a standard error below the best, and times beyond the mark."""
    lines = []
    for problem in PROBLEMS:
        scaled = results(rows, problem, "standardised")
        raw = results(rows, problem, "raw")
        if scaled is None or raw is None:
            continue
        own, best = scaled
        count = next(row.rows for row in rows if row.problem == problem)
        ratio = own.seconds / best.seconds
        score = f"{own.score:.3f}"
        slow = ratio > (2 if count < SMALL else 1)
        lines.append(
            [
                f"{problem}{', kept aside' if problem in KEPT_ASIDE else ''}",
                f"{count:,}",
                f"{best.score:.3f} ± {best.error:.3f}",
                best.method,
                f"**{score}**" if own.score < best.score - best.error else score,
                f"{1000 * best.seconds:.0f}",
                f"**{1000 * own.seconds:.0f}**" if slow else f"{1000 * own.seconds:.0f}",
                f"{ratio:.2f}",
                f"{raw[1].score:.3f}",
                f"**{raw[0].score:.3f}**" if raw[0].score < best.score - best.error else f"{raw[0].score:.3f}",
            ]
        )
    titles = ["problem", "rows", "scikit-learn's best", "by", "bprong", "its ms", "bprong's ms", "ratio"]
    return markdown([*titles, "raw: scikit-learn's best", "raw: bprong"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.setting("folds", FOLDS, 2, "folds that are run")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), help="run these only")
    parser.add_argument("--again", nargs="+", help="methods whose rows are replaced")
    options = parser.parse(arguments)
    log = Log(options.out / "scikit-learn.csv", Row)
    log.rows = [row for row in log.rows if row.method not in (options.again or ())]
    known = {(row.problem, row.features, row.method, row.fold) for row in log.rows}
    for problem in options.problems or (list(PROBLEMS)[:1] if options.quick else PROBLEMS):
        for features in ("standardised", "raw"):
            for fold in range(options.folds):
                names = methods(PROBLEMS[problem]()[1].dtype.kind == "f")
                missing = [name for name in names if (problem, features, name, fold) not in known]
                if missing:
                    log.add(run(problem, features, fold, missing))
            found = results(log.rows, problem, features)
            if found is not None:
                print(problem, features, *found, flush=True)
    print(table(log.rows))


if __name__ == "__main__":
    main()
