"""skorch's networks with a factory are trained as by a plain loop, and stay scikit-learn's estimators."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from torch import Tensor, nn

import bprong
from helpers import assert_unchanged, classification, snapshot

X, Y = (values.numpy() for values in classification(60, 5, 3))
X = X.astype("float32")


class Perceptron(nn.Module):
    def __init__(self, width: int = 6, outputs: int = 3, squeezed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, outputs))
        self.squeezed = squeezed

    def forward(self, X: Tensor) -> Tensor:
        found = self.net(X)
        return found.squeeze(1) if self.squeezed else found


class Whitened(bprong.BPRONG.factory(Perceptron, "cross_entropy")):
    """With a name, so that networks can be pickled."""


class AtARate(bprong.BPRONG.factory(Perceptron, "cross_entropy", lr=0.05)):
    pass


SETTINGS: dict[str, Any] = {"max_epochs": 4, "batch_size": 20, "train_split": None, "verbose": 0}
CLASSES = SETTINGS | {"criterion": nn.CrossEntropyLoss, "optimizer": Whitened}


@pytest.mark.parametrize(("optimizer", "lr"), [(AtARate, 0.05), (Whitened, "auto")])
def test_a_network_takes_the_path_of_a_plain_loop(optimizer: Any, lr: Any) -> None:
    """Also with the learning rate of 0.01 that skorch fills in where steps need none."""
    rate = {"lr": lr} if lr != "auto" else {}
    net = NeuralNetClassifier(Perceptron, optimizer__every=2, **CLASSES | {"optimizer": optimizer} | rate).fit(X, Y)
    model = Perceptron()
    criterion = nn.CrossEntropyLoss()
    plain = bprong.BPRONG(model, criterion, lr=lr, every=2)
    for _ in range(4):
        for x, y in zip(torch.tensor(X).split(20), torch.tensor(Y).split(20), strict=True):
            plain.zero_grad()
            criterion(model(x), y).backward()
            plain.step()
    assert_unchanged(snapshot(model), snapshot(net.module_))


def test_all_kinds_of_networks_learn() -> None:
    labels = (Y == 1).astype("float32")
    numbers = X[:, :1] - X[:, 1:2]
    logistic = bprong.BPRONG.factory(Perceptron, "bce_with_logits")
    squared = bprong.BPRONG.factory(Perceptron, "mse")
    binary = NeuralNetBinaryClassifier(
        Perceptron, module__outputs=1, module__squeezed=True, optimizer=logistic, **SETTINGS
    )
    regressor = NeuralNetRegressor(Perceptron, module__outputs=1, optimizer=squared, **SETTINGS)
    for net, y in ((NeuralNetClassifier(Perceptron, **CLASSES), Y), (binary, labels), (regressor, numbers)):
        losses = net.fit(X, y).history[:, "train_loss"]
        assert losses[-1] < 0.8 * losses[0]


def test_a_pipeline_in_a_grid_search() -> None:
    pipeline = make_pipeline(StandardScaler(), NeuralNetClassifier(Perceptron, **CLASSES))
    grid = {
        "neuralnetclassifier__optimizer__step": ["natural", "spectral"],
        "neuralnetclassifier__module__width": [4, 6],
    }
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, Y)
    assert search.best_score_ > 0.7
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_clones_pickles_and_checkpoints(tmp_path: Path) -> None:
    """A clone has the settings; a network that was pickled or saved in mid-training goes on bit for bit."""
    rate = CLASSES | {"optimizer": AtARate, "lr": 0.05}
    net = NeuralNetClassifier(Perceptron, optimizer__momentum=0.5, **rate)
    assert clone(net).get_params()["optimizer__momentum"] == 0.5
    net.fit(X, Y)
    files = {f"f_{name}": tmp_path / f"{name}.pt" for name in ("params", "optimizer")}
    net.save_params(**files)
    pickled = pickle.loads(pickle.dumps(net))
    saved = clone(net).initialize()
    saved.load_params(**files)
    for one in (net, pickled, saved):
        one.partial_fit(X, Y)
    assert_unchanged(snapshot(net.module_), snapshot(pickled.module_))
    assert_unchanged(snapshot(net.module_), snapshot(saved.module_))


def test_parameter_groups_by_name() -> None:
    groups = [("net.0*", {"lr": 0.01})]
    net = NeuralNetClassifier(Perceptron, optimizer__param_groups=groups, **CLASSES | {"lr": 0.05}).fit(X, Y)
    assert [group["lr"] for group in net.optimizer_.param_groups] == [0.01, 0.05]


def test_the_optimizer_itself_as_class_fails_with_a_message_that_names_the_factory() -> None:
    with pytest.raises(TypeError, match=r"BPRONG\.factory\(model, loss\)"):
        NeuralNetClassifier(Perceptron, **CLASSES | {"optimizer": bprong.BPRONG}).fit(X, Y)


def test_probabilities_instead_of_logits_are_noticed() -> None:
    """skorch's default criterion, NLLLoss, takes the logarithm of what the module returns."""
    loss = bprong.BPRONG.factory(Perceptron, "nll")
    with pytest.raises(RuntimeError, match="nll.*was not called with the output of the model"):
        NeuralNetClassifier(Perceptron, optimizer=loss, **SETTINGS).fit(np.abs(X), Y)
