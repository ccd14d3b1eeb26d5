"""skorch: a network in GridSearchCV, which copies the model, so that the factory is given its class.

pip install bprong skorch
python examples/with_skorch.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

from bprong import BPRONG


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))  # returns logits
    optimizer = BPRONG.factory(nn.Sequential, "cross_entropy")
    net = NeuralNetClassifier(model, criterion=nn.CrossEntropyLoss, optimizer=optimizer, max_epochs=10, verbose=0)
    search = GridSearchCV(net, {"optimizer__step": ["natural", "spectral"]}, cv=3).fit((x / 16).astype("float32"), y)
    print(f"better of two: {search.best_params_}, accuracy {search.best_score_:.1%}")
    return search.best_score_


if __name__ == "__main__":
    main()
