"""Accelerate: a prepared model and optimizer, with accumulation and clipping by the Accelerator.

pip install 'bprong[experiments]' accelerate
python examples/with_accelerate.py              one process
accelerate launch examples/with_accelerate.py   as many as Accelerate is configured for
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    loader = DataLoader(TensorDataset(x.float() / 16, y), batch_size=50, shuffle=True)
    torch.manual_seed(0)
    criterion = nn.CrossEntropyLoss()
    model, loader = accelerator.prepare(nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)), loader)
    optimizer = accelerator.prepare(bprong.BPRONG(model, criterion))  # the prepared model, which may be distributed
    for _ in range(5):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print(f"training loss of the last batch: {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
