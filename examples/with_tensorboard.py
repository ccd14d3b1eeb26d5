"""Loggers: report().scalars() is a flat dictionary of numbers, here for TensorBoard.

Every logger with a dictionary method takes it as it is: wandb.log(scalars), mlflow.log_metrics(scalars, step), or
self.log_dict(scalars) in a LightningModule.

pip install 'bprong[experiments]' tensorboard
python examples/with_tensorboard.py && tensorboard --logdir runs
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import bprong


def main() -> int:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = x.float() / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion)
    with SummaryWriter("runs/digits") as writer:
        for step in range(100):
            batch = torch.randint(len(x), (100,))
            optimizer.zero_grad()
            loss = criterion(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss.item(), step)
            if step % 10 == 9:  # a report costs a few milliseconds
                scalars = optimizer.report().scalars()
                for name, value in scalars.items():
                    writer.add_scalar(f"bprong/{name}", value, step)
    print(f"{len(scalars)} numbers, such as {', '.join(list(scalars)[3:7])}")
    return len(scalars)


if __name__ == "__main__":
    main()
