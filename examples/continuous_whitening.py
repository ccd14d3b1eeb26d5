"""Continuous whitening: U, c and R follow the statistics a little with every fifth batch, instead of periodically.

It prints how far the inputs and errors of the layers are from white in their own coordinates, ‖E[vvᵀ] − I‖ / ‖I‖,
during training: with the paper's periodic refresh, and with continuous whitening.

pip install 'bprong[experiments]'
python examples/continuous_whitening.py
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bprong
from bprong.audit import second_moments
from bprong.experiments.continuous import ContinuousRewhitening

TIMES = (10, 50, 100, 200, 300)  # steps at which the distance is printed


def distance(model: nn.Module, x: Tensor) -> float:
    """The mean distance of the second moments of both sides of all layers from the identity."""
    moments = [matrix for sides in second_moments(model, x, "cross_entropy").values() for matrix in sides]
    identities = [torch.eye(len(matrix), dtype=matrix.dtype) for matrix in moments]
    return sum(float((m - one).norm() / one.norm()) for m, one in zip(moments, identities, strict=True)) / len(moments)


def train(kind: type[bprong.Rewhitening], **settings: Any) -> dict[int, float]:
    """The distance after every tenth step."""
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = bprong.whiten_(nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rewhitening = kind(model, optimizer, "cross_entropy", **settings)
    distances = {}
    for step in range(1, 301):
        batch = torch.randint(len(x), (100,))
        rewhitening.step(x[batch])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if step % 10 == 0:
            distances[step] = distance(model, x)
    return distances


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    print("distance from white after " + "".join(f"{step:>6}" for step in TIMES) + " steps; largest")
    distances = {"periodic": train(bprong.Rewhitening), "continuous": train(ContinuousRewhitening, rate=0.05)}
    for name, by_step in distances.items():
        shown = "".join(f"{by_step[step]:6.2f}" for step in TIMES)
        print(f"{name:<25} {shown}{max(by_step.values()):15.2f}")
    return max(distances["continuous"].values()) / max(distances["periodic"].values())


if __name__ == "__main__":
    main()
