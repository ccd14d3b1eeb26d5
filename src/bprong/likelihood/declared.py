"""What a user may declare as the loss: a torch loss, its name, one of the paper's words, or a `Likelihood`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood, Undeclared
from bprong.likelihood.loss import Kind, Loss

Declaration = str | Likelihood | nn.Module | Callable[..., Tensor]

KINDS = {
    "cross_entropy": Kind(
        nn.CrossEntropyLoss, F.cross_entropy, "cross_entropy_loss", Categorical,
        ("weight", "reduction", "ignore_index", "label_smoothing"),
    ),
    "nll": Kind(nn.NLLLoss, F.nll_loss, "nll_loss_nd", Categorical, ("weight", "reduction", "ignore_index")),
    "bce_with_logits": Kind(
        nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "binary_cross_entropy_with_logits", Bernoulli,
        ("weight", "pos_weight", "reduction"),
    ),
    "mse": Kind(nn.MSELoss, F.mse_loss, "mse_loss", Gaussian, ("reduction",), nats=2.0),
}  # fmt: skip
# By their names, their functions, and what their modules compute.
_KINDS: dict[Hashable, Kind] = {
    key: kind
    for name, kind in KINDS.items()
    for key in (name, kind.function.__name__, kind.function, kind.module.forward)
}
_WORDS = {kind.family.__name__.lower(): kind.family for kind in KINDS.values()}

ACCEPTED = (
    "nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss or nn.MSELoss; the function of one of them, such as "
    "F.cross_entropy, or a functools.partial of it with its options; "
    '"cross_entropy", "nll", "bce_with_logits" or "mse"; or "categorical", "bernoulli" or "gaussian" for the mean of '
    "−log p over targets"
)


def declared_loss(given: Declaration | None) -> Loss:
    """The loss that was declared; None: a likelihood that only knows which targets count.

    >>> import torch
    >>> float(declared_loss("mse").multiple(torch.zeros(8, 5), torch.tensor(10.0)))
    4.0
    """
    if given is None:
        return Loss("None", Undeclared())
    if isinstance(given, Likelihood):
        return Loss(type(given).__name__, given)
    if isinstance(given, str) and given in _WORDS:
        family = _WORDS[given]
        functions = (kind.function.__name__ for kind in KINDS.values() if kind.family is family)
        return Loss(f'"{given}"', family(), functions=frozenset(functions))
    name = f'"{given}"'
    key: object = given
    options: nn.Module | Mapping[str, Any] = {}
    if isinstance(given, nn.Module):
        name = f"nn.{type(given).__name__}"
        key = type(given).forward
        options = given
    elif isinstance(given, functools.partial) and not given.args:
        key = given.func
        options = given.keywords
    kind = _KINDS.get(key) if isinstance(key, Hashable) else None
    if kind is None or not (isinstance(options, nn.Module) or options.keys() <= set(kind.options)):
        raise (ValueError if isinstance(given, str) else TypeError)(_refusal(given))
    function = kind.function.__name__
    if key is kind.function:
        name = f"F.{function}"
    return Loss(name, kind.family(), kind, options, frozenset([function]))


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
