"""skorch's networks, trained by BPRONG.

skorch gives an optimizer the parameters only. These classes also give it the module and the criterion. Otherwise they
are skorch's own classes of the same names, with `optimizer=bprong.BPRONG` and `lr="auto"` as defaults:

    from bprong.skorch import NeuralNetClassifier           # instead of: from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(module, max_epochs=20)        # the module returns logits
    net = NeuralNetClassifier(module, lr=0.02, optimizer__step="spectral", optimizer__weight_decay=0.1)
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from bprong.errors import install_command
from bprong.optim.optimizer import BPRONG

try:
    import skorch
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"{missing.name} is not installed: {install_command('skorch')}") from missing


class GivesModule:
    """For subclasses of skorch.NeuralNet: gives the optimizer the module, the criterion and the parameters."""

    def initialize_optimizer(self: Any, triggered_directly: bool | None = None) -> Any:
        (params,), settings = self.get_params_for_optimizer("optimizer", self.get_all_learnable_params())
        self.optimizer_ = self.optimizer(self.module_, self.criterion_, params=params, **settings)
        return self


class NeuralNetClassifier(GivesModule, skorch.NeuralNetClassifier):  # type: ignore[misc]
    """skorch.NeuralNetClassifier with BPRONG. The module returns logits, since the criterion is CrossEntropyLoss."""

    def __init__(
        self,
        module: Any,
        *,
        criterion: Any = nn.CrossEntropyLoss,
        optimizer: type[BPRONG] = BPRONG,
        lr: float | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(module, criterion=criterion, optimizer=optimizer, lr=lr, **settings)


class NeuralNetBinaryClassifier(GivesModule, skorch.NeuralNetBinaryClassifier):  # type: ignore[misc]
    """skorch.NeuralNetBinaryClassifier with BPRONG. The module returns one logit, for BCEWithLogitsLoss."""

    def __init__(
        self,
        module: Any,
        *,
        optimizer: type[BPRONG] = BPRONG,
        lr: float | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(module, optimizer=optimizer, lr=lr, **settings)


class NeuralNetRegressor(GivesModule, skorch.NeuralNetRegressor):  # type: ignore[misc]
    """skorch.NeuralNetRegressor with BPRONG, for MSELoss."""

    def __init__(
        self,
        module: Any,
        *,
        optimizer: type[BPRONG] = BPRONG,
        lr: float | Literal["auto"] = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(module, optimizer=optimizer, lr=lr, **settings)
