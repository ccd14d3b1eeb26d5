"""The problems that several benchmarks share: the paper's network, the deep autoencoder, thirty layers, a convolutional
network, a transformer, and regression on badly scaled features."""

from __future__ import annotations

from typing import Any

from problems import Problem, data, networks
from problems.losses import SQUARES, bits_per_image, sequence_cross_entropy


def paper(batch: int, steps: int) -> Problem:
    """The paper's network on MNIST."""
    name = "full batch" if batch == 60_000 else f"batch {batch}"
    return Problem(f"paper's network, {name}", networks.paper_network, data.mnist, batch, steps)


def coder(batch: int, steps: int) -> Problem:
    """The deep autoencoder on MNIST."""
    loss: dict[str, Any] = {"declared": "bernoulli", "loss": bits_per_image, "evaluated": 5000}
    return Problem(f"autoencoder, batch {batch}", networks.autoencoder, data.mnist_autoencoding, batch, steps, **loss)


def regression(title: str, *widths: int) -> Problem:
    """Regression on features with scales from 1e-4 to 1e4."""
    settings: dict[str, Any] = {"data": data.badly_scaled, "batch": 100, "steps": 300} | SQUARES
    name = f"regression, scales 1e-4 to 1e4: {title}"
    return Problem(name, lambda seed: networks.perceptron(widths, "relu", seed), **settings)


DEEP = {
    "deep-tanh": Problem("30 layers, tanh", networks.deep_tanh, data.digits, 100, 300),
    "deep-relu": Problem("30 layers, ReLU", networks.deep_relu, data.digits, 100, 300),
}
CONVOLUTIONS = Problem("convolutional network", networks.digits_convnet, data.digit_images, 64, 300)
TRANSFORMER = Problem(
    "transformer", networks.sequence_transformer, data.sequences, 64, 500, loss=sequence_cross_entropy
)
STANDARD = {
    "paper-16": paper(16, 1000),
    "paper-100": paper(100, 1200),
    "paper-500": paper(500, 600),
    "paper-full": paper(60_000, 20),
    "autoencoder": coder(250, 60),
    **DEEP,
    "conv": CONVOLUTIONS,
    "transformer": TRANSFORMER,
    "regression-linear": regression("linear", 20, 1),
    "regression-relu": regression("ReLU", 20, 50, 1),
}
