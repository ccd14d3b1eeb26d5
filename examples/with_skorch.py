"""skorch: a network in scikit-learn's Pipeline and GridSearchCV. bprong.skorch has skorch's classes for BPRONG.

pip install 'bprong[skorch]'
python examples/with_skorch.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from bprong.skorch import NeuralNetClassifier


class Perceptron(nn.Module):
    def __init__(self, width: int = 50) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, X: Tensor) -> Tensor:
        return self.net(X)  # logits


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    net = NeuralNetClassifier(Perceptron, max_epochs=10, iterator_train__shuffle=True, train_split=None, verbose=0)
    pipeline = make_pipeline(StandardScaler(), net)
    grid = {"neuralnetclassifier__module__width": [20, 100], "neuralnetclassifier__lr": ["auto", 0.02]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(x.astype("float32"), y)
    print(f"best of four: {search.best_params_}, accuracy {search.best_score_:.1%}")
    return search.best_score_


if __name__ == "__main__":
    main()
