"""Convolutional networks of torchvision and timm, with layers too wide to be whitened over whole patches."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import bprong
from helpers import assert_close, snapshot
from tiny import train, updates

CLASSES = 4


def images(batch: int = 4, size: int = 32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return torch.randn(batch, 3, size, size, generator=random), torch.arange(batch) % CLASSES


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def residual_network(package: str) -> nn.Module:
    """A ResNet of full width with one block in each stage; its last convolutions have 4,608 inputs, over `max_dim`."""
    torch.manual_seed(1)
    if package == "timm":
        return timm.create_model("resnet10t", num_classes=CLASSES)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


@pytest.mark.parametrize(("package", "lr"), [("torchvision", "auto"), ("timm", 0.01)])
def test_residual_networks_learn(package: str, lr: Any) -> None:
    """By default the inputs of the widest convolutions are whitened in blocks, and the network learns."""
    model = residual_network(package)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr)
    losses = train(model, optimizer, [images()] * 3, loss_of)
    assert losses[-1] < 0.9 * losses[0]
    assert any(" blocks" in row.inputs for row in bprong.coverage(model).rows)


def test_low_rank_inverses_of_convolutions() -> None:
    """The step of a narrow network through low-rank inverses is close to the exact one."""
    moved = []
    for solver in ("exact", "low-rank"):
        torch.manual_seed(1)
        model = timm.create_model("test_resnet", num_classes=CLASSES)
        before = snapshot(model)
        options = {"fisher": "exact", "average": 0.0, "solver": solver}
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=1e-2, options=options)
        train(model, optimizer, [images()], loss_of)
        moved.append(updates(model, before))
    assert_close(moved[1], moved[0], 0.1)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet", "test_byobnet"])
def test_other_architectures_of_timm_learn(name: str) -> None:
    """Vision transformers, ConvNeXt, EfficientNet and ByobNet learn a batch at lr="auto" without a warning."""
    torch.manual_seed(1)
    kwargs = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, num_classes=CLASSES, **kwargs)
    losses = train(model, bprong.BPRONG(model, "cross_entropy", every=2), [images()] * 6, loss_of)
    assert losses[-1] < 0.9 * losses[0]
