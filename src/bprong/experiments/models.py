"""The network of the experiment: 784-100-100-100-10, plain or with Batch Normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

__all__ = ["ACTIVATIONS", "perceptron", "with_batch_norm"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


def perceptron(widths: Sequence[int], activation: str, seed: int) -> nn.Sequential:
    """Linear, φ, …, Linear with torch's default initialisation, drawn from `seed` alone.

    >>> [type(m).__name__ for m in perceptron([4, 3, 2], "tanh", seed=0)]
    ['Linear', 'Tanh', 'Linear']
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        modules: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            modules += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1])


def with_batch_norm(plain: nn.Sequential) -> nn.Sequential:
    """The same layers with a BatchNorm1d between each hidden layer and its activation."""
    modules: list[nn.Module] = []
    for module in plain:
        if not isinstance(module, nn.Linear):
            modules.append(nn.BatchNorm1d(modules[-1].out_features))  # type: ignore[arg-type]
        modules.append(module)
    return nn.Sequential(*modules)
