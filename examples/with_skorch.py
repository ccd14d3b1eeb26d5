"""skorch: a network in GridSearchCV. skorch gives an optimizer the parameters only; GivesModule adds the module.

pip install bprong skorch
python examples/with_skorch.py
"""

import skorch
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from torch import nn

import bprong


class GivesModule:
    def initialize_optimizer(self, triggered_directly=None):
        (params,), settings = self.get_params_for_optimizer("optimizer", self.get_all_learnable_params())
        self.optimizer_ = self.optimizer(self.module_, self.criterion_, params=params, **settings)
        return self


class NeuralNetClassifier(GivesModule, skorch.NeuralNetClassifier):
    """Likewise for skorch's NeuralNetBinaryClassifier and NeuralNetRegressor."""


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))  # returns logits
    net = NeuralNetClassifier(model, criterion=nn.CrossEntropyLoss, optimizer=bprong.BPRONG, max_epochs=10, verbose=0)
    search = GridSearchCV(net, {"lr": ["auto", 0.02]}, cv=3).fit((x / 16).astype("float32"), y)
    print(f"better of two: {search.best_params_}, accuracy {search.best_score_:.1%}")
    return search.best_score_


if __name__ == "__main__":
    main()
