"""timm: a vision transformer, with spectral steps, weight decay and timm's cosine schedule.

pip install 'bprong[experiments]' timm
python examples/with_timm.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from timm.scheduler import CosineLRScheduler
from torch import nn

import bprong


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images = nn.functional.interpolate(x.float().view(-1, 1, 8, 8) / 16, scale_factor=4).expand(-1, 3, -1, -1)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=10)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, lr=0.02, step="spectral", weight_decay=0.05)
    steps = 100
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=10, t_in_epochs=False)
    for step in range(steps):
        batch = torch.randint(1500, (64,))
        optimizer.zero_grad()
        criterion(model(images[batch]), y[batch]).backward()
        optimizer.step()
        scheduler.step_update(step + 1)
    with torch.no_grad():
        accuracy = float((model.eval()(images[1500:]).argmax(dim=1) == y[1500:]).float().mean())
    print(f"accuracy on digits that were not trained on, after {steps} steps: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
