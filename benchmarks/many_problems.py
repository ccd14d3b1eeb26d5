"""The sixty problems of `many.py`, each with what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import many_data as data
import torch
import torch.nn.functional as F
from layers import loss_of
from many_data import Data, digits, tabular
from many_networks import (
    VAE,
    Bag,
    LanguageModel,
    Mixer,
    Recurrent,
    TwoHeads,
    convnet,
    convnet_bn_dropout,
    deep_residual,
    dropout_mlp,
    mlp,
    resnet,
    scaled,
    small_convnet,
)
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
RARE = torch.tensor([1.0, 20.0])  # weights of two classes
LEAST_SMOOTHED = 0.5003  # cross-entropy with labels smoothed by 0.1 over ten classes, at its least


@dataclass(frozen=True)
class Problem:
    """A network, its data and its loss; what Adam is given as well.

    `summed`: the loss is a sum over the batch, and is reported per example. `penalty`: what is in the loss beside the
    likelihood. `floor`: the least loss there can be. `cosine`: the learning rate, or its multiplier, falls to 0.
    """

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    batch: int
    steps: int
    likelihood: str = "categorical"
    loss: Loss = F.cross_entropy
    summed: bool = False
    penalty: Callable[[Any], Tensor] | None = None
    floor: float = 0.0
    optimizer: str = "BPRONG"
    weight_decay: float = 0.0
    clip: float = 0.0  # the gradient's norm; 0: as it is
    cosine: bool = False


# Losses ---------------------------------------------------------------------------------------------------------------


def halved_squares(output: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((output - y) ** 2).sum()


def weighted(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, weight=RARE)


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, label_smoothing=0.1)


def bits_per_image(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, y, reduction="sum") / len(y)


def one_bit(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output[:, 0], y)


SQUARES: dict[str, Any] = {"likelihood": "gaussian", "loss": F.mse_loss}
BITS: dict[str, Any] = {"likelihood": "bernoulli", "loss": F.binary_cross_entropy_with_logits}


# Parts ----------------------------------------------------------------------------------------------------------------


def net(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU, **settings: Any) -> Callable[[], nn.Module]:
    return partial(mlp, sizes, activation, **settings)


def times(factor: float, *sizes: int, **settings: Any) -> Callable[[], nn.Module]:
    """A perceptron, its initial weights and biases so many times what is usual."""
    return lambda: scaled(mlp(sizes, **settings), factor)


THREE = net(64, 64, 64, 10)
REGRESSOR = net(8, 64, 64, 1)
IRIS, WINE, CANCER = (partial(tabular, name) for name in ("iris", "wine", "breast_cancer"))


# Problems -------------------------------------------------------------------------------------------------------------

LAYERS = {
    "cnn-bn-dropout": Problem(
        "convolutions, Batch Normalisation and dropout", convnet_bn_dropout, data.mnist_images, 64, 200
    ),
    "resnet-bn": Problem(
        "residual convolutions, Batch Normalisation", lambda: resnet(nn.BatchNorm2d), data.digit_images, 64, 200
    ),
    "resnet-gn": Problem(
        "residual convolutions, group normalisation", lambda: resnet(partial(nn.GroupNorm, 4)), data.digit_images,
        64, 200,
    ),
    "lm-untied": Problem(
        "language model: a causal transformer", lambda: LanguageModel(False), data.text, 32, 200, loss=loss_of
    ),
    "lm-tied": Problem(
        "the same, its head tied to the embedding", lambda: LanguageModel(True), data.text, 32, 200, loss=loss_of
    ),
    "layernorm-mlp": Problem(
        "layer normalisation", net(784, 128, 128, 128, 10, activation=nn.GELU, norm=nn.LayerNorm), data.mnist, 64, 200
    ),
    "mixer": Problem("weights shared by patches, by channels", Mixer, partial(data.mnist, 3000), 64, 200),
    "lstm": Problem("recurrent, no forward mode", lambda: Recurrent(nn.LSTM), data.third_last, 64, 250),
    "gru": Problem("recurrent, gated", lambda: Recurrent(nn.GRU), data.third_last, 64, 250),
    "embed-bag-rare": Problem("an embedding most words of which are rare", Bag, data.bags, 64, 200),
    "unused-head": Problem("a layer that is never used", TwoHeads, digits, 64, 200),
    "vae": Problem(
        "variational autoencoder: noise within, a penalty beside the likelihood", VAE, data.mnist_itself, 100, 200,
        "bernoulli", bits_per_image, penalty=lambda model: model.kl,
    ),
    "dropout-mlp": Problem("dropout of one half, twice", dropout_mlp, digits, 64, 200),
}  # fmt: skip

RAW = {
    "iris-raw": Problem("raw features, full batch", net(4, 16, 16, 3, activation=nn.Tanh), IRIS, 150, 300),
    "wine-raw": Problem("raw features from 0.1 to 1,700, full batch", net(13, 32, 32, 3), WINE, 178, 300),
    "wine-raw-logreg": Problem("the same, linear", partial(nn.Linear, 13, 3), WINE, 178, 300),
    "cancer-raw": Problem("raw features from 0 to 4,300, full batch", net(30, 32, 2), CANCER, 569, 300),
    "cancer-raw-16": Problem("the same, batch 16", net(30, 32, 2), CANCER, 16, 300),
    "uint8-mlp": Problem("pixels from 0 to 255", net(784, 64, 64, 10), partial(data.mnist, scale=255), 64, 200),
    "uint8-cnn": Problem("pixels from 0 to 255, convolutions", convnet, partial(data.mnist_images, 255), 64, 200),
    "constant-dup": Problem("constant features, and some twice", net(18, 32, 3), data.wine_with_constants, 32, 300),
    "raw-diabetes-unscaled": Problem(
        "inputs of 0.05, targets of 150", net(10, 64, 1), partial(data.diabetes, 1), 32, 300, **SQUARES
    ),
}

TARGETS = {
    "diabetes-full": Problem(
        "targets of 150, full batch", net(10, 64, 1, activation=nn.Tanh), data.diabetes, 442, 300, **SQUARES
    ),
    "diabetes-16": Problem("targets of 150, batch 16", net(10, 64, 1), data.diabetes, 16, 400, **SQUARES),
    "target-1e4": Problem("targets of 30,000", REGRESSOR, data.large, 32, 300, **SQUARES),
    "heavy-tail": Problem("noise with heavy tails", REGRESSOR, data.heavy_tailed, 32, 300, **SQUARES),
    "sinusoid": Problem(
        "one input, four periods, full batch", net(1, 64, 64, 1, activation=nn.Tanh), data.sinusoid, 200, 400, **SQUARES
    ),
    "sinusoid-50": Problem(
        "the same, batch 50", net(1, 64, 64, 1, activation=nn.Tanh), data.sinusoid, 50, 400, **SQUARES
    ),
    "multi-sum": Problem(
        "thirty outputs, a loss summed over the batch", net(10, 64, 30, activation=nn.Tanh), data.thirty_outputs,
        64, 300, "gaussian", halved_squares, summed=True,
    ),
    "multilabel-rare": Problem("forty bits, few of them set", net(20, 64, 40), data.rare_labels, 64, 300, **BITS),
    "cancer-bce": Problem("one bit", net(30, 32, 1), data.cancer_bits, 64, 300, "bernoulli", one_bit),
    "imbalance-weights": Problem(
        "a rare class that weighs twenty times as much", net(20, 64, 2), data.imbalanced, 64, 300, loss=weighted
    ),
    "smoothing": Problem("smoothed labels", THREE, digits, 64, 300, loss=smoothed, floor=LEAST_SMOOTHED),
}  # fmt: skip

NOISE = {
    "logreg-sep-full": Problem(
        "separable: the best weights are infinite", partial(nn.Linear, 20, 2), data.separable, 400, 300
    ),
    "logreg-sep-8": Problem("the same, batch 8", partial(nn.Linear, 20, 2), data.separable, 8, 500),
    "noise40": Problem(
        "40 % wrong labels, learnt by heart", net(64, 256, 256, 10), partial(data.mislabelled, 1000), 50, 400
    ),
    "noise40-tiny": Problem(
        "the same, 100 examples, full batch", net(64, 128, 10), partial(data.mislabelled, 100), 100, 300
    ),
    "noise40-tiny-10": Problem("the same, batch 10", net(64, 128, 10), partial(data.mislabelled, 100), 10, 300),
    "noise-pure": Problem("nothing to learn: labels unrelated to x", net(20, 32, 4), data.unrelated, 64, 300),
}

BATCHES = {
    "batch-1": Problem("batch 1", THREE, digits, 1, 800),
    "batch-2": Problem("batch 2", THREE, digits, 2, 800),
    "batch-4": Problem("batch 4", THREE, digits, 4, 600),
    "batch-8": Problem("batch 8", THREE, digits, 8, 500),
    "batch-1-regression": Problem("batch 1, squared error", REGRESSOR, data.smooth, 1, 800, **SQUARES),
    "full-digits": Problem("full batch", THREE, digits, 1797, 200),
    "two-batches": Problem("two batches an epoch", THREE, digits, 898, 200),
}

SHAPES = {
    "wide-2048": Problem("two layers of 1,024", net(64, 1024, 1024, 10), digits, 64, 100),
    "deep-residual": Problem("25 residual blocks, not normalised", deep_residual, digits, 64, 150),
    "sigmoid-6": Problem("six layers, sigmoid", net(64, *[64] * 5, 10, activation=nn.Sigmoid), digits, 64, 300),
    "softplus-4": Problem("four layers, softplus", net(64, *[64] * 3, 10, activation=nn.Softplus), digits, 64, 300),
    "elu-8": Problem("eight layers, ELU", net(64, *[64] * 7, 10, activation=nn.ELU), digits, 64, 300),
    "init-x10": Problem("initial weights ten times as large", times(10, 64, 64, 64, 10), digits, 64, 300),
    "init-x10-tanh": Problem(
        "the same, tanh: saturated", times(10, 64, 64, 64, 10, activation=nn.Tanh), digits, 64, 300
    ),
    "init-x01": Problem("initial weights a tenth as large", times(0.1, 64, 64, 64, 64, 10), digits, 64, 300),
}

USES = {
    "weight-decay": Problem("weight decay of 0.01", THREE, digits, 64, 300, weight_decay=1e-2),
    "clipping": Problem("gradients clipped to a norm of 0.1", THREE, digits, 64, 300, clip=0.1),
    "cosine": Problem("a learning rate that falls to 0", THREE, digits, 64, 300, cosine=True),
    "prong-mlp": Problem("PRONG", THREE, digits, 64, 200, optimizer="PRONG"),
    "prong-cnn": Problem("PRONG, convolutions", small_convnet, data.digit_images, 64, 200, optimizer="PRONG"),
    "prong-diabetes": Problem(
        "PRONG, targets of 150, batch 16", net(10, 64, 1), data.diabetes, 16, 300, **SQUARES, optimizer="PRONG"
    ),
}

PROBLEMS: dict[str, Problem] = LAYERS | RAW | TARGETS | NOISE | BATCHES | SHAPES | USES
