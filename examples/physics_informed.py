"""A physics-informed network: u″ = f on [0, 1] with u(0) = u(1) = 0, learned from the equation alone.

The network carries u, u′ and u″ through its layers, so that each layer is used three times in a forward pass: on z, on
z′ and on z″. The optimizer finds these uses. What the model returns are residuals, and the loss is their mean square.
Adam gets as many steps as fit into about the same time, at the best of the rates 0.001, 0.003, 0.01 and 0.03 (one
seed). It becomes about as accurate there; at the two largest rates its error is forty to fifty times larger.

pip install bprong
python examples/physics_informed.py
"""

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong


def exact(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x) + 0.25 * torch.sin(4 * math.pi * x)


def f(x: Tensor) -> Tensor:
    return -(math.pi**2) * torch.sin(math.pi * x) - 4 * math.pi**2 * torch.sin(4 * math.pi * x)


class Residuals(nn.Module):
    """Residuals of the equation at x, and of the boundary conditions, as one column."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.ModuleList([nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 1)

    def jet(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """u and u″ at x: (n, 1)."""
        z, d1, d2 = x, torch.ones_like(x), torch.zeros_like(x)
        for layer in self.hidden:
            a, a1, a2 = layer(z), F.linear(d1, layer.weight), F.linear(d2, layer.weight)
            z = a.tanh()
            slope = 1 - z**2
            d1, d2 = slope * a1, slope * a2 - 2 * z * slope * a1**2
        return self.head(z), F.linear(d2, self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        ends = x.new_tensor([[0.0], [1.0]])
        u, u2 = self.jet(torch.cat((x, ends)))
        return torch.cat((u2[:-2] - f(x), 30 * u[-2:]))


def error_after_training(make_optimizer: Callable[[nn.Module, nn.Module], torch.optim.Optimizer], steps: int) -> float:
    torch.manual_seed(0)
    model = Residuals().double()
    criterion = nn.MSELoss()
    optimizer = make_optimizer(model, criterion)
    for _ in range(steps):
        residuals = model(torch.rand(128, 1, dtype=torch.float64))
        optimizer.zero_grad()
        criterion(residuals, torch.zeros_like(residuals)).backward()
        optimizer.step()
    x = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
    with torch.no_grad():
        return float((model.jet(x)[0] - exact(x)).norm() / exact(x).norm())


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    optimizers = {
        "Adam, lr=0.001": (lambda model, _: torch.optim.Adam(model.parameters(), lr=0.001), 1800),
        "BPRONG": (bprong.BPRONG, 500),
    }
    errors = {}
    for name, (make, steps) in optimizers.items():
        start = time.perf_counter()
        errors[name] = error_after_training(make, steps)
        print(f"{name:<14} {steps:>4} steps, {time.perf_counter() - start:4.1f} s: relative error {errors[name]:.1e}")
    return errors["BPRONG"]


if __name__ == "__main__":
    main()
