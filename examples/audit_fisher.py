"""An audit: how close the exact Fisher matrix of a small network is to the identity, in three coordinate systems.

pip install 'bprong[experiments]'
python examples/audit_fisher.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bprong


def whitened(model: nn.Module, x: Tensor, backward: bool) -> nn.Module:
    """The same function in whitened coordinates: forward only, or in both directions."""
    model = bprong.whiten_(copy.deepcopy(model), backward=backward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = "cross_entropy" if backward else None
    own = {"backward_offset": 0, "backward_damping": 0.001, "fisher": "exact"} if backward else {}
    bprong.Rewhitening(model, optimizer, loss, forward_damping=0.01, **own).step(x)
    return model


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float()[:500] / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
    optimizer = bprong.BPRONG(model, "cross_entropy")
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y[:500]).backward()
        optimizer.step()
    del optimizer
    models = {
        "ordinary": model,
        "whitened forward (PRONG)": whitened(model, x, backward=False),
        "whitened both ways (BPRONG)": whitened(model, x, backward=True),
    }
    print(f"{'coordinates':<28} ‖cG − I‖/‖I‖   eigenvalues within a factor of two of 1   in other layers' blocks")
    distances = []
    for name, own in models.items():
        measures = bprong.audit(own, x, "cross_entropy")["matrices"]["kronecker"]
        distances.append(measures["distance_scaled"])
        print(f"{name:<28} {distances[-1]:12.3f} {measures['near_one']:42.1%} {measures['off_block']:25.1%}")
    return distances[-1] / distances[0]


if __name__ == "__main__":
    main()
