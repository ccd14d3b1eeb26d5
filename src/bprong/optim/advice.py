"""What users are told about how they use an optimizer: errors at construction, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor, nn

from bprong.errors import warn
from bprong.whitening.refresh import SEEN_IN_PART

FALLBACK_LIMIT = 0.5  # of the trained numbers: if more follow the fallback rule, the user is told


def check_model(model: object, name: str) -> None:
    """Raise TypeError if something other than a model was given to the optimizer of this name."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name} needs the model itself, not a {type(model).__name__}: {name}(model, loss, ...), not "
            f"{name}(model.parameters(), ...). Use params= to select parameters. For skorch, which passes "
            f"parameters only, see examples/with_skorch.py"
        )


def warn_of_fallback(parameters: Iterable[Tensor], reasons: Mapping[Tensor, str]) -> None:
    """Warn if most of the numbers that are trained are not whitened, apart from layers that were warned about.

    reasons: why parameters are not whitened
    """
    trained = Counter({p: p.numel() for p in parameters if p.requires_grad})
    counts: Counter[str] = Counter()
    for p, reason in reasons.items():
        counts[reason] += trained[p] if reason != SEEN_IN_PART else 0
    fraction = counts.total() / max(1, trained.total())
    if fraction > FALLBACK_LIMIT:
        warn(
            f"{fraction:.0%} of the trained numbers follow the fallback rule (Adam) and are not whitened, most of "
            f"them {', '.join(reason for reason, _ in counts.most_common(3))}. Layers that compute what a layer "
            f"of torch's does can be whitened: see bprong.register, and bprong.coverage(model) for each parameter"
        )


def warn_of_untrained(model: nn.Module, trained: Collection[Tensor]) -> bool:
    """Warn if parameters have gradients, but the optimizer does not train them; return whether there are any."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and p not in trained]
    if names:
        warn(
            f"{', '.join(names[:3])}{' and others' * (len(names) > 3)} have gradients, but are not trained: they "
            f"were frozen, or not there yet, when the optimizer was made. Use optimizer.add_param_group, or make "
            f"the optimizer with params=model.parameters(). If another optimizer trains them, choose with params="
        )
    return bool(names)
