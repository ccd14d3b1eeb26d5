"""PRONG: the optimizer with forward whitening alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from bprong.checks import takes_loss
from bprong.likelihood.declared import Declaration
from bprong.linalg.factors import Damping
from bprong.optim.optimizer import BPRONG, StepKind
from bprong.optim.options import Options
from bprong.optim.rules import Group
from bprong.whitening.layer import SideName
from bprong.whitening.schedule import Periods


class PRONG(BPRONG):
    """Natural-gradient descent by forward whitening alone (Desjardins et al., 2015; Fujimoto & Ohira's Algorithm 1).

    It measures no errors, so that it needs no loss at a fixed lr. It tolerates, and benefits from, less damping than
    BPRONG. The arguments are BPRONG's, but for `backward_damping`.
    """

    _whitens_backward = False
    _default_damping: Mapping[SideName, float | Damping] = {"forward": 0.01, "backward": 0.015}

    @takes_loss
    def __init__(
        self,
        model: nn.Module,
        loss: Declaration | None = None,
        lr: float | Literal["auto"] = 0.01,
        *,
        step: StepKind = "natural",
        params: Iterable[Tensor] | Iterable[Group] | None = None,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        forward_damping: float | Damping | None = None,
        every: int | Periods | None = None,
        max_step: float | Literal["auto"] | None = "auto",
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model, loss, lr, step=step, params=params, momentum=momentum, weight_decay=weight_decay,
            forward_damping=forward_damping, every=every, max_step=max_step, options=options,
        )  # fmt: skip
