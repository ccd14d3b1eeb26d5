"""A live view of the optimizer's report in the terminal, for long runs.

pip install 'bprong[experiments]'
python examples/live_view.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bprong
from bprong.experiments.live import LiveReport


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 100), nn.ReLU(),
        nn.Linear(100, 10),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion)
    with LiveReport(optimizer) as live:
        for step in range(300):
            batch = torch.randint(1500, (100,))
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            live.update(loss=loss.item())  # draws at most once a second
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    accuracy = float((model(x[1500:]).argmax(dim=1) == y[1500:]).float().mean())
                model.train()
                live.update(accuracy=accuracy)
    return accuracy


if __name__ == "__main__":
    main()
