"""step="auto": whether spectral steps serve a network better than natural ones is found out by trying both.

The quadratic model of the loss cannot tell, because it knows nothing of the steps to come. So two rules train side by
side from the same weights on the same batches: natural steps lead and train the user's model; their rival, spectral
steps, trains a second copy of the weights in passes of our own. On every batch both losses are compared before either
rule is trained on it, until examples come again. A rival that wins hands its weights over, so that no step is lost and
none is taken back; there is no way back, because a rule that begins anew always looks better for a while.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bprong.capture.own_pass import WHOLE, examples, rows_of, run_alone
from bprong.capture.tape import Batch, laid_out
from bprong.errors import WhiteningError
from bprong.likelihood.families import Gaussian, mixed
from bprong.likelihood.loss import Targets
from bprong.optim.auto.step import Automatic, NaturalDirections, totals
from bprong.optim.options import Setup
from bprong.optim.rules import CHOSEN_MOMENTUM, Direction, Gradients, Group, States, StepRule, dot
from bprong.optim.spectral import SpectralDirections
from bprong.whitening.layer import Layer
from bprong.whitening.layers import Layers

logger = logging.getLogger("bprong")
State = dict[str, Any]


@dataclass(frozen=True)
class RaceSettings:
    """The constants of races; docs/races.md has the forms that were tried.

    starts     steps from which on a race may begin, one after the other
    length     the steps of each race, at most
    looks      numbers of steps after which the rival may win early, with the standard errors that this takes,
    plain      and the relative difference of the losses that it takes too. The leader may not: networks that want
               spectral steps in the end are often better served by natural ones at first
    part       the last part of a race, in which the losses are compared
    repeated   the part of a batch that was in the race before from which on examples come again, which ends the race
               of a classifier. The rival wins by the standard errors of the last look; without one there was no race
    enough     the number of examples with which it goes on nevertheless
    most       bytes of an example, about, that are read to tell it from others
    certainty  standard errors by which the rival must win a later race; the first takes the better one. With two of
               them networks that want spectral steps at the end of training find these too late
    alike      the sine of the angle up to which two gradients are alike
    full       the multiplier of learning rates from which on a race may begin: not in a warm-up or at the end of a run
    largest    numbers in the model above which it is not copied: spectral steps are made without a race
    """

    starts: tuple[int, ...] = (0, 40, 100, 200)
    length: int = 40
    looks: Mapping[int, float] = field(default_factory=lambda: {15: 6.0, 20: 3.0, 30: 3.0})
    plain: float = 0.2
    repeated: float = 0.5
    enough: int = 1000
    most: int = 16_384
    part: float = 1 / 3
    certainty: float = 1.0
    alike: float = 0.1
    full: float = 0.9
    largest: int = 200_000_000


SETTINGS = RaceSettings()


class Rival:
    """A second copy of the trained weights and of the model's buffers, with the rule that trains it.

    model:        the user's
    layers:       with the moments of the leader's layers, and factors of its own damping
    values:       the weights by parameter, from its first gradient on; while the rival is in the model, the leader's
    differences:  of its loss from the leader's on each batch so far, relative to the larger one
    examples:     a number for each example so far, which tells it from others
    norms:        of the leader's weights after its last step; empty: not known
    began:        the step at which it began
    """

    def __init__(self, rule: Automatic, began: int) -> None:
        self.rule = rule
        self.model = rule.loss_model.model
        self.layers = Layers()
        self.values: dict[Tensor, Tensor] = {}
        self.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.states: States = defaultdict(dict)
        self.differences: list[float] = []
        self.examples: set[int] = set()
        self.norms: dict[Tensor, Tensor] = {}
        self.began = began

    @contextmanager
    def _in_the_model(self) -> Iterator[None]:
        """The model has the weights and buffers of the rival while the context is active."""
        buffers = list(self.model.buffers())
        if [b.shape for b in buffers] != [b.shape for b in self.buffers]:
            raise WhiteningError("the buffers of the model have changed")
        self._exchange(buffers)
        try:
            yield
        finally:
            self._exchange(buffers)

    def _exchange(self, buffers: list[Tensor]) -> None:
        for p in self.values:
            p.data, self.values[p] = self.values[p], p.data
        for i, buffer in enumerate(buffers):
            buffer.data, self.buffers[i] = self.buffers[i], buffer.data

    def note_leader(self) -> None:
        """Note the leader's weights after a step, to see whether somebody changes them before the next."""
        self.norms = {p: p.norm() for p in self.values}

    def is_undisturbed(self) -> bool:
        """Whether the leader's weights are those after its last step, and all of them are trained."""
        return all(p.requires_grad and bool(p.norm() == norm) for p, norm in self.norms.items())

    def follow(self, leaders: Layers, t: int) -> None:
        """Factor the moments of the leader's sides that were refreshed at step t, or that have no factor yet."""
        for name in self.layers.keys() - leaders.keys():
            del self.layers[name]
        for name, leader in leaders.items():
            layer = self.layers.setdefault(name, _like(leader))
            for side, example in zip(layer.sides, leader.sides, strict=True):
                side.moments = example.moments
                if side.moments is not None and (side.factor is None or example.refreshed_at == t):
                    layer.take(side, side.moments, self.rule.damping(layer, side))

    def run(self, gradients: Gradients, seed: int) -> Gradients:
        """The gradients of the rival on the leader's batches, with its own outputs and losses."""
        batches = []
        sums = {p: torch.zeros_like(p) for p in gradients.values}  # all that a process without a batch has
        for p in gradients.values:
            if p not in self.values:  # its first gradient: until now it was the leader's
                self.values[p] = p.detach().clone()
        with self._in_the_model():
            for i, batch in enumerate(gradients.batches):
                ran, values = self._trained_on(batch, list(gradients.values), mixed(seed, -2 - i))
                batches.append(ran)
                torch._foreach_add_(list(sums.values()), list(values))
        return replace(gradients, values=sums, states=self.states, batches=batches, factor=1.0, noted=False)

    def _trained_on(self, batch: Batch, parameters: list[Tensor], seed: int) -> tuple[Batch, Sequence[Tensor]]:
        """A batch with the rival's output and loss, and the gradients of that."""
        head = self.rule.loss_model.head
        targets = cast(Targets, batch.targets)
        x = rows_of(batch.x, WHOLE, parameters[0].dtype)
        with torch.enable_grad(), run_alone(self.model, x, seed, errors=True, head=head) as (returned, _):
            output = laid_out(returned, batch.class_dim)
            loss = targets.value(output)
            values = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            buffers = [buffer.clone() for buffer in self.model.buffers()]
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            if self.differences:  # at first they are those that the leader's pass on this batch has left
                buffer.copy_(value)
        return replace(batch, output=output.detach(), targets=replace(targets, total=float(loss))), values

    def step_(self, gradients: Gradients) -> None:
        """Make a step with the rival's own gradients."""
        with self._in_the_model():
            if not self.rule.undo_if_blown_up_(gradients):
                self.rule.step_(gradients, self.layers)

    def hand_over(self, states: States, leaders: Layers) -> None:
        """Give the model the rival's weights, the optimizer its states, and the layers its factors."""
        for p, value in self.values.items():
            p.copy_(value)
            states[p] = self.states[p]
        for buffer, value in zip(self.model.buffers(), self.buffers, strict=True):
            buffer.copy_(value)
        for name, leader in leaders.items():
            layer = self.layers[name]
            leader.c = layer.c
            for side, example in zip(leader.sides, layer.sides, strict=True):
                side.factor = example.factor
                side.units = example.units
                side.backoff = example.backoff

    def verdict(self) -> tuple[float, float]:
        """The mean difference of the losses in the last part of the race, and its standard error."""
        count = math.ceil(SETTINGS.part * len(self.differences))
        compared = torch.tensor(self.differences[-count:], dtype=torch.float64, device="cpu")
        deviation, mean = torch.std_mean(compared)
        return float(mean), float(deviation) / math.sqrt(count)

    def state_dict(self, parameters: list[Tensor]) -> State:
        return {
            "began": self.began,
            "differences": self.differences,
            "examples": list(self.examples),
            "rule": self.rule.state_dict(parameters),
            "values": [self.values.get(p) for p in parameters],
            "buffers": self.buffers,
            "states": [self.states[p] for p in parameters],
            "layers": {name: layer.state_dict() for name, layer in self.layers.items()},
        }

    def load_state_dict(self, state: State, parameters: list[Tensor], leaders: Layers) -> None:
        self.differences = state["differences"]
        self.examples = set(state["examples"])
        self.rule.load_state_dict(state["rule"], parameters)
        for p, value, of_parameter in zip(parameters, state["values"], state["states"], strict=True):
            if value is not None:
                self.values[p] = value.to(p)
            self.states[p] = of_parameter
        for buffer, value in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(value)
        for name, of_layer in state["layers"].items():
            self.layers[name] = _like(leaders[name])
            self.layers[name].load_state_dict(of_layer)


def _numbers(batch: Batch) -> list[int]:
    """Return a number for each example of a batch, from the bits of its inputs and targets; none if it has no rows.

    >>> def numbers(x): return _numbers(Batch(x=torch.tensor(x)))
    >>> numbers([[1.0, 2.0], [2.0, 1.0]])[0] == numbers([[1.0, 2.0]])[0]
    True
    """
    count = examples(batch.x)
    total = torch.zeros(count, dtype=torch.int64)
    terms = () if batch.targets is None else batch.targets.terms
    leaves = [x for x in tree_leaves([batch.x, [term.y for term in terms]]) if isinstance(x, Tensor)]
    of_examples = [x for x in leaves if x.layout is torch.strided and x.shape[:1] == (count,)]
    for place, leaf in enumerate(of_examples):
        rows = leaf.detach().to("cpu").reshape(count, -1).contiguous().view(torch.uint8)
        bits = rows[:, :: rows.shape[1] // SETTINGS.most | 1].to(torch.int64)
        factors = torch.randint(-(2**62), 2**62, bits.shape[1:], generator=torch.Generator("cpu").manual_seed(place))
        total += (bits * factors).sum(dim=1)
    return total.tolist() if of_examples else []


def _like(layer: Layer) -> Layer:
    """A layer of the same weight, without moments and factors."""
    return Layer(layer.linear, layer.forward.solver, backward=layer.backward in layer.sides)


class Race:
    """The races of a run: when they are held, and what they decide.

    next:     the step from which on a race is held or may begin; infinite after the last one
    rival:    None: there is no race at this step
    history:  what was tried and chosen, for the report
    """

    def __init__(self, setup: Setup) -> None:
        self.next: float = SETTINGS.starts[0]
        self.rival: Rival | None = None
        self.history: list[str] = []
        self._setup = setup
        self._is_won = False  # whether the rival has won one

    @classmethod
    def of(cls, setup: Setup) -> Race | None:
        """None: the model is too large for a second copy, or divided among processes."""
        size = sum(p.numel() for p in setup.model.parameters())
        return None if setup.ranks.sharded or size > SETTINGS.largest else cls(setup)

    def check_group(self, group: Group) -> None:
        """Raises ValueError for a momentum: natural steps choose theirs, and spectral ones have their default."""
        NaturalDirections.of(self._setup).check_group(group)
        group[CHOSEN_MOMENTUM] = 0.0

    def winner(self, leader: StepRule, gradients: Gradients, layers: Layers) -> Automatic | None:
        """Let the rival make this step, before the leader does; return its rule if it has won, else None."""
        rival = self.rival
        if rival is None:
            leader = cast(Automatic, leader)
            leader.relative_rates(gradients)
            if leader.rule.multiplier < SETTINGS.full:
                return None
            rival = self.rival = Rival(Automatic(self._setup, SpectralDirections), gradients.t)
        try:
            if not rival.is_undisturbed():
                raise WhiteningError("weights were changed between two steps, or are no longer trained")
            rival.follow(layers, gradients.t)
            repeats = self._compare(gradients, rival)
        except Exception as reason:  # whatever a model raises when it is run again; nothing of it was changed
            self._end(f"no race: {reason}".partition("\n")[0], is_last=True)
            return None
        self._decide(rival, repeats)
        if not self._is_won:
            return None
        rival.hand_over(gradients.states, layers)
        return rival.rule

    def _decide(self, rival: Rival, repeats: bool) -> None:
        """End the race if its losses say enough, or if it has lasted long enough; repeats: examples come again."""
        steps = len(rival.differences)
        looks = SETTINGS.looks
        if repeats and steps < min(looks):
            self._end(f"no race: examples come again after {steps} steps; natural steps go on", is_last=True)
            return
        if steps and math.isnan(rival.differences[-1]):
            self._end(f"after {steps} steps the loss is not finite: natural steps go on")
            return
        is_over = repeats or steps == SETTINGS.length
        if not (is_over or steps in looks):
            return
        mean, error = rival.verdict()
        if not is_over and -mean < max(SETTINGS.plain, looks[steps] * error):
            return
        certainty = SETTINGS.certainty if self.history else 0.0
        if repeats:
            certainty = next(errors for look, errors in reversed([*looks.items()]) if look <= steps)
        self._is_won = mean < -error * certainty
        going_on = "spectral" if self._is_won else "natural"
        result = f"after {steps} steps the loss with spectral steps differs by {mean:+.0%} (± {error:.0%})"
        self._end(f"{result}: {going_on} steps go on", self._is_won)

    def _compare(self, gradients: Gradients, rival: Rival) -> bool:
        """Let the rival make a step; note its loss minus the leader's on these batches, relative to the larger one.

        Return whether the race is over instead, because examples come again: whoever remembers them best would win on,
        and a classifier that remembers a few examples is too sure of others.
        """
        ranks = self._setup.ranks
        if any(p._backward_hooks for p in gradients.values):
            raise WhiteningError("hooks on parameters would be called for both kinds of steps")
        with ranks.exchange(7) as rows:
            of_rival = rival.run(gradients, gradients.seed)
            numbers = []
            if len(rival.examples) < SETTINGS.enough:  # more are not few
                numbers = [number for batch in gradients.batches for number in _numbers(batch)][: SETTINGS.enough]
            repeated = sum(number in rival.examples for number in numbers)
            rival.examples.update(numbers)
            losses = [*totals(gradients.batches), *totals(of_rival.batches)]
            rows.append([*losses, repeated, len(numbers), len(rival.examples)])
        total, scale, rivals_total, rivals_scale, again, count, known = map(math.fsum, zip(*rows, strict=True))
        if not (scale and rivals_scale and math.isfinite(total)):  # no target counts
            return False
        self._average_(of_rival)
        if not rival.differences and not self._is_explained(gradients, of_rival, rival):
            raise WhiteningError("the gradients are not those of the declared loss alone")
        rival.step_(of_rival)
        loss = total / scale
        rivals_loss = rivals_total / rivals_scale
        is_again = again > SETTINGS.repeated * count and known < SETTINGS.enough
        if is_again and not isinstance(self._setup.loss.likelihood, Gaussian):
            return True
        rival.differences.append((rivals_loss - loss) / max(abs(rivals_loss), abs(loss), 1e-300))
        return False

    def _average_(self, gradients: Gradients) -> None:
        """Average gradients over all processes, as they do those of the user's own pass."""
        ranks = self._setup.ranks
        for value in gradients.values.values() if ranks.size > 1 else ():
            value.copy_(ranks.sum_(value) / ranks.size)

    def _is_explained(self, gradients: Gradients, of_rival: Gradients, rival: Rival) -> bool:
        """Whether the gradients of the user's pass are those of the declared loss, as far as dropout lets it be told.

        The rival still has the weights of the leader. Further terms of a loss are not seen, so it cannot be trained by
        them.
        """
        angle = _sine(gradients.values, of_rival.values)
        if angle < SETTINGS.alike:
            return True
        again = rival.run(gradients, mixed(gradients.seed, -1))
        self._average_(again)
        return angle < 1.5 * _sine(again.values, of_rival.values)

    def _end(self, message: str, is_last: bool = False) -> None:
        """End this race, and say in one line what came of it."""
        began = cast(Rival, self.rival).began
        later = [start for start in SETTINGS.starts if start > began and not is_last]
        self.next = min(later, default=math.inf)
        self.rival = None
        self.history.append(message)
        logger.info("step %d: %s", began, message)

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, parameters: list[Tensor]) -> State:
        """The rival is a part of it while there is a race."""
        rival = None if self.rival is None else self.rival.state_dict(parameters)
        return {"next": self.next, "is_won": self._is_won, "history": self.history, "rival": rival}

    def load_state_dict(self, state: State, parameters: list[Tensor], layers: Layers) -> Automatic:
        """Restore what `state_dict` returned; return a new rule for the leader."""
        state = copy.deepcopy(state)
        if state["rival"] is not None and len(state["rival"]["values"]) != len(parameters):
            raise ValueError("the state is that of another model: it has another number of parameters")
        self.next = state["next"]
        self.history = state["history"]
        self._is_won = state["is_won"]
        self.rival = None
        if state["rival"] is not None:
            self.rival = Rival(Automatic(self._setup, SpectralDirections), state["rival"]["began"])
            self.rival.load_state_dict(state["rival"], parameters, layers)
        return Automatic(self._setup, SpectralDirections if self._is_won else NaturalDirections)


def _sine(a: Direction, b: Direction) -> float:
    """The sine of the angle between two directions."""
    cosine = dot(a, b) / max(math.sqrt(dot(a, a) * dot(b, b)), 1e-300)
    return math.sqrt(max(0.0, 1 - cosine**2))
