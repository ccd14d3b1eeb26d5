"""A table whose columns have very different units: the area of a tumour in thousands, its smoothness in hundredths.

Nothing is scaled beforehand. Gradient methods suffer from that; BPRONG whitens the inputs of each layer itself.

pip install 'bprong[experiments]'
python examples/tabular.py
"""

from collections.abc import Callable
from statistics import mean

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import bprong


def accuracy(make_optimizer: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], seed: int) -> float:
    """The accuracy on a third of the patients, after training on the others."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(values) for values in load_breast_cancer(return_X_y=True))
    x = x.float()
    trained, others = torch.randperm(len(x)).split([380, 189])
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = make_optimizer(model, criterion)
    for _ in range(500):
        batch = trained[torch.randint(len(trained), (64,))]
        optimizer.zero_grad()
        criterion(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return float((model(x[others]).argmax(dim=1) == y[others]).float().mean())


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    print("accuracy on new patients, mean of three splits")
    for lr in (0.001, 0.01, 0.1):
        adam = mean(accuracy(lambda m, _, lr=lr: torch.optim.Adam(m.parameters(), lr=lr), seed) for seed in range(3))
        print(f"Adam, lr={lr:<6} {adam:.1%}")
    ours = mean(accuracy(bprong.BPRONG, seed) for seed in range(3))
    print(f"BPRONG          {ours:.1%}")
    return ours


if __name__ == "__main__":
    main()
