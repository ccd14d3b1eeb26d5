"""The user's loss, as declared: a torch loss, its name, one of the paper's words, or a `Likelihood`.

    loss = κ Σ_t w_t (−log p(y_t | f_t))

The declaration says what κ and w are until a call of the loss is seen, which says it again (`targets.py`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood, Undeclared

Declaration = str | Likelihood | nn.Module | Callable[..., Tensor]

ACCEPTED = (
    "nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss or nn.MSELoss; the function of one of them, such as "
    "F.cross_entropy, or a functools.partial of it with its options; "
    '"cross_entropy", "nll", "bce_with_logits" or "mse"; or "categorical", "bernoulli" or "gaussian" for the mean of '
    "−log p over targets"
)


class Kind(NamedTuple):
    """A loss of torch.

    options:  those of its function, which its module has too
    nats:     what the loss of one element is as a multiple of −log p; None: its targets are classes
    """

    module: type[nn.Module]
    function: Callable[..., Tensor]
    family: type[Likelihood]
    options: tuple[str, ...]
    nats: float | None = None


class Loss:
    """A loss of torch, or the mean of −log p over the targets that count.

    name:        as the user declared it
    likelihood:  p(y | output)
    kind:        which loss of torch it is; None: the mean of −log p
    given:       the loss module, whose calls show the targets, or the options of a loss function

    >>> import torch
    >>> declared_loss(nn.CrossEntropyLoss()).value(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """

    def __init__(
        self,
        name: str,
        likelihood: Likelihood,
        kind: Kind | None = None,
        given: nn.Module | Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.likelihood = likelihood
        self.kind = kind
        self.given = given
        likelihood.ignore_index = self.options.get("ignore_index", likelihood.ignore_index)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, read at every use, because the user may change them or move them to a device."""
        if isinstance(self.given, Mapping):
            return dict(self.given)
        names = () if self.kind is None else self.kind.options
        options = {name: getattr(self.given, name) for name in names}
        return {name: option for name, option in options.items() if option is not None}

    @property
    def is_undeclared(self) -> bool:
        """Whether no loss was declared, so that nothing is known of it."""
        return isinstance(self.likelihood, Undeclared)

    @property
    def sums(self) -> bool:
        """Whether the loss is a sum over targets."""
        return bool(self.options.get("reduction") == "sum")

    @property
    def functions(self) -> frozenset[str]:
        """The names of torch's functions that may be this loss."""
        if self.kind is not None:
            return frozenset([self.kind.function.__name__])
        kinds = [kind for kind in KINDS.values() if kind.family is type(self.likelihood)]
        return frozenset(kind.function.__name__ for kind in kinds)

    def value(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss as the user computes it, of the targets that count; classes are in the output's last dimension."""
        if self.kind is None:
            return self.likelihood.total_nll(output, y) / self.likelihood.targets(output)
        options = self.options
        options["reduction"] = "sum" if self.sums else "mean"  # with reduction="none" the user reduces the values
        for name, option in options.items():
            if isinstance(option, Tensor):
                options[name] = option.to(output)
        if self.kind.nats is not None or y.is_floating_point():
            y = y.to(output)
        if self.kind.nats is None:
            y = y.flatten(end_dim=output.ndim - 2)
            output = output.flatten(end_dim=-2)
        return self.kind.function(output, y, **options)

    def of_rows(self, select: Callable[[Tensor], Tensor], y: Tensor) -> Loss:
        """The loss of some of the rows of its targets y, if each of their elements has a weight of its own."""
        weight = self.options.get("weight")
        if self.kind is None or self.kind.nats is None or weight is None or weight.shape != y.shape:
            return self
        return Loss(self.name, self.likelihood, self.kind, self.options | {"weight": select(weight)})

    def multiple(self, y: Tensor) -> float:
        """What the loss is as a multiple of the mean −log p of a target; y: with classes in the last dimension."""
        weight = self.options.get("weight")
        if self.kind is not None and self.kind.nats is not None:
            size = self.kind.nats if weight is None else self.kind.nats * float(weight.mean())
            return size * self.likelihood.targets(y) / (1 if self.sums else y.numel())
        if not self.sums:
            return 1.0
        if y.is_floating_point():
            return float(self.likelihood.targets(y))
        counted = y[y != self.likelihood.ignore_index]
        return float(counted.numel() if weight is None else weight.to(y.device)[counted].sum())


KINDS = {
    "cross_entropy": Kind(
        nn.CrossEntropyLoss, F.cross_entropy, Categorical, ("weight", "ignore_index", "reduction", "label_smoothing")
    ),
    "nll": Kind(nn.NLLLoss, F.nll_loss, Categorical, ("weight", "ignore_index", "reduction")),
    "bce_with_logits": Kind(
        nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, Bernoulli, ("weight", "reduction", "pos_weight"), 1.0
    ),
    "mse": Kind(nn.MSELoss, F.mse_loss, Gaussian, ("reduction",), 2.0),
}
_BY_FUNCTION = {kind.function.__name__: kind for kind in KINDS.values()}
_WORDS: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def declared_loss(given: Declaration | None) -> Loss:
    """The loss that was declared; None: a likelihood that only knows which targets count.

    >>> import torch
    >>> declared_loss("mse").multiple(torch.zeros(8, 5))
    0.4
    """
    if given is None:
        return Loss("None", Undeclared())
    if isinstance(given, Likelihood):
        return Loss(type(given).__name__, given)
    if isinstance(given, str) and given in _WORDS:
        return Loss(f'"{given}"', _WORDS[given]())
    partial = given if isinstance(given, functools.partial) and not given.args else None
    function: object = given if partial is None else partial.func
    keywords = {} if partial is None else partial.keywords
    for name, kind in KINDS.items():
        if isinstance(given, str) and given in (name, kind.function.__name__):
            return Loss(f'"{given}"', kind.family(), kind, {})
        if isinstance(given, kind.module) and type(given).forward is kind.module.forward:
            return Loss(f"nn.{kind.module.__name__}", kind.family(), kind, given)
        if function is kind.function and keywords.keys() <= set(kind.options):
            return Loss(f"F.{kind.function.__name__}", kind.family(), kind, keywords)
    raise (ValueError if isinstance(given, str) else TypeError)(_refusal(given))


def loss_of_call(likelihood: Likelihood, function: str, options: Mapping[str, Any]) -> Loss:
    """The loss that a call of one of torch's functions computes."""
    own_index = copy.copy(likelihood)  # calls may differ in the index that they ignore
    return Loss(f"F.{function}", own_index, _BY_FUNCTION[function], options)


def _refusal(given: object) -> str:
    shown = repr(given) if isinstance(given, (str, int, float)) else getattr(given, "__name__", type(given).__name__)
    advice = ""
    if isinstance(given, nn.BCELoss) or given is F.binary_cross_entropy:
        advice = " Remove the sigmoid at the end of the model and use nn.BCEWithLogitsLoss."
    elif isinstance(given, (int, float)):
        advice = " The learning rate comes after the loss, as lr=."
    elif isinstance(given, type):
        advice = f" Give an instance: {shown}()."
    return (
        f"loss cannot be {shown}.{advice} Give the loss that you minimise: {ACCEPTED}. For another negative "
        f"log-likelihood, give a subclass of bprong.Likelihood with nll(output, y) and sample(output). For a loss that "
        f"is none, use bprong.PRONG(model, lr=0.01), which needs no loss"
    )
