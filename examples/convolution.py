"""A small convolutional network on 8×8 digits, before and after: what is whitened, what it costs, what it reaches.

pip install 'bprong[experiments]'
python examples/convolution.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import bprong

TRAINED = 1400  # images; the others are for validation


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float().view(-1, 1, 8, 8) / 16
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    print(bprong.coverage(model))  # before anything is allocated
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = bprong.BPRONG(model, criterion)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)  # multiplies the automatic step
    for epoch in range(10):
        model.train()
        for batch in torch.randperm(TRAINED).split(100):
            optimizer.zero_grad()
            criterion(model(x[batch]), y[batch]).backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(x[TRAINED:]).argmax(dim=1) == y[TRAINED:]).float().mean())
        print(f"epoch {epoch + 1:>2}: validation accuracy {accuracy:.1%}")
    print(optimizer.report())
    return accuracy


if __name__ == "__main__":
    main()
