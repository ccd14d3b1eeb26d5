"""The scikit-learn estimators with data frames of pandas and polars, and the checks that need pandas."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_wine
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.utils.estimator_checks import check_estimator

from bprong.sklearn import MLPClassifier, MLPRegressor


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames_give_names_and_the_same_predictions(frame):
    X, y = load_wine(return_X_y=True)
    names = load_wine().feature_names
    table = frame(dict(zip(names, X.T, strict=True)))
    model = MLPClassifier(random_state=0).fit(table, y)
    assert list(model.feature_names_in_) == names
    plain = MLPClassifier(random_state=0).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(table), plain.predict_proba(X), rtol=1e-7)  # another memory layout
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(table[names[::-1]])
    series = (pd.Series if frame is pd.DataFrame else pl.Series)(np.array(["a", "b", "c"])[y])
    weight = (pd.Series if frame is pd.DataFrame else pl.Series)(np.ones(len(y)))
    assert MLPClassifier(random_state=0).fit(table, series, weight).score(table, series) > 0.98
    assert MLPRegressor(random_state=0).fit(table, table[names[0]]).score(table, table[names[0]]) > 0.95


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_a_table_of_words_and_numbers_in_a_search(frame):
    random = np.random.RandomState(0)
    words = random.choice(["red", "green", "blue"], 200)
    size = 1e4 * random.rand(200)
    y = np.where(words == "red", size > 5e3, size < 2e3)
    model = make_pipeline(
        make_column_transformer((OneHotEncoder(), ["colour"]), remainder="passthrough"),
        MLPClassifier(random_state=0, max_iter=500),
    )
    search = GridSearchCV(model, {"mlpclassifier__alpha": [0.01, 0.1]}, cv=3)
    assert search.fit(frame({"colour": words, "size": size}), y).best_score_ > 0.9


@pytest.mark.parametrize("estimator", [MLPClassifier, MLPRegressor])
def test_no_check_is_skipped_for_want_of_pandas(estimator):
    results = check_estimator(estimator(), on_skip=None)
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    skipped = [str(result["exception"]) for result in results if result["status"] == "skipped"]
    assert all("SCIPY_ARRAY_API" in reason or "decision_function" in reason for reason in skipped), skipped
