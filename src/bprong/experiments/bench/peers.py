"""Trainers made from other people's packages, the optional extra `bench`, with their traps on a CPU avoided."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bprong.experiments.bench.optimizers import split_decay
from bprong.experiments.bench.training import Plain, Trainer
from bprong.experiments.bench.workloads import Loss, NatsPerImage, TokenCrossEntropy

Settings = Mapping[str, Any]
PERIOD = 10  # steps between updates of a preconditioner, the value that SOAP and SINGD recommend
LARGEST_SIDE = 1000  # SOAP leaves larger sides alone; all sides of these workloads are smaller


def _kind(name: str) -> Any:
    return importlib.import_module("pytorch_optimizer").load_optimizer(name)


def soap(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    groups, rest = split_decay(model, settings)
    optimizer = _kind("soap")(groups, precondition_frequency=PERIOD, max_precondition_dim=LARGEST_SIDE, **rest)
    return Plain(model, loss, optimizer)


def kron(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    groups, rest = split_decay(model, settings)
    return Plain(model, loss, _kind("kron")(groups, **rest))


def shampoo(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    """The scalable version, which grafts the length of a step and has a period."""
    groups, rest = split_decay(model, settings)
    rest["betas"] = (rest.pop("momentum"), 0.999)
    options = {"start_preconditioning_step": PERIOD, "preconditioning_compute_steps": PERIOD}
    return Plain(model, loss, _kind("scalableshampoo")(groups, **options, **rest))


def prodigy(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    groups, rest = split_decay(model, settings)
    kind: Any = importlib.import_module("prodigyopt").Prodigy
    return Plain(model, loss, kind(groups, use_bias_correction=True, safeguard_warmup=True, **rest))


def schedule_free(model: nn.Module, loss: Loss, settings: Settings, steps: int) -> Trainer:
    """Its warm-up is its own, because it weights its average by the learning rate."""
    groups, rest = split_decay(model, settings)
    kind: Any = importlib.import_module("schedulefree").AdamWScheduleFree
    return ScheduleFree(model, loss, kind(groups, warmup_steps=round(rest.pop("own_warmup") * steps), **rest))


class ScheduleFree(Plain):
    """Measures the average that the method keeps. Statistics of Batch Normalisation are not its concern here."""

    def ready(self, mode: str) -> None:
        getattr(self.optimizer, mode)()


class Pair(Plain):
    """An optimizer for some parameters, and AdamW for the others."""

    def __init__(self, model: nn.Module, loss: Loss, first: torch.optim.Optimizer, lr: float) -> None:
        super().__init__(model, loss, first)
        taken = {p for group in first.param_groups for p in group["params"]}
        rest = [p for p in model.parameters() if p not in taken]
        self.rest = torch.optim.AdamW(rest, lr, weight_decay=0.0) if rest else None

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups + (self.rest.param_groups if self.rest else [])

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        if self.rest is not None:
            self.rest.step()
            self.rest.zero_grad()
        return loss


def singd(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    """SINGD for linear layers and convolutions, AdamW for all other parameters, which SINGD would not train."""
    average = "batch+sequence" if isinstance(loss, TokenCrossEntropy) else "batch"
    kind: Any = importlib.import_module("singd.optim.optimizer").SINGD
    optimizer = kind(
        model, loss_average=average, T=PERIOD, normalize_lr_cov=True, warn_unsupported=False, **settings
    )  # fmt: skip
    return Pair(model, loss, optimizer, settings["lr"])


class WithoutMarks:
    """Stands in for torch.cuda.nvtx, with which ASDL marks its steps and which only CUDA builds of torch have."""

    @staticmethod
    def range(_text: str) -> nullcontext[None]:
        return nullcontext()


class KFAC(Plain):
    """ASDL's K-FAC: gradients come preconditioned from its gradient maker, SGD with momentum makes the step."""

    def __init__(self, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, damping: float) -> None:
        super().__init__(model, loss, optimizer)
        self.damping = damping
        self.maker: Any = None

    def _make(self, examples: int) -> Any:
        asdl: Any = importlib.import_module("asdl.precondition")
        for name in ("asdl.operations.operation", "asdl.precondition.natural_gradient"):
            importlib.import_module(name).nvtx = WithoutMarks  # type: ignore[attr-defined]
        grouped = [m for m in self.model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
        unsupported = [nn.Embedding, nn.LayerNorm, *grouped]
        config = asdl.PreconditioningConfig(
            data_size=examples, damping=self.damping, ema_decay=0.1,
            preconditioner_upd_interval=PERIOD, curvature_upd_interval=PERIOD, ignore_modules=unsupported,
        )  # fmt: skip
        kind = "mse" if isinstance(self.loss, nn.MSELoss) else "cross_entropy"
        fisher = "fisher_emp" if isinstance(self.loss, NatsPerImage) else "fisher_mc"
        return asdl.KfacGradientMaker(self.model, config, fisher_type=fisher, loss_type=kind)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.maker = self.maker or self._make(len(x))
        self.optimizer.zero_grad()
        output = self.maker.setup_model_call(self.model, x)
        self.maker.setup_loss_call(self.loss, output, y)
        _, loss = self.maker.forward_and_backward()
        self.optimizer.step()
        return torch.as_tensor(loss).detach()


def kfac(model: nn.Module, loss: Loss, settings: Settings, _steps: int) -> Trainer:
    """The learning rate is given as a multiple of the damping, as the best of it is nearly proportional to that."""
    groups, rest = split_decay(model, settings)
    damping = rest.pop("damping")
    rest["lr"] = rest.pop("relative_lr") * damping
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KFAC(model, loss, torch.optim.SGD(groups, momentum=0.9, **rest), damping)
