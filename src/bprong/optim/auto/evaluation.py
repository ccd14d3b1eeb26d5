"""The quadratic model of the loss on the batches of a step, along a few directions.

    f(θ + Σ cᵢ dᵢ) ≈ f(θ) + Σ cᵢ J dᵢ        dᵢᵀ F dⱼ = E[(J dᵢ)ᵀ F_out (J dⱼ)]

F is the Fisher matrix of the whole network; only these products of it are ever formed. They come from separate forward
passes that leave no trace: random number generators, buffers (running statistics of BatchNorm), `.grad` and the modes
of the modules are afterwards what they were before. Everything is per target and in nats, whatever multiple of the mean
−log p the user's loss is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel

from bprong.capture.listener import own_pass, without_autocast
from bprong.capture.own_pass import Subset, examples, random_numbers, rows_of, run_alone, set_tangent_
from bprong.capture.tape import Batch, Head, laid_out
from bprong.errors import WhiteningError, warn
from bprong.likelihood.families import Likelihood
from bprong.likelihood.loss import Targets
from bprong.linalg.quadratic import Array
from bprong.optim.auto.rule import SETTINGS, Evaluation
from bprong.optim.rules import Direction, dot
from bprong.parallel.processes import ALONE, Ranks

Run = Callable[[], Tensor]


class LossModel:
    """Quadratic models of the loss on the batches of a step.

    everything:    whether all of a batch is evaluated, because the model cannot be run on a subset: states, masks or
                   graphs belong to the whole batch
    forward_mode:  whether forward-mode AD is available
    """

    def __init__(
        self, model: nn.Module, likelihood: Likelihood, head: Head | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.everything = False
        self.forward_mode = True
        self.model = model
        self._likelihood = likelihood
        self.head = head
        self._ranks = ranks
        self._is_compared = False  # whether a subset was compared with the whole batch

    def evaluate(
        self,
        directions: Sequence[Direction],
        batches: Sequence[Batch],
        seed: int,
        in_units: Sequence[Direction] | None = None,
    ) -> Evaluation:
        """The quadratic model on the batches of all processes; seed: of this process.

        in_units: the directions in which λ measures lengths; None: these
        """
        k = len(directions)
        parts: list[_Part] = []

        def loss_now() -> float:
            with self._ranks.whole(self.model):
                return self._ranks.sums([sum(part.loss_now() for part in parts)])[0] / weight

        with self._ranks.whole(self.model) as parameters:
            in_model = [_in_whole(parameters, direction) for direction in directions]
            with self._ranks.exchange(k * k + k + 7) as rows:
                parts += self._parts(in_model, batches, seed)
                numbers = sum([part.numbers for part in parts], np.zeros(k * k + k + 4))
                length = sum(examples(batch.x) for batch in batches)
                rows.append([*numbers.tolist(), length, self.everything, not self.forward_mode])
        totals: list[float] = np.sum(rows, axis=0).tolist()
        *weighted, weight, targets, evaluated, count, undivided, refused = totals
        self.everything = undivided > 0
        self.forward_mode = refused == 0
        means = np.array(weighted) / weight
        return Evaluation(
            Q=means[: k * k].reshape(k, k),
            G=_products(in_units or directions),
            loss=float(means[-1]),
            slopes=means[k * k : -1],
            targets=int(targets),
            part=evaluated / count,
            loss_now=loss_now,
        )

    def _parts(self, directions: Sequence[Direction], batches: Sequence[Batch], seed: int) -> list[_Part]:
        """The batches of this process: subsets of them, unless the model cannot be run on a subset."""
        everything = evaluated_subsets(batches, self._likelihood, everything=True)
        if self.everything:
            return self._parts_of(everything, directions, seed)
        try:
            return self._parts_of(evaluated_subsets(batches, self._likelihood, self._ranks.size), directions, seed)
        except Exception as error:  # a model may raise anything, and if this is its own error, it will do so again
            kind = "" if isinstance(error, WhiteningError) else f"{type(error).__name__}: "
            reason = f"{kind}{error}".split("\n", maxsplit=1)[0]
        parts = self._parts_of(everything, directions, seed)
        self.everything = True
        warn(f'lr="auto": the model cannot be run on a subset of a batch, so all of it is evaluated: {reason}')
        return parts

    def _parts_of(
        self, subsets: Sequence[tuple[Batch, Subset]], directions: Sequence[Direction], seed: int
    ) -> list[_Part]:
        return [self._part(directions, *each, seed + i) for i, each in enumerate(subsets)]

    def _compare(self, batch: Batch, subset: Subset) -> None:
        """Raises WhiteningError if a subset gives other rows than the whole batch does, both in eval mode.

        That is so if the first dimension is time, for example.
        """
        self._is_compared = True
        everything = Subset(subset.whole, subset.whole)
        training = [module for module in self.model.modules() if module.training]
        for module in training:  # not eval(), which a module may take as an occasion to change its weights
            module.training = False
        try:
            rows = self._run_of(batch, subset, 0)()
            output, again = (self._run_of(batch, everything, seed)() for seed in (0, 1))
            expected = subset.rows(output)
        except Exception:  # it may return something else in eval mode; the subset is tried in training mode next
            return
        finally:
            for module in training:
                module.training = True
        if not output.equal(again):  # random numbers are drawn in eval mode too, so that rows cannot be compared
            return
        atol = 0.01 * float(expected[expected.isfinite()].std())
        if rows.shape != expected.shape or not torch.allclose(rows, expected, rtol=0.01, atol=atol):
            raise WhiteningError(
                "its rows depend on the rest of the batch, or the first dimension is not that of the examples"
            )

    def _part(self, directions: Sequence[Direction], batch: Batch, subset: Subset, seed: int) -> _Part:
        """The quadratic model on a subset of the examples of a batch."""
        if not (subset.everything or self._is_compared):
            self._compare(batch, subset)
        run = self._run_of(batch, subset, seed)
        network = linearized(run, directions, self.forward_mode)
        output = network.output
        if network.refused is not None:
            self.forward_mode = False
            warn(
                f'lr="auto": forward-mode AD is unavailable for this model; using finite differences: {network.refused}'
            )
        if not subset.everything and batch.output is not None and output.shape != subset.rows(batch.output).shape:
            raise WhiteningError(f"{subset.count} of {subset.whole} examples give the shape {tuple(output.shape)}")
        targets = cast(Targets, batch.targets).select(subset.rows)
        if batch.output is None:
            self._likelihood.check_targets(output, targets.y)
        with random_numbers(self.model, seed):  # for a likelihood that draws targets
            Q = curvature(network, self._likelihood, targets.counted)
        if not np.isfinite(Q).all():
            raise WhiteningError("the model's output, or its change along the step, is not finite on this batch")
        weight = targets.multiple or 1.0  # zero: none of them counts, and their loss is NaN
        weighted = weight * np.array([*Q.flat, *targets.slopes(output, network.along), targets.mean(output), 1.0])
        number = _counted_targets(self._likelihood, output, targets.counted)
        return _Part(np.append(weighted, [number, subset.count]), lambda: weight * targets.mean(run()))

    def _run_of(self, batch: Batch, subset: Subset, seed: int) -> Run:
        x = rows_of(batch.x, subset, next(self.model.parameters()).dtype)
        return partial(rerun, self.model, x, seed, batch.class_dim, self.head)


def _in_whole(parameters: Mapping[Tensor, Tensor], direction: Mapping[Tensor, Any]) -> Direction:
    """The direction in the whole parameters of a sharded model, from its slices; without any, as it is."""
    return {parameters[p]: d.full_tensor() for p, d in direction.items()} if parameters else direction


class _Part(NamedTuple):
    """A batch.

    numbers:   Q, slopes, loss and 1, times what multiple of the mean −log p of a target the user's loss is; the numbers
               of targets and of examples
    loss_now:  the loss at the current parameters, times this multiple
    """

    numbers: Array
    loss_now: Callable[[], float]


def evaluated_subsets(
    batches: Sequence[Batch], likelihood: Likelihood, ranks: int = 1, everything: bool = False
) -> list[tuple[Batch, Subset]]:
    """The examples that the quadratic model is evaluated on: the first ones, until they are enough; or everything.

    Targets are counted, because an example may have many: a sequence has one for each token, an image one for each
    pixel. Never a single example of several, because BatchNorm needs a variance.
    """
    total = 0
    targets = 0
    for batch in batches:
        length = examples(batch.x)
        total += length
        targets += length if batch.output is None else _counted_targets(likelihood, batch.output, batch.counted)
    fewest = math.ceil(SETTINGS.evaluated_least / ranks * total / max(1, targets))
    enough = total if everything else min(total, max(int(SETTINGS.evaluated_part * total), fewest, 2))
    subsets = []
    for batch in batches:
        length = examples(batch.x)
        count = min(enough, length)
        if count > 1 or count == length > 0 or len(batches) == 1:
            subsets.append((batch, Subset.of(batch, count)))
        enough -= length
    return subsets


def _counted_targets(likelihood: Likelihood, output: Tensor, counted: Tensor | None) -> int:
    return likelihood.targets(output) if counted is None else int(counted.sum())


def _products(directions: Sequence[Direction]) -> Array:
    """The symmetric matrix of dot products: (k, k)."""
    lower: Array = np.tril([[dot(x, y) for y in directions] for x in directions])
    return lower + np.tril(lower, -1).T


# Derivatives along directions -----------------------------------------------------------------------------------------


def rerun(model: nn.Module, x: Any, seed: int, class_dim: int | None = None, head: Head | None = None) -> Tensor:
    """The output on x at the current parameters: detached, eager, without autocast, with dropout drawn from the seed.

    class_dim: see `output.laid_out`
    head:      finds the output

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.Dropout())
    >>> bool(rerun(model, torch.ones(4, 3), seed=1).equal(rerun(model, torch.ones(4, 3), seed=1)))
    True
    """
    device = next(model.parameters()).device.type
    # Fused kernels of attention have no forward-mode AD.
    alone = run_alone(model, x, seed, errors=False, head=head)
    with sdpa_kernel(SDPBackend.MATH), without_autocast(device), alone as (output, _):
        return laid_out(output, class_dim)


class Linearized(NamedTuple):
    """A network to first order in its parameters: f(θ + Σ αᵢ dᵢ) ≈ output + Σ αᵢ along[i].

    refused: why forward-mode AD is unavailable, as torch says it, so that `along` comes from finite differences
    """

    output: Tensor
    along: tuple[Tensor, ...]
    refused: str | None = None


def linearized(run: Run, directions: Sequence[Direction], forward_mode: bool = True) -> Linearized:
    """The output and J d for each direction.

    run:          gives the output at the current parameters, each time with the same random numbers and buffers
    forward_mode: whether to try forward-mode AD; trying it in vain takes the time of half a pass

    >>> layer = nn.Linear(2, 1)
    >>> run = partial(rerun, layer, torch.tensor([[1.0, 2.0]]), seed=0)
    >>> linearized(run, [{layer.weight: torch.tensor([[1.0, 10.0]])}]).along[0]
    tensor([[21.]])
    """
    refused = None
    if forward_mode:
        try:
            # One after the other. All at once (torch.func: vmap of jvp) computes the output once instead of k times but
            # must stack the directions: 75 ms against 85 for two of the autoencoder 784-1000-500-250-30-… at batch 250
            # (a forward and backward pass: 39), and it refuses models that write to their buffers, as BatchNorm does.
            duals = [_dual(run, d) for d in directions]
            return Linearized(duals[0][0], tuple(tangent for _, tangent in duals))
        except (NotImplementedError, RuntimeError) as reason:  # an error of the model itself will be raised again below
            refused = str(reason).split("\n", maxsplit=1)[0]
    along = tuple(_difference(run, d) for d in directions)
    return Linearized(run(), along, refused)


def curvature(network: Linearized, likelihood: Likelihood, counted: Tensor | None = None) -> Array:
    """dᵢᵀ F dⱼ, averaged over the targets that the loss counts: (k, k).

    counted: which targets count, without the output's last dimension; None: all
    """
    output = network.output
    likelihood.check(output)
    products = likelihood.fisher_products(output, network.along, counted)
    return np.asarray((products / _counted_targets(likelihood, output, counted)).cpu())


def _dual(run: Run, direction: Direction) -> tuple[Tensor, Tensor]:
    """f and J d in one pass of dual numbers.

    The parameters themselves become dual, in place, instead of being replaced: whatever refers to them (tied layers,
    the list in nn.LSTM) then sees the tangents. Leaving the level removes the tangents again.
    """
    with own_pass(), dual_level():
        for parameter, d in direction.items():
            set_tangent_(parameter, d)
        output, tangent = unpack_dual(run())  # type: ignore[no-untyped-call]
        return output.clone(), torch.zeros_like(output) if tangent is None else tangent.clone()


@torch.no_grad()
def _difference(run: Run, direction: Direction) -> Tensor:
    """(f(θ + hd) − f(θ − hd)) / 2h, which is J d up to errors of h² and of rounding / h; these balance at h = ε^⅓."""
    before = {p: p.detach().clone() for p in direction}
    ratio = (dot(before, before) or 1.0) / (dot(direction, direction) or 1.0)
    h = max(torch.finfo(p.dtype).eps for p in direction) ** (1 / 3) * math.sqrt(ratio)
    outputs = []
    try:
        for step in (h, -h):
            for p, d in direction.items():
                p.copy_(before[p]).add_(d.to(p), alpha=step)
            outputs.append(run())
    finally:
        torch._foreach_copy_(list(before), list(before.values()))
    return (outputs[0] - outputs[1]).div(2 * h)
