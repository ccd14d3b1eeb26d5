"""p(y | output): likelihood families. They define the distribution of targets that the Fisher matrix is made of.

The Fisher matrix takes targets drawn from the model's own p(y | x), not the data's. Each family therefore defines its
negative log-probability, how targets are drawn and, for an exact Fisher matrix, a root of the Fisher matrix at the
output: vectors g_k with Σ_k g_k g_kᵀ = E[∇(−log p) ∇(−log p)ᵀ], which are back-propagated in place of drawn errors.

One target is one row of the output, (..., m): a batch has B of them in classification and B·T in a language model.
Classes are therefore in the last dimension; `Loss.class_dim` finds outputs that have them in the second, as torch's
losses take them. An image of independent pixels (an output of four or more dimensions) is one target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bprong.linalg.moments import to_float64


def nontrivial(mask: Tensor | None) -> Tensor | None:
    """The mask, or None if it is all True or all False."""
    return None if mask is None or bool(mask.all() == mask.any()) else mask


class Likelihood(ABC):
    """A distribution of targets given a network's output. Subclass it for your own: `nll` and `sample` are enough.

    A subclass may also set these attributes, which `lr="auto"` reads:

    nonnegative    nll is never negative, so its value bounds how far the loss can still fall. Leave it False if nll
                   leaves out a constant.
    takes_float64  nll accepts a float64 output, whatever the dtype of the targets.

    >>> class Poisson(Likelihood):                        # output: log of the rate, (batch, counts)
    ...     def nll(self, output, y):
    ...         return (output.exp() - y * output).sum(-1)
    ...     def sample(self, output):
    ...         return torch.poisson(output.exp())
    >>> Poisson().targets(torch.zeros(8, 3))
    8
    """

    nonnegative = False
    takes_float64 = False
    has_classes = False  # whether the output's last dimension is that of classes
    ignore_index = -100  # the index that marks targets over classes that do not count
    accepted = "one for each example"  # what targets must be

    @abstractmethod
    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p(y | output) up to a constant: one value per target, neither summed nor averaged over targets."""

    @abstractmethod
    def sample(self, output: Tensor) -> Tensor:
        """Targets drawn from p(y | output) by torch's default generator, which the caller saves and restores."""

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """Vectors g_k, shaped like the output, whose Σ_k g_k g_kᵀ is each target's Fisher matrix at the output.

        Every g_k is nonzero at one target per example only. Errors of two targets of one example are independent under
        the model, and back-propagating both at once would add a product that is zero in expectation.
        """
        raise TypeError(f'{type(self).__name__} defines no roots(): use fisher="sampled", or define it')

    def fisher_products(self, output: Tensor, directions: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
        """Σ over targets of dᵢᵀ F dⱼ, where F is the Fisher matrix of a target at the output: (k, k), float64.

        directions: k changes dᵢ of the output
        counted:    which targets the loss counts, (targets,); None: all of them

        >>> Gaussian().fisher_products(torch.zeros(5, 2), [torch.ones(5, 2)])
        tensor([[10.]], dtype=torch.float64)
        """
        V = torch.stack([to_float64(d.detach()) for d in directions])
        FV = self.fisher_times(output.detach(), V)
        rows = slice(None) if counted is None else counted.flatten()
        V, FV = (M.reshape(len(M), self.targets(output), -1)[:, rows].flatten(1) for M in (V, FV))
        matrix = V @ FV.T
        return (matrix + matrix.T) / 2  # exactly symmetric

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        """F v = Σ_k g_k (g_kᵀ v) of every target, for every v in V: from the roots g_k if they are defined.

        V: (k, *output), float64

        Otherwise one target y is drawn per row. With g = ∇(−log p(y)), g gᵀ v is F v on average.
        """
        has_roots = type(self).roots is not Likelihood.roots
        roots = self.roots(output) if has_roots else self.gradients(output, self.sample(output))
        rows = V.reshape(len(V), self.targets(output), -1)
        total = torch.zeros_like(rows)
        for root in roots:
            g = to_float64(root.detach()).reshape(rows.shape[1:])
            total += g * (g * rows).sum(dim=-1, keepdim=True)
        return total.view_as(V)

    def gradients(self, output: Tensor, y: Tensor) -> Sequence[Tensor]:
        """The gradient of the summed −log p of targets, at the output."""
        with torch.enable_grad():
            leaf = output.detach().requires_grad_()
            return torch.autograd.grad(self.total_nll(leaf, y), leaf)

    def _rows(self, output: Tensor) -> Tensor:
        """The output with all elements of a target in the last dimension, (..., m)."""
        return output if output.ndim > 1 else output.unsqueeze(-1)

    def targets(self, output: Tensor) -> int:
        """The number of targets that belong to an output."""
        return self._rows(output).shape[:-1].numel()

    def check(self, output: Tensor) -> None:
        """Raises ValueError if the output does not fit this likelihood."""
        if not output.is_floating_point() or output.ndim == 0 or output.numel() == 0:
            raise ValueError(
                f"{type(self).__name__} needs a non-empty floating-point output with one row per target, "
                f"not {output.dtype} of shape {tuple(output.shape)}"
            )

    def shape_of_targets(self, output: Tensor, y: Tensor) -> torch.Size:
        """The shape of targets that belong to an output, if they are of the kind of y."""
        return torch.Size((len(output), *y.shape[1:]))

    def laid_out(self, y: Tensor, output: Tensor) -> Tensor | None:
        """Targets with classes in the last dimension, laid out like the output; None: they are not its targets."""
        shape = self.shape_of_targets(output, y)
        return y.reshape(shape) if y.numel() == shape.numel() else None

    def check_targets(self, output: Tensor, y: Tensor) -> None:
        """Raises ValueError if y cannot be targets for this output."""
        if y.shape != self.shape_of_targets(output, y):
            raise ValueError(
                f"{type(self).__name__} targets for an output of shape {tuple(output.shape)} must be {self.accepted}, "
                f"not {y.dtype} of shape {tuple(y.shape)}"
            )

    def not_ignored(self, y: Tensor) -> Tensor | None:
        """Which of the data's targets are not marked as ignored; None if this likelihood has no such mark."""
        return None

    def reached(self, gradient: Tensor) -> Tensor:
        """Which targets have a gradient at the output."""
        return self._rows(gradient != 0).any(dim=-1)

    def total_nll(self, output: Tensor, y: Tensor) -> Tensor:
        """The sum of nll over targets: its gradients are per target, however the user's own loss is reduced."""
        values = self.nll(output, y)
        if values.numel() != self.targets(output):
            raise ValueError(
                f"{type(self).__name__}.nll must return one value for each of the {self.targets(output)} targets, "
                f"not shape {tuple(values.shape)}: leave out the sum or mean over the batch"
            )
        return values.sum()


class Categorical(Likelihood):
    """Classes with logits in the output's last dimension; loss: cross-entropy.

    Targets are class indices (...), or distributions over the classes (..., m).
    """

    nonnegative = True
    takes_float64 = True
    has_classes = True
    accepted = "class indices, without its last dimension, or distributions over the classes"

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy of each target."""
        rows = output.flatten(end_dim=-2)
        ignored = -100 if y.is_floating_point() else self.ignore_index
        return F.cross_entropy(rows, y.flatten(end_dim=output.ndim - 2), reduction="none", ignore_index=ignored)

    def sample(self, output: Tensor) -> Tensor:
        p = output.detach().float().softmax(dim=-1)
        return torch.multinomial(p.flatten(end_dim=-2), 1, generator=generator()).view(output.shape[:-1])

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """g_k = √p_k (p − e_k): class k weighted by its probability; Σ_k g_k g_kᵀ = diag(p) − ppᵀ."""
        p = output.detach().softmax(dim=-1)
        for e_k in _basis(output):
            yield (p * e_k).sum(dim=-1, keepdim=True).sqrt() * (p - e_k)  # zero at other targets, where e_k is zero

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        """(diag(p) − ppᵀ) v"""
        p = to_float64(output).softmax(dim=-1)
        return p * (V - (p * V).sum(dim=-1, keepdim=True))

    def check(self, output: Tensor) -> None:
        super().check(output)
        if output.ndim not in (2, 3) or output.shape[-1] < 2:
            raise ValueError(
                f"a loss over classes needs an output (batch, classes) or (batch, positions, classes) with at least "
                f"two classes, not one of shape {tuple(output.shape)}. Give a single example a batch dimension, "
                f"x.unsqueeze(0); for one logit per example declare nn.BCEWithLogitsLoss"
            )

    def shape_of_targets(self, output: Tensor, y: Tensor) -> torch.Size:
        return output.shape if y.is_floating_point() else output.shape[:-1]

    def not_ignored(self, y: Tensor) -> Tensor:
        return y.any(dim=-1) if y.is_floating_point() else y != self.ignore_index


class Elementwise(Likelihood):
    """Elements of the output that are independent given x; targets are shaped like the output."""

    nonnegative = True
    takes_float64 = True
    accepted = "shaped like the output"

    @abstractmethod
    def nll_of_elements(self, output: Tensor, y: Tensor) -> Tensor:
        """−log p of each element."""

    @abstractmethod
    def curvature(self, output: Tensor) -> Tensor:
        """The Fisher information of each element of the output."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        return self._rows(self.nll_of_elements(output, y)).sum(dim=-1).flatten()

    def _rows(self, output: Tensor) -> Tensor:
        return output.flatten(1) if output.ndim > 3 else super()._rows(output)

    def roots(self, output: Tensor) -> Iterator[Tensor]:
        """g_k = √f_k e_k, where f_k is the element's own Fisher information."""
        root = self.curvature(output.detach()).sqrt()
        for e_k in _basis(output):
            yield root * e_k

    def fisher_times(self, output: Tensor, V: Tensor) -> Tensor:
        return self.curvature(to_float64(output)) * V

    def shape_of_targets(self, output: Tensor, y: Tensor) -> torch.Size:
        return output.shape


class Bernoulli(Elementwise):
    """Independent bits with logits as output; loss: binary cross-entropy summed over a row."""

    def nll_of_elements(self, output: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none")

    def sample(self, output: Tensor) -> Tensor:
        return torch.bernoulli(output.detach().float().sigmoid(), generator=generator())

    def curvature(self, output: Tensor) -> Tensor:
        p = output.sigmoid()
        return p * (1 - p)


class Gaussian(Elementwise):
    """Independent outputs of unit variance; loss: ½‖y − output‖², summed over a row."""

    def nll_of_elements(self, output: Tensor, y: Tensor) -> Tensor:
        return (output - y) ** 2 / 2

    def sample(self, output: Tensor) -> Tensor:
        return output.detach() + torch.empty_like(output).normal_(generator=generator())

    def curvature(self, output: Tensor) -> Tensor:
        return torch.ones_like(output)


class Undeclared(Likelihood):
    """For optimizers that need no loss: it knows only which targets count."""

    def nll(self, output: Tensor, y: Tensor) -> Tensor:
        raise TypeError("no loss was declared")

    def sample(self, output: Tensor) -> Tensor:
        raise TypeError("no loss was declared")


def _basis(output: Tensor) -> Iterator[Tensor]:
    """The unit vectors e_k in the space of one example's output."""
    for k in torch.arange(output[0].numel(), device=output.device):
        yield F.one_hot(k, output[0].numel()).view(output.shape[1:]).to(output.dtype)


# Random numbers: torch's own generators, which all threads share, stay untouched --------------------------------------

_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("generator", default=None)


def generator() -> torch.Generator | None:
    """The generator of the context that is active; None: torch's own."""
    return _GENERATOR.get()


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a generator with this seed. It gives the numbers that torch's own would give with this seed.

    >>> with drawing(1, torch.device("cpu")):
    ...     own = torch.rand(3, generator=generator())
    >>> _ = torch.manual_seed(1)
    >>> bool(own.equal(torch.rand(3)))
    True
    """
    token = _GENERATOR.set(torch.Generator(device).manual_seed(seed))
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def mixed(seed: int, t: int) -> int:
    """A seed for step t that shares no stream with the user's own seeds, however small those are."""
    return (seed * 0x9E3779B97F4A7C15 + t * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
