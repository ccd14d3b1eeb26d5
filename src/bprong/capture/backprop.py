"""Errors δ: gradients at the output that stand for targets, propagated back to every recorded call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from bprong.capture.calls import Call, Calls
from bprong.capture.request import Fisher
from bprong.capture.tape import Output
from bprong.likelihood.families import Likelihood, generator


def roots_of(output: Tensor, y: Tensor | None, likelihood: Likelihood, fisher: Fisher) -> Iterable[Tensor]:
    """Return gradients at the output whose outer products sum to its Fisher matrix; if sampled, estimate it.

    y: the targets of the data, for fisher="empirical"
    """
    # Classes may have a logit of −∞, and no other. No target can be drawn then; errors are as unknown as the output.
    if bool((output.isnan() | (output == torch.inf)).any()):
        return [torch.full_like(output, torch.nan)]
    if fisher == "exact":
        return (root * _signs(root) for root in likelihood.roots(output))
    if fisher == "sampled":
        y = likelihood.sample(output)
    elif not isinstance(y, Tensor):
        raise ValueError(
            f'fisher="empirical" needs the targets of the data: give them, step(x, y) or observe(x, y). They must be a '
            f"tensor, not {type(y).__name__}"
        )
    else:
        likelihood.check_targets(output, y)
    return likelihood.gradients(output, y)


def _signs(root: Tensor) -> Tensor:
    """Return a random sign for each row of the batch.

    If rows are computed independently, signs change nothing. If they are not (BatchNorm in training, sequences
    flattened into rows), errors of different rows are multiplied with each other; under the model such products are
    zero on average, and random signs make them so.
    """
    bits = torch.randint(0, 2, root.shape[:1], device=root.device, generator=generator())
    return (2 * bits - 1).to(root.dtype).view(-1, *[1] * (root.ndim - 1))


def normal(like: Tensor) -> Tensor:
    """Return normally distributed numbers, in the shape of another tensor."""
    return torch.empty_like(like).normal_(generator=generator())


def of_targets(root: Tensor, counted: Tensor | None) -> Tensor:
    """Return a gradient at the output, set to zero at the targets that do not count; None: all count."""
    return root if counted is None else (root.reshape(counted.numel(), -1) * counted.view(-1, 1)).view_as(root)


class Graph:
    """The autograd graph behind an output, through which errors are sent back to recorded calls.

    calls: those that the output depends on, and all calls of a layer of which it depends on none, if these have a graph

    Others are on a branch that was detached, such as a target network's, and no error of the loss reaches them. A layer
    without any may reach the loss in another way, such as a second head.

    unexplained: the names of weights that are used in ways that were not recorded, e.g. an embedding multiplied by hand
                 as the output layer, or a convolution transposed. The calls then tell only a part of what they do
    """

    def __init__(self, output: Output, recorded: Calls) -> None:
        self.output = output
        edges = {call: call.edge for call in recorded if call.edge is not None}
        by_node: dict[Any, dict[Call, int]] = defaultdict(dict)  # each call with the number of its a among the results
        for call, edge in edges.items():
            by_node[edge.node][call] = edge.output_nr
        visited: set[Any] = set()
        leads: set[Any] = set()  # nodes that lead to a call
        stack = [] if output.edge is None else [(output.edge.node, False)]
        while stack:
            node, is_finished = stack.pop()
            if node in recorded.behind:  # from a call to its input, and not to its weight
                following = [recorded.behind[node]]
            else:
                following = [after for after, _ in node.next_functions]
            if is_finished and any(after in by_node or after in leads for after in following):
                leads.add(node)
            if node not in visited:
                visited.add(node)
                stack.append((node, True))  # after those that it leads to
                stack += [(after, False) for after in following if after is not None]
        leading = {call for call, edge in edges.items() if edge.node in visited}
        names = {call.weight.name for call in leading}
        self.calls = []
        for call in recorded:
            is_detached = output.edge is not None and call not in edges and call.weight.is_trained
            if call in leading or not (is_detached or call.weight.name in names):
                self.calls.append(call)
        self._between = {node: calls for node, calls in by_node.items() if node in leads}
        self._last = {call: edge for call, edge in edges.items() if edge.node not in leads}
        trained = [weight for weight in recorded.recorded if weight.weight.requires_grad]
        self.unexplained = {w.name for w in trained if get_gradient_edge(w.weight).node in visited}

    def send_back(self, root: Tensor, take: Callable[[Call, Tensor], None]) -> None:
        """Propagate a gradient at the output back and give each call its δ, if one arrives there.

        They arrive one after the other and are not kept, so that `take` should not keep them either. Autograd computes
        gradients only on the way to those that are asked for, so the calls behind which there is no other are asked
        for.
        """
        if not self._last:
            return
        if self.output.edge is None:
            raise ValueError("the model's output is detached from its layers: no error can be propagated back to them")
        with ExitStack() as hooks:
            for node, calls in self._between.items():
                hooks.callback(node.register_prehook(partial(_pass_on, calls, take)).remove)
            deltas = self.output.gradients(root, list(self._last.values()))
        for call, delta in zip(self._last, deltas, strict=True):
            if delta is not None:
                take(call, delta)


def _pass_on(
    calls: Mapping[Call, int], take: Callable[[Call, Tensor], None], gradients: Sequence[Tensor | None]
) -> None:
    """Give calls their δ: a hook that runs before an operation is differentiated, with the gradients of its results."""
    for call, number in calls.items():
        delta = gradients[number]
        if delta is not None:
            take(call, delta)
