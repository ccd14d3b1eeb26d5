"""A table whose columns have very different units: the area of a tumour in thousands, its smoothness in hundredths.

Nothing is scaled beforehand. Gradient methods suffer from that; BPRONG whitens the inputs of each layer itself. The
average of its weights over the run, `optimizer.averaged()`, has a lower loss on new patients than the last ones.

pip install 'bprong[experiments]'
python examples/tabular.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import mean

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import bprong


def result(
    make_optimizer: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], seed: int, averaged: bool = False
) -> tuple[float, float]:
    """The accuracy and the loss on a third of the patients, after training on the others."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(values) for values in load_breast_cancer(return_X_y=True))
    x = x.float()
    trained, others = torch.randperm(len(x)).split([380, 189])
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = make_optimizer(model, criterion)
    if averaged:
        optimizer.averaged()  # the average begins here
    for _ in range(500):
        batch = trained[torch.randint(len(trained), (64,))]
        optimizer.zero_grad()
        criterion(model(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad(), optimizer.averaged() if averaged else nullcontext():
        output = model(x[others])
    return float((output.argmax(dim=1) == y[others]).float().mean()), float(criterion(output, y[others]))


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    print("accuracy and loss on new patients, means of ten splits")
    for lr in (0.001, 0.01, 0.1):
        show(f"Adam, lr={lr}", lambda m, _, lr=lr: torch.optim.Adam(m.parameters(), lr=lr))
    show("BPRONG", bprong.BPRONG)
    return show("BPRONG, averaged weights", bprong.BPRONG, averaged=True)


def show(name: str, make_optimizer: Callable[..., torch.optim.Optimizer], averaged: bool = False) -> float:
    accuracies, losses = zip(*(result(make_optimizer, seed, averaged) for seed in range(10)), strict=True)
    print(f"{name:<25} {mean(accuracies):.1%}  {mean(losses):.3f}")
    return mean(accuracies)


if __name__ == "__main__":
    main()
