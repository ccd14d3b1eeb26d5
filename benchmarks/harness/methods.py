"""Optimizers with the settings that a race may tune. A new one is one entry of METHODS.

The spaces are declared here, before any run, and are the same for all problems. `schedule`, `warmup` and `average` are
applied by `harness.recipes`; all other settings are the optimizer's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import bprong
from bprong.experiments.bench.muon import Muon
from bprong.experiments.bench.optimizers import decaying
from bprong.experiments.bench.search import Choice, LogUniform, Space

Settings = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """An optimizer as a race sees it.

    make:    from the model, the loss module, the settings and the number of steps of the run
    space:   what is tuned
    needs:   the package it comes from, if that is not torch or ours
    keyword: an argument that BPRONG must have
    fixed:   settings that are not tuned
    """

    title: str
    make: Callable[[nn.Module, nn.Module, Settings, int], Optimizer]
    space: Space
    needs: str = ""
    keyword: str = ""
    fixed: Settings = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it cannot be run here; empty if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"package {self.needs} is not installed"
        if self.keyword and self.keyword not in inspect.signature(bprong.BPRONG.__init__).parameters:
            return f"this version of BPRONG has no argument {self.keyword!r}"
        return ""


def adamw(model: nn.Module, _loss: nn.Module, settings: Settings, _steps: int) -> Optimizer:
    decay = settings.pop("weight_decay", 0.0)
    return torch.optim.AdamW(decaying(model, decay), **settings)


def muon(model: nn.Module, _loss: nn.Module, settings: Settings, _steps: int) -> Optimizer:
    return Muon(model, **settings)


def soap(model: nn.Module, _loss: nn.Module, settings: Settings, _steps: int) -> Optimizer:
    kind: Any = importlib.import_module("pytorch_optimizer").load_optimizer("soap")
    return kind(decaying(model, settings.pop("weight_decay", 0.0)), **settings)


def prodigy(model: nn.Module, _loss: nn.Module, settings: Settings, _steps: int) -> Optimizer:
    kind: Any = importlib.import_module("prodigyopt").Prodigy
    return kind(decaying(model, settings.pop("weight_decay", 0.0)), **settings)


def schedule_free(model: nn.Module, _loss: nn.Module, settings: Settings, steps: int) -> Optimizer:
    """Its warm-up is its own, because it weights its average by the learning rate."""
    kind: Any = importlib.import_module("schedulefree").AdamWScheduleFree
    rising = round(settings.pop("own_warmup", 0.0) * steps)
    return kind(decaying(model, settings.pop("weight_decay", 0.0)), warmup_steps=rising, **settings)


def ours(model: nn.Module, loss: nn.Module, settings: Settings, _steps: int) -> Optimizer:
    """`start` is where a schedule of lr="auto" starts: the group's lr, which multiplies the automatic step.

    `damping` is that of both sides, relative to the mean eigenvalue.
    """
    start = settings.pop("start", None)
    if damping := settings.pop("damping", None):
        settings["forward_damping"] = settings["backward_damping"] = bprong.Damping(damping, "mean")
    optimizer = bprong.BPRONG(model, loss, **settings)
    for group in optimizer.param_groups if start is not None else ():
        group["lr"] = start
    return optimizer


DECAYS = Choice([0.0, 0.01, 0.1])
WARMUPS = Choice([0.0, 0.05, 0.1])
SCHEDULE: Space = {
    "schedule": Choice(["cosine", "linear", "constant"]),
    "warmup": WARMUPS,
    "weight_decay": DECAYS,
    "average": Choice([0.0, 0.04]),  # the span of an exponential average of the weights, as a share of all steps
}
BETAS = Choice([(0.9, 0.95), (0.9, 0.99), (0.9, 0.999)])

METHODS: dict[str, Method] = {
    "adamw": Method("AdamW", adamw, {"lr": LogUniform(5e-4, 2e-2), **SCHEDULE, "betas": BETAS}),
    "adam-constant": Method("Adam, constant rate", adamw, {"lr": LogUniform(2e-4, 2e-2)}),
    "muon": Method(
        "Muon, float32", muon, {"lr": LogUniform(2e-3, 5e-2), **SCHEDULE, "rest_lr": LogUniform(1e-3, 2e-2)}
    ),
    "soap": Method(
        "SOAP", soap,
        {"lr": LogUniform(1e-3, 3e-2), **SCHEDULE, "betas": Choice([(0.95, 0.95), (0.9, 0.95), (0.95, 0.99)]),
         "precondition_frequency": Choice([5, 10])},
        needs="pytorch_optimizer",
    ),
    "prodigy": Method(
        "Prodigy", prodigy,
        {"d_coef": Choice([0.5, 1.0, 2.0]), **SCHEDULE, "betas": BETAS, "use_bias_correction": Choice([False, True])},
        needs="prodigyopt",
    ),
    "schedule-free": Method(
        "Schedule-Free AdamW", schedule_free,
        {"lr": LogUniform(1e-3, 3e-2), "own_warmup": WARMUPS, "weight_decay": DECAYS,
         "betas": Choice([(0.9, 0.99), (0.95, 0.99), (0.98, 0.99)])},
        needs="schedulefree",
    ),
    "spectral": Method(
        "BPRONG, spectral", ours, {"lr": LogUniform(5e-3, 1e-1), **SCHEDULE, "momentum": Choice([0.9, 0.95])},
        keyword="step", fixed={"step": "spectral"},
    ),
    "spectral-damped": Method(  # declared after the results of "spectral" were known
        "BPRONG, spectral, damping tuned", ours,
        {"lr": LogUniform(5e-3, 1e-1), **SCHEDULE, "damping": Choice([0.1, 1.0, 10.0])},
        keyword="step", fixed={"step": "spectral", "momentum": 0.95},
    ),
    "bprong": Method(
        "BPRONG, fixed rate", ours, {"lr": LogUniform(1e-3, 1e-1), **SCHEDULE, "max_step": Choice([0.03, 0.1, 0.3])},
        fixed={"momentum": 0.9},
    ),
    "auto": Method('BPRONG, lr="auto"', ours, {}),
    "auto-decayed": Method('BPRONG, lr="auto", with a schedule', ours, SCHEDULE),
    "auto-spectral": Method(
        'BPRONG, lr="auto", spectral', ours, {}, keyword="step",
        fixed={"step": "spectral", "schedule": "linear", "start": 2.0, "average": 0.04},
    ),
}  # fmt: skip
