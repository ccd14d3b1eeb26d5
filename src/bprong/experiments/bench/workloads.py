"""The eight workloads: data, network, loss, step budget, and how training and validation loss are measured.

A workload takes about five seconds of AdamW on one thread. Its targets are in `targets.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.experiments.bench import data, networks
from bprong.experiments.bench.data import Data, Split
from bprong.experiments.models import digits_convnet, perceptron, with_batch_norm

Loss = Callable[[Tensor, Tensor], Tensor]
SPACING = 1.07  # of the steps after which losses are measured: each is 7 % later than the one before, or the next


@dataclass(frozen=True)
class Workload:
    """A network to train.

    data:       by split; "tuning" to choose settings on, "test" for the fresh seeds
    model:      makes the network for a seed
    steps:      the step budget
    criterion:  makes the loss
    normalised: makes the network with Batch Normalisation; None if it has none
    measured:   so many training rows, and at most so many validation rows, are used to measure losses
    validation: the validation loss from the network and the validation rows; None: the criterion
    seconds:    of an AdamW run over the whole budget, including measurements; used to plan a budget
    """

    title: str
    data: Callable[[Split], Data]
    model: Callable[[int], nn.Module]
    batch: int
    steps: int
    criterion: Callable[[], Loss]
    normalised: Callable[[int], nn.Module] | None = None
    measured: int = 1000
    validation: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    seconds: float = 5.0

    def measured_steps(self) -> Iterator[int]:
        """The steps after which losses are measured: geometric, so that a short time is as precise as a long one."""
        step = 1
        while step < self.steps:
            yield step
            step = max(step + 1, round(step * SPACING))
        yield self.steps


class Measurement:
    """Training and validation loss of a network on fixed rows of one split, in evaluation mode."""

    def __init__(self, workload: Workload, split: Split) -> None:
        own = workload.data(split)
        places = torch.linspace(0, len(own.x) - 1, min(workload.measured, len(own.x))).long()
        self._train = own.x[places], own.y[places]
        self._val = own.x_val[: workload.measured], own.y_val[: workload.measured]
        loss = workload.criterion()
        self._validation = workload.validation or (lambda model, x, y: loss(model(x), y))
        self._loss = loss

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> tuple[float, float]:
        model.eval()
        x, y = self._train
        train_loss = float(self._loss(model(x), y))
        val_loss = float(self._validation(model, *self._val))
        model.train()
        return train_loss, val_loss


class TokenCrossEntropy(nn.Module):
    """Cross-entropy per target of (…, classes) logits; `reduction` is over the targets of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.per_row = nn.CrossEntropyLoss()

    @property
    def reduction(self) -> str:
        return self.per_row.reduction

    @reduction.setter
    def reduction(self, value: str) -> None:
        self.per_row.reduction = value

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.per_row(logits.flatten(0, -2), y.flatten())
        return loss


class NatsPerImage(nn.Module):
    """Binary cross-entropy, summed over the pixels of an image; `reduction` is over the images of a batch."""

    reduction = "mean"

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        total = F.binary_cross_entropy_with_logits(logits, y, reduction="sum")
        return total / len(y) if self.reduction == "mean" else total


def solution_error(model: nn.Module, x: Tensor, u: Tensor) -> Tensor:
    """The mean squared error of a PoissonNetwork's u, relative to the mean square of the known one."""
    assert isinstance(model, networks.PoissonNetwork)
    return F.mse_loss(model.solution(x), u) / u.square().mean()


def normalised(model: Callable[[int], nn.Sequential]) -> Callable[[int], nn.Module]:
    return lambda seed: with_batch_norm(model(seed))


PAPER = partial(perceptron, [784, 100, 100, 100, 10], "relu")
REGRESSION = partial(perceptron, [20, 64, 64, 1], "relu")
WORKLOADS: dict[str, Workload] = {
    "paper": Workload(
        "the paper's network, MNIST", data.mnist, PAPER, 100, 1200, nn.CrossEntropyLoss, normalised=normalised(PAPER),
        seconds=3.0,
    ),
    "autoencoder": Workload(
        "deep autoencoder, MNIST", data.mnist_autoencoding, networks.autoencoder, 200, 700, NatsPerImage,
        normalised=normalised(networks.autoencoder), seconds=8.0,
    ),
    "deep": Workload(
        "thirty layers, digits", data.digits, networks.deep_tanh, 100, 800, nn.CrossEntropyLoss,
        normalised=normalised(networks.deep_tanh), seconds=5.5,
    ),
    "conv": Workload(
        "convolutions, digits", data.digit_images, digits_convnet, 64, 500, nn.CrossEntropyLoss,
        normalised=networks.digits_convnet_bn, seconds=2.5,
    ),
    "gpt": Workload(
        "small GPT, Python's sources", data.python_text, partial(networks.character_gpt, width=64, depth=2), 16, 300,
        TokenCrossEntropy, measured=48, seconds=7.5,
    ),
    "vit": Workload(
        "vision transformer, digits", data.digits, networks.vision_transformer, 64, 400, nn.CrossEntropyLoss,
        measured=500, seconds=6.0,
    ),
    "pinn": Workload(
        "physics-informed, Poisson's equation", data.collocation, networks.poisson_network, 250, 1200, nn.MSELoss,
        validation=solution_error, seconds=4.5,
    ),
    "regression": Workload(
        "regression, badly scaled features", data.badly_scaled, REGRESSION, 100, 2000, nn.MSELoss,
        normalised=normalised(REGRESSION), seconds=1.5,
    ),
}  # fmt: skip
