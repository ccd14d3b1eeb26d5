"""torch_geometric: a graph network that classifies nodes, one in ten of which has a label.

pip install bprong torch_geometric
python examples/with_torch_geometric.py
"""

import torch
from torch import nn
from torch_geometric.nn import GCN, Linear
from torch_geometric.utils import stochastic_blockmodel_graph

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    torch.manual_seed(0)
    classes, size = 4, 60  # nodes are joined more often within a class, and their features tell little
    edges = stochastic_blockmodel_graph([size] * classes, torch.eye(classes) * 0.15 + 0.03)
    y = torch.arange(classes).repeat_interleave(size)
    x = nn.functional.one_hot(y, classes) + 1.5 * torch.randn(len(y), classes)
    labelled = torch.rand(len(y)) < 0.1
    bprong.register(Linear, like=nn.Linear)  # torch_geometric's own linear layer
    model = GCN(in_channels=classes, hidden_channels=32, num_layers=2, out_channels=classes)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = bprong.BPRONG(model, criterion, weight_decay=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        criterion(model(x, edges), y.where(labelled, -100)).backward()  # −100: not a target
        optimizer.step()
    accuracy = float((model(x, edges).argmax(dim=1) == y)[~labelled].float().mean())
    print(f"accuracy on nodes without a label: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
