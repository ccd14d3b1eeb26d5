"""Trainers made from torch's optimizers and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import bprong
from bprong.experiments.bench.muon import Muon
from bprong.experiments.bench.training import Plain, Trainer
from bprong.experiments.bench.workloads import Loss, NatsPerImage, TokenCrossEntropy

Settings = Mapping[str, Any]


def decaying(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Two groups: parameters with two or more dimensions, which decay, and the others, which do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def split_decay(model: nn.Module, settings: Settings) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The groups of `decaying` and the settings other than the decay."""
    rest = {name: value for name, value in settings.items() if name != "weight_decay"}
    return decaying(model, settings.get("weight_decay", 0.0)), rest


def sgd(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    groups, rest = split_decay(model, settings)
    return Plain(model, loss, torch.optim.SGD(groups, **rest))


def adamw(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    groups, rest = split_decay(model, settings)
    return Plain(model, loss, torch.optim.AdamW(groups, **rest))


def nadam(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    """Only used to find targets."""
    groups, rest = split_decay(model, settings)
    return Plain(model, loss, torch.optim.NAdam(groups, decoupled_weight_decay=True, **rest))


def muon(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    return Plain(model, loss, Muon(model, rest_lr=settings["lr"], **settings))


def declared(loss: Loss) -> Any:
    """The loss as it is declared to BPRONG: torch's module itself; nats per image are −log p of a Bernoulli model."""
    if isinstance(loss, TokenCrossEntropy):
        return loss.per_row
    return "bernoulli" if isinstance(loss, NatsPerImage) else loss


def prong(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    return Plain(model, loss, bprong.PRONG(model, declared(loss), **settings))


def bprong_(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    """`damping`: relative to the mean eigenvalue of each side. `by_variance`: of data, in units of features."""
    own = dict(settings)
    if damping := own.pop("damping", None):
        own["forward_damping"] = own["backward_damping"] = bprong.Damping(damping, "mean")
    if by_variance := own.pop("by_variance", None):
        own["forward_damping"] = bprong.Damping(by_variance, "variance")
    return Plain(model, loss, bprong.BPRONG(model, declared(loss), **own))
