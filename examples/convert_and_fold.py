"""The paper's network: convert a model, train it in whitened coordinates with any optimizer, and fold it back.

pip install 'bprong[experiments]'
python examples/convert_and_fold.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    with torch.no_grad():
        before = model(x)
        bprong.whiten_(model)
        print(model)
        print(f"converted: outputs differ by {float((model(x) - before).abs().max()):.1e}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rewhitening = bprong.Rewhitening(model, optimizer, "cross_entropy", forward_every=20, backward_every=20)
    for step in range(200):
        batch = torch.randint(len(x), (100,))
        rewhitening.step(x[batch])  # changes coordinates at every 20th step, and never the function
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    plain = bprong.fold(model)
    with torch.no_grad():
        difference = float((plain(x) - model(x)).abs().max())
    print(f"folded: {', '.join(type(layer).__name__ for layer in plain)}; outputs differ by {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
