"""p(y | output): what a network's output says about its targets, which is what its Fisher matrix is made of.

The Fisher matrix takes targets drawn from the model's own p(y|x), not the data's. Each likelihood therefore knows its
negative log-probability, how to draw from it, and, for an exact Fisher matrix, a root of the output's own Fisher
matrix: vectors g_k with Σ_k g_k g_kᵀ = E[∇(−log p) ∇(−log p)ᵀ], which back-propagate in place of drawn errors.

One target is one row of the output, (..., m): B of them for classification, B·T for a language model. Classes are
therefore in the last dimension. Images (four or more dimensions) of independent pixels are one target each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.information import products, times_drawn, times_roots
from bprong.moments import widened

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "likelihood_of", "some"]


IGNORED = -100  # torch's own mark of a class index that the loss leaves out


def some(mask: Tensor | None) -> Tensor | None:
    """A mask that leaves something out and something in; else None."""
    return None if mask is None or bool(mask.all()) or not bool(mask.any()) else mask


class Likelihood(ABC):
    """A distribution of targets given a network's output. Subclass it for your own; `nll` and `sample` are enough.

    >>> class Poisson(Likelihood):                        # output: log of the rate, (batch, counts)
    ...     def nll(self, output, y):
    ...         return (output.exp() - y * output).sum(-1)
    ...     def sample(self, output):
    ...         return torch.poisson(output.exp())
    >>> Poisson().targets(torch.zeros(8, 3))
    8
    """

    @abstractmethod
    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y | output) up to a constant: one value per target, neither summed nor averaged over targets."""

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """Targets drawn from p(y | output), by torch's default generator (which the caller saves and restores)."""

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """Vectors g_k, shaped like the output, whose Σ_k g_k g_kᵀ is each target's Fisher matrix at the output.

        Every g_k touches one target per example only: errors of two targets of one example are independent under the
        model, and back-propagating both at once would add a product that is zero in expectation.
        """
        raise TypeError(f'{type(self).__name__} defines no roots(): use fisher="sampled", or define it')

    def information(self, output: Tensor, directions: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
        """Σ over targets of dᵢᵀ F dⱼ, F the Fisher matrix of a target at the output: (k, k), float64.

        directions: k changes dᵢ of the output; counted: which targets the loss counts, (targets,)

        >>> Gaussian().information(torch.zeros(5, 2), [torch.ones(5, 2)])
        tensor([[10.]], dtype=torch.float64)
        """
        V = torch.stack([widened(d.detach()) for d in directions])
        return products(V, self.fisher_times(output.detach(), V), self.targets(output), counted)

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        """F v of every target; V: (k, *output), float64. By the roots where they are defined, else by drawn targets."""
        if type(self).roots is not Likelihood.roots:
            return times_roots(self.roots(output), V, self.targets(output))
        return times_drawn(self, output, V)

    def targets(self, output: Tensor) -> int:
        """How many targets the output speaks of."""
        return output.numel() // output.shape[-1] if output.ndim > 1 else output.numel()

    def check(self, output: Tensor) -> None:
        """Raises ValueError where the output cannot be this likelihood's."""
        if not output.is_floating_point() or output.ndim == 0 or output.numel() == 0:
            raise ValueError(
                f"{type(self).__name__} needs a non-empty floating-point output with one row per target, "
                f"not {output.dtype} of shape {tuple(output.shape)}"
            )

    def check_targets(self, output: Tensor, y: Tensor) -> None:
        """Raises ValueError where y cannot be targets for this output."""
        if len(y) != len(output):
            raise ValueError(f"{len(y)} targets were given for a batch of {len(output)}")

    def counted(self, output: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which targets the loss counts, (targets,), from a mask that may be finer; None: all of them."""
        if mask is None or mask.numel() % self.targets(output):
            return None
        mask = mask.reshape(self.targets(output), -1).any(dim=1)
        return mask if mask.any() else None

    def heard(self, gradient: Tensor) -> Tensor | str:
        """Which targets the user's loss counts, read off its gradient at the output: where that is not zero.

        The last dimension apart; or what is wrong, in words.
        """
        return (gradient != 0).any(dim=-1) if gradient.ndim > 1 else gradient != 0

    def left_in(self, y: Tensor) -> Tensor | None:
        """Which of the data's targets are not marked as left out; None where there is no such mark."""
        return None

    def targets_behind(self, gradient: Tensor) -> Tensor:
        """The data's targets, read off the gradient that the user's loss left at the output, whatever its scale."""
        raise ValueError(f"targets cannot be read off the gradients of {type(self).__name__}: give them, observe(x, y)")

    def total_nll(self, output: Tensor, y: Tensor) -> Tensor:
        """The sum over targets, so that errors stay per example however the user's own loss is reduced."""
        values = self.nll(output, y)
        if values.numel() != self.targets(output):
            raise ValueError(
                f"{type(self).__name__}.nll must return one value for each of the {self.targets(output)} targets, "
                f"not shape {tuple(values.shape)}: leave out the sum or mean over the batch"
            )
        return values.sum()


class Categorical(Likelihood):
    """Classes with logits in the output's last dimension; loss: cross-entropy. Targets are class indices (...)."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(end_dim=-2), y.flatten(), reduction="none")

    def sample(self, output: Tensor) -> Tensor:
        p = output.detach().float().softmax(dim=-1).flatten(end_dim=-2)
        return torch.multinomial(p, 1).view(output.shape[:-1])

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """g_k = √p_k (p − e_k): class k weighted by its probability; Σ_k g_k g_kᵀ = diag(p) − ppᵀ."""
        p = output.detach().softmax(dim=-1)
        for position, k, e_k in _units(output):
            yield _at(position, p[..., k : k + 1].sqrt() * (p - e_k))

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        """(diag(p) − ppᵀ) v"""
        p = widened(output).softmax(dim=-1)
        return p * (V - (p * V).sum(dim=-1, keepdim=True))

    def check(self, output: Tensor) -> None:
        super().check(output)
        if output.ndim < 2 or output.shape[-1] < 2:
            raise ValueError(
                f"categorical needs logits of at least two classes in the last dimension, not an output of shape "
                f"{tuple(output.shape)}; for one logit per example use bernoulli"
            )
        if output.ndim > 3:
            raise ValueError(
                f"categorical reads classes from the last dimension; of an output of shape {tuple(output.shape)} it is "
                f"not clear which holds them. Permute and flatten it to (rows, classes), or give your own Likelihood"
            )

    def check_targets(self, output: Tensor, y: Tensor) -> None:
        if y.is_floating_point() or y.shape != output.shape[:-1]:
            raise ValueError(
                f"categorical targets for an output of shape {tuple(output.shape)} are class indices of shape "
                f"{tuple(output.shape[:-1])}, not {y.dtype} of shape {tuple(y.shape)}"
            )
        classes = y[y != IGNORED]
        if classes.numel() and (classes.min() < 0 or classes.max() >= output.shape[-1]):
            raise ValueError(
                f"class indices must lie in 0 … {output.shape[-1] - 1}; "
                f"these lie in {int(classes.min())} … {int(classes.max())}"
            )

    def heard(self, gradient: Tensor) -> Tensor | str:
        """Over the classes of a target the gradient of a cross-entropy sums to zero, which tells where they are."""
        if gradient.ndim == 3 and _sums_to_zero(gradient, 1) and not _sums_to_zero(gradient, 2):
            return (
                f"categorical reads classes from the last dimension of an output; in this one, of shape "
                f"{tuple(gradient.shape)}, the loss has them in the second. Let the model return output.mT, and give "
                f"the loss its .mT"
            )
        return super().heard(gradient)

    def left_in(self, y: Tensor) -> Tensor | None:
        return y != IGNORED

    def targets_behind(self, gradient: Tensor) -> Tensor:
        """∝ p − e_y: y is where it is least. A row of zeros is one the loss left out, or one with p = e_y."""
        return gradient.argmin(dim=-1).masked_fill((gradient == 0).all(dim=-1), IGNORED)


class _Elementwise(Likelihood):
    """Outputs that are independent given x; targets are shaped like the output."""

    @abstractmethod
    def element_nll(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p of each element."""

    @abstractmethod
    def curvature(self, output: Tensor) -> Tensor:
        """The Fisher information of each element of the output."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return self.element_nll(output, y).reshape(self.targets(output), -1).sum(dim=-1)

    def targets(self, output: Tensor) -> int:
        return len(output) if output.ndim > 3 else super().targets(output)

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """g_k = √f_k e_k, f_k the element's own Fisher information."""
        root = self.curvature(output.detach()).sqrt()
        if output.ndim == 1:
            yield root
            return
        for position, _, e_k in _units(output):
            yield _at(position, root * e_k)

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        return self.curvature(widened(output)) * V

    def check_targets(self, output: Tensor, y: Tensor) -> None:
        if y.shape != output.shape:
            raise ValueError(
                f"{type(self).__name__.lower()} targets are shaped like the output {tuple(output.shape)}, "
                f"not {tuple(y.shape)}"
            )


class Bernoulli(_Elementwise):
    """Independent bits with logits as output; loss: binary cross-entropy summed over a row."""

    def element_nll(self, output: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none")

    def sample(self, output: Tensor) -> Tensor:
        return torch.bernoulli(output.detach().float().sigmoid())

    def curvature(self, output: Tensor) -> Tensor:
        p = output.sigmoid()
        return p * (1 - p)

    def targets_behind(self, gradient: Tensor) -> Tensor:
        """∝ p − y, so negative just where y is one; for targets between 0 and 1 give them, observe(x, y)."""
        return (gradient < 0).to(gradient.dtype)

    def check_targets(self, output: Tensor, y: Tensor) -> None:
        super().check_targets(output, y)
        if y.min() < 0 or y.max() > 1:
            raise ValueError(f"bernoulli targets lie in 0 … 1; these lie in {float(y.min())} … {float(y.max())}")


class Gaussian(_Elementwise):
    """Independent outputs of unit variance; loss: ½‖y − output‖², summed over a row."""

    def element_nll(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y) ** 2 / 2

    def sample(self, output: Tensor) -> Tensor:
        output = output.detach()
        return output + torch.randn_like(output)

    def curvature(self, output: Tensor) -> Tensor:
        return torch.ones_like(output)


_BY_NAME: dict[str, type[Likelihood]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def likelihood_of(choice: str | Likelihood) -> Likelihood:
    """A likelihood by name, or the user's own as it is."""
    if isinstance(choice, Likelihood):
        return choice
    if isinstance(choice, str) and choice in _BY_NAME:
        return _BY_NAME[choice]()
    raise ValueError(f"likelihood must be one of {tuple(_BY_NAME)} or a bprong.Likelihood, not {choice!r}")


def _sums_to_zero(gradient: Tensor, dim: int) -> bool:
    return float(gradient.sum(dim=dim).abs().max()) <= 1e-3 * float(gradient.abs().max())


def _units(output: Tensor) -> Iterator[tuple[Tensor | None, int, Tensor]]:
    """For each position of a target within an example and each of its coordinates: where, which, and e_k."""
    *_, m = output.shape
    positions = output[0, ..., 0].numel()
    for t in range(positions):
        where = None
        if positions > 1:
            where = torch.zeros(positions, dtype=output.dtype, device=output.device)
            where[t] = 1
            where = where.view(*output.shape[1:-1], 1)
        for k in range(m):
            yield where, k, F.one_hot(torch.tensor(k, device=output.device), m).to(output.dtype)


def _at(position: Tensor | None, g: Tensor) -> Tensor:
    return g if position is None else g * position
