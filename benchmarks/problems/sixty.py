"""Sixty small problems, each with what is special about it. They differ from one another in one or two respects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from problems import Data, Problem, data, losses, networks
from problems.losses import BITS, SQUARES
from torch import nn

EVALUATED = 4000  # training rows, at most, over which a loss is measured


def small(
    title: str, network: Callable[[], nn.Module], rows: Callable[[], Data], *others: Any, **settings: Any
) -> Problem:
    """A problem whose initial weights are drawn from torch's generator with the seed 100 + seed."""

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + seed)
            return network()

    return Problem(title, model, rows, *others, evaluated=EVALUATED, **settings)


def net(*sizes: int, activation: Callable[[], nn.Module] = nn.ReLU, **settings: Any) -> Callable[[], nn.Module]:
    return partial(networks.mlp, sizes, activation, **settings)


def times(factor: float, *sizes: int, **settings: Any) -> Callable[[], nn.Module]:
    """A perceptron whose initial weights and biases are multiplied by `factor`."""
    return lambda: networks.scaled(networks.mlp(sizes, **settings), factor)


THREE_LAYERS = net(64, 64, 64, 10)
REGRESSOR = net(8, 64, 64, 1)
IRIS = partial(data.tabular, "iris")
WINE = partial(data.tabular, "wine")
CANCER = partial(data.tabular, "breast_cancer")


# Problems -------------------------------------------------------------------------------------------------------------

LAYERS = {
    "cnn-bn-dropout": small(
        "convolutions, Batch Normalisation and dropout", networks.convnet_bn_dropout, data.small_mnist_images, 64, 200
    ),
    "resnet-bn": small(
        "residual convolutions, Batch Normalisation", lambda: networks.resnet(nn.BatchNorm2d), data.all_digit_images,
        64, 200
    ),
    "resnet-gn": small(
        "residual convolutions, group normalisation", lambda: networks.resnet(partial(nn.GroupNorm, 4)),
        data.all_digit_images, 64, 200
    ),
    "lm-untied": small(
        "language model: a causal transformer", lambda: networks.LanguageModel(False), data.markov_text, 32, 200,
        loss=losses.sequence_cross_entropy
    ),
    "lm-tied": small(
        "the same, its head tied to the embedding", lambda: networks.LanguageModel(True), data.markov_text, 32, 200,
        loss=losses.sequence_cross_entropy
    ),
    "layernorm-mlp": small(
        "layer normalisation", net(784, 128, 128, 128, 10, activation=nn.GELU, norm=nn.LayerNorm), data.small_mnist, 64,
        200
    ),
    "mixer": small(
        "weights shared over patches and over channels", networks.Mixer, partial(data.small_mnist, 3000), 64, 200
    ),
    "lstm": small("recurrent, no forward mode", lambda: networks.Recurrent(nn.LSTM), data.third_last, 64, 250),
    "gru": small("recurrent, gated", lambda: networks.Recurrent(nn.GRU), data.third_last, 64, 250),
    "embed-bag-rare": small("an embedding with many rare words", networks.Bag, data.word_bags, 64, 200),
    "unused-head": small("a layer that is never used", networks.TwoHeads, data.all_digits, 64, 200),
    "vae": small(
        "variational autoencoder: internal noise, a penalty in the loss", networks.VAE, data.small_mnist_autoencoding,
        100, 200, "bernoulli", losses.bits_per_image, penalty=lambda model: model.kl
    ),
    "dropout-mlp": small("dropout of one half, twice", networks.dropout_mlp, data.all_digits, 64, 200),
}  # fmt: skip

RAW = {
    "iris-raw": small("raw features, full batch", net(4, 16, 16, 3, activation=nn.Tanh), IRIS, 150, 300),
    "wine-raw": small("raw features from 0.1 to 1,700, full batch", net(13, 32, 32, 3), WINE, 178, 300),
    "wine-raw-logreg": small("the same, linear", partial(nn.Linear, 13, 3), WINE, 178, 300),
    "cancer-raw": small("raw features from 0 to 4,300, full batch", net(30, 32, 2), CANCER, 569, 300),
    "cancer-raw-16": small("the same, batch 16", net(30, 32, 2), CANCER, 16, 300),
    "uint8-mlp": small("pixels from 0 to 255", net(784, 64, 64, 10), partial(data.small_mnist, scale=255), 64, 200),
    "uint8-cnn": small(
        "pixels from 0 to 255, convolutions", networks.convnet, partial(data.small_mnist_images, 255), 64, 200
    ),
    "constant-dup": small("constant and duplicate features", net(18, 32, 3), data.wine_with_constants, 32, 300),
    "raw-diabetes-unscaled": small(
        "inputs of 0.05, targets of 150", net(10, 64, 1), partial(data.diabetes, 1), 32, 300, **SQUARES
    ),
}  # fmt: skip

TARGETS = {
    "diabetes-full": small(
        "targets of 150, full batch", net(10, 64, 1, activation=nn.Tanh), data.diabetes, 442, 300, **SQUARES
    ),
    "diabetes-16": small("targets of 150, batch 16", net(10, 64, 1), data.diabetes, 16, 400, **SQUARES),
    "target-1e4": small("targets of 30,000", REGRESSOR, data.large_targets, 32, 300, **SQUARES),
    "heavy-tail": small("noise with heavy tails", REGRESSOR, data.heavy_tailed, 32, 300, **SQUARES),
    "sinusoid": small(
        "one input, four periods, full batch", net(1, 64, 64, 1, activation=nn.Tanh), data.sinusoid, 200, 400, **SQUARES
    ),
    "sinusoid-50": small(
        "the same, batch 50", net(1, 64, 64, 1, activation=nn.Tanh), data.sinusoid, 50, 400, **SQUARES
    ),
    "multi-sum": small(
        "thirty outputs, a loss summed over the batch", net(10, 64, 30, activation=nn.Tanh), data.thirty_outputs, 64,
        300, losses.summed_squares, losses.summed_squares, summed=True
    ),
    "multilabel-rare": small("forty binary targets, few of them 1", net(20, 64, 40), data.rare_labels, 64, 300, **BITS),
    "cancer-bce": small(
        "one binary target", net(30, 32, 1), data.cancer_bits, 64, 300, "bce_with_logits", losses.single_bit
    ),
    "imbalance-weights": small(
        "a rare class that weighs twenty times as much", net(20, 64, 2), data.imbalanced, 64, 300,
        declared=losses.weighted_cross_entropy, loss=losses.weighted_cross_entropy
    ),
    "smoothing": small(
        "smoothed labels", THREE_LAYERS, data.all_digits, 64, 300, losses.smoothed_cross_entropy,
        losses.smoothed_cross_entropy, floor=losses.LEAST_SMOOTHED
    ),
}  # fmt: skip

NOISE = {
    "logreg-sep-full": small(
        "separable data: the optimal weights are infinite", partial(nn.Linear, 20, 2), data.separable, 400, 300
    ),
    "logreg-sep-8": small("the same, batch 8", partial(nn.Linear, 20, 2), data.separable, 8, 500),
    "noise40": small(
        "40 % wrong labels, to be memorised", net(64, 256, 256, 10), partial(data.mislabelled, 1000), 50, 400
    ),
    "noise40-tiny": small(
        "the same, 100 examples, full batch", net(64, 128, 10), partial(data.mislabelled, 100), 100, 300
    ),
    "noise40-tiny-10": small("the same, batch 10", net(64, 128, 10), partial(data.mislabelled, 100), 10, 300),
    "noise-pure": small("nothing to learn: labels unrelated to x", net(20, 32, 4), data.unrelated, 64, 300),
}  # fmt: skip

BATCHES = {
    "batch-1": small("batch 1", THREE_LAYERS, data.all_digits, 1, 800),
    "batch-2": small("batch 2", THREE_LAYERS, data.all_digits, 2, 800),
    "batch-4": small("batch 4", THREE_LAYERS, data.all_digits, 4, 600),
    "batch-8": small("batch 8", THREE_LAYERS, data.all_digits, 8, 500),
    "batch-1-regression": small("batch 1, squared error", REGRESSOR, data.smooth, 1, 800, **SQUARES),
    "full-digits": small("full batch", THREE_LAYERS, data.all_digits, 1797, 200),
    "two-batches": small("two batches an epoch", THREE_LAYERS, data.all_digits, 898, 200),
}  # fmt: skip

SHAPES = {
    "wide-2048": small("two layers of 1,024", net(64, 1024, 1024, 10), data.all_digits, 64, 100),
    "deep-residual": small("25 residual blocks, not normalised", networks.deep_residual, data.all_digits, 64, 150),
    "sigmoid-6": small("six layers, sigmoid", net(64, *[64] * 5, 10, activation=nn.Sigmoid), data.all_digits, 64, 300),
    "softplus-4": small(
        "four layers, softplus", net(64, *[64] * 3, 10, activation=nn.Softplus), data.all_digits, 64, 300
    ),
    "elu-8": small("eight layers, ELU", net(64, *[64] * 7, 10, activation=nn.ELU), data.all_digits, 64, 300),
    "init-x10": small("initial weights ten times as large", times(10, 64, 64, 64, 10), data.all_digits, 64, 300),
    "init-x10-tanh": small(
        "the same, tanh: saturated", times(10, 64, 64, 64, 10, activation=nn.Tanh), data.all_digits, 64, 300
    ),
    "init-x01": small("initial weights a tenth as large", times(0.1, 64, 64, 64, 64, 10), data.all_digits, 64, 300),
}  # fmt: skip

USES = {
    "weight-decay": small("weight decay of 0.01", THREE_LAYERS, data.all_digits, 64, 300, weight_decay=1e-2),
    "clipping": small("gradients clipped to a norm of 0.1", THREE_LAYERS, data.all_digits, 64, 300, clip=0.1),
    "cosine": small("a learning rate that falls to 0", THREE_LAYERS, data.all_digits, 64, 300, cosine=True),
    "prong-mlp": small("PRONG", THREE_LAYERS, data.all_digits, 64, 200, optimizer="PRONG"),
    "prong-cnn": small(
        "PRONG, convolutions", networks.small_convnet, data.all_digit_images, 64, 200, optimizer="PRONG"
    ),
    "prong-diabetes": small(
        "PRONG, targets of 150, batch 16", net(10, 64, 1), data.diabetes, 16, 300, **SQUARES, optimizer="PRONG"
    ),
}  # fmt: skip

PROBLEMS: dict[str, Problem] = LAYERS | RAW | TARGETS | NOISE | BATCHES | SHAPES | USES
