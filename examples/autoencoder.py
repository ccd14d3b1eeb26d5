"""A deep autoencoder of 8×8 digits, 64-100-50-10-50-100-64, without a learning rate.

Pixels are probabilities of bits: the loss is binary cross-entropy, and the model returns logits. Adam gets as many
steps as fit into about the same time, at the best of the rates 0.001, 0.003, 0.01 and 0.03 (one seed).

pip install 'bprong[experiments]'
python examples/autoencoder.py
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn

import bprong


def error_after_training(make_optimizer: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], steps: int) -> float:
    """The squared error of the reconstructed pixels."""
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    sizes = [64, 100, 50, 10, 50, 100, 64]
    layers = [layer for n, after in pairwise(sizes) for layer in (nn.Linear(n, after), nn.Tanh())]
    model = nn.Sequential(*layers[:-1])  # the last layer gives logits
    criterion = nn.BCEWithLogitsLoss()
    optimizer = make_optimizer(model, criterion)
    for _ in range(steps):
        batch = x[torch.randint(len(x), (250,))]
        optimizer.zero_grad()
        criterion(model(batch), batch).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(x).sigmoid() - x).square().mean())


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    optimizers = {
        "Adam, lr=0.01": (lambda model, _: torch.optim.Adam(model.parameters(), lr=0.01), 1000),
        "BPRONG": (bprong.BPRONG, 300),
    }
    errors = {}
    for name, (make, steps) in optimizers.items():
        start = time.perf_counter()
        errors[name] = error_after_training(make, steps)
        print(f"{name:<13} {steps:>4} steps, {time.perf_counter() - start:4.1f} s: squared error {errors[name]:.4f}")
    return errors["BPRONG"]


if __name__ == "__main__":
    main()
