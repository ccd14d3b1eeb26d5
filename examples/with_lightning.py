"""Lightning: BPRONG in configure_optimizers, with gradient accumulation and clipping by the Trainer.

pip install 'bprong[experiments]' lightning
python examples/with_lightning.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bprong


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> bprong.BPRONG:
        return bprong.BPRONG(self.net, self.criterion)  # the module that training_step calls, and its loss


def main() -> float:
    torch.set_num_threads(1)  # more are slower for a small network, and very slow beside other programs
    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    module = Digits()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(TensorDataset(x.float() / 16, y), batch_size=50, shuffle=True))
    return float((module.net(x.float() / 16).argmax(dim=1) == y).float().mean())


if __name__ == "__main__":
    print(f"training accuracy: {main():.1%}")
