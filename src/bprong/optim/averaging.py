"""Averaged weights, for evaluation: the mean of the weights after all steps, of which later ones count more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bprong.capture.listener import uninterrupted
from bprong.linalg.moments import at_least_float32
from bprong.parallel.processes import local
from bprong.parallel.slices import reshard

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of Batch Normalisation; update_bn changes all


class AveragedWeights:
    """The average of a model's weights over a run, and a context in which the model has it.

        w̄ₙ = w̄ₙ₋₁ + (1+η)/(n+1+η) (wₙ − w̄ₙ₋₁)

    is polynomial-decay averaging (Shamir & Zhang, 2013): wₖ counts about as k^η does, so that the average spans the
    last 1/(1+η) of the steps so far, however many these are. Running statistics of Batch Normalisation are averaged
    like weights.

    The weights after a step are added when the next step begins, because until then they may be undone. In the context
    they are a part of the average for as long as it lasts.

    eta:  η; 0: all steps count alike. docs/averaging.md has what was measured
    """

    eta = 4.0

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_active = False  # whether the model has the averages
        self.restart()

    def restart(self) -> None:
        """Begins again, with the weights that are added next."""
        self._count = 0  # of what was added
        self._averages: dict[Tensor, Tensor] = {}  # of parameters and running statistics

    @torch.no_grad()
    def add(self, parameters: Iterable[Tensor]) -> None:
        """Adds the present weights, before a step changes them."""
        tensors = self._averaged(parameters)
        for x in tensors:
            if x not in self._averages:  # it was constant until now
                self._averages[x] = _copied(x)
        averages = [local(self._averages[x]) for x in tensors]
        new = [local(x).to(average.dtype) for x, average in zip(tensors, averages, strict=True)]
        torch._foreach_lerp_(averages, new, self._weight())
        self._count += 1

    @contextmanager
    @torch.no_grad()
    def in_the_model(self, optimizer: Optimizer) -> Iterator[None]:
        """The model has the averages, and its own weights again when the context ends. The optimizer makes no step."""
        if self._is_active:
            _refuse()
        reshard(self._model)
        values = {x: x.detach().clone() for x in [*self._averages, *self._model.buffers()]}  # update_bn changes these
        hook = optimizer.register_step_pre_hook(_refuse)
        try:
            self._is_active = True
            for x, average in self._averages.items():
                part = local(average)
                local(x).copy_(part + self._weight() * (local(x) - part))
            yield
        finally:
            with uninterrupted():
                reshard(self._model)
                for x, value in values.items():
                    x.copy_(value)
                hook.remove()
                self._is_active = False

    def _weight(self) -> float:
        """The weight of the present weights, which are added next."""
        return (1 + self.eta) / (self._count + 1 + self.eta)

    def _averaged(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        buffers = self._model.named_buffers()
        return [*parameters, *(buffer for name, buffer in buffers if name.endswith(STATISTICS))]

    def state_dict(self, parameters: Iterable[Tensor]) -> dict[str, Any]:
        """Its keys and shapes depend on the model alone."""
        averages = [_copied(self._averages.get(x, x)) for x in self._averaged(parameters)]
        return {"count": self._count, "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Iterable[Tensor]) -> None:
        """Restores what `state_dict` returned; from an empty state, the average begins with the present weights."""
        self.restart()
        if state.get("count"):
            self._count = state["count"]
            for x, average in zip(self._averaged(parameters), state["averages"], strict=True):
                self._averages[x] = _copied(average).to(x.device)


def _refuse(*call: Any) -> None:
    raise RuntimeError(
        "the model has averaged weights, which can neither be trained nor averaged again: leave the context of "
        "optimizer.averaged() first"
    )


def _copied(x: Tensor) -> Tensor:
    """A copy that is precise enough for small changes."""
    return x.detach().to(at_least_float32(x.dtype), copy=True)
