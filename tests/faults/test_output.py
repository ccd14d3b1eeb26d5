"""The output that the loss is of: changed in place, log-probabilities, −inf, one number, one of several outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from bprong.errors import WhiteningWarning
from helpers import assert_close, assert_unchanged, classification, mlp, quick_cases, snapshot
from paths import Rate, path, seeded
from training import EXACT

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
X, Y = classification(60, 5, 3)


# 4. Changed in place before the loss ----------------------------------------------------------------------------------

PRIOR = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "mul_(100)": (lambda out: out.mul_(100), lambda out: out * 100),
    "div_(temperature)": (lambda out: out.div_(2.0), lambda out: out / 2.0),
    "logit adjustment": (lambda out: out.add_(PRIOR), lambda out: out + PRIOR),
    "column assigned": (
        lambda out: out[:, 0].fill_(0.0),
        lambda out: torch.cat([torch.zeros_like(out[:, :1]), out[:, 1:]], dim=1),
    ),
    "log_softmax copied": (lambda out: out.copy_(out.log_softmax(-1)), lambda out: out.log_softmax(-1)),
}


def in_place(model: nn.Module, way: str) -> None:
    output = model(X)
    IN_PLACE[way][0](output)
    F.cross_entropy(output, Y).backward()


def copied(model: nn.Module, way: str) -> None:
    F.cross_entropy(IN_PLACE[way][1](model(X)), Y).backward()


@pytest.mark.parametrize("way", IN_PLACE)
def test_an_output_changed_in_place_is_as_one_changed_by_a_copy(way: str) -> None:
    ends = []
    for change in (copied, in_place):
        with pytest.warns(WhiteningWarning, match="was not called with the output of the model") as said:
            ends.append(path(seeded(lambda: mlp(5, 4, 3)), "cross_entropy", 0.1, partial(change, way=way)))
        assert len(said) == 1
    assert_unchanged(*ends)


@pytest.mark.parametrize("change", [copied, in_place])
@pytest.mark.parametrize("way", IN_PLACE)
def test_an_output_that_was_changed_is_refused_without_a_learning_rate(
    way: str, change: Callable[[nn.Module, str], None]
) -> None:
    """Its targets belong to something else than what the model returned."""
    with pytest.raises(RuntimeError, match="was not called with the output of the model"):
        path(seeded(lambda: mlp(5, 4, 3)), "cross_entropy", "auto", partial(change, way=way))


def test_training_on_a_scaled_output_lowers_the_loss() -> None:
    """The loss is 100 f's cross-entropy, whatever the optimizer believes about f."""
    model = seeded(lambda: mlp(5, 8, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WhiteningWarning)
        for _ in range(40):
            optimizer.zero_grad()
            output = model(X)
            output.mul_(100)
            loss = F.cross_entropy(output, Y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


# 10. Log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["nll", nn.NLLLoss(), F.nll_loss, nn.NLLLoss(reduction="sum")])
@pytest.mark.parametrize("confident", quick_cases([1.0, 40.0, 1000.0], 40.0))
@RATES
def test_log_softmax_with_nll_loss_is_cross_entropy(lr: Rate, loss: Any, confident: float) -> None:
    """The same path as without LogSoftmax, also where the model is so confident that probabilities are 0 or 1."""
    reduction = loss.reduction if isinstance(loss, nn.Module) else "mean"

    def network(log_probabilities: bool) -> nn.Module:
        model = seeded(lambda: mlp(5, 4, 3))
        with torch.no_grad():
            model[2].weight *= confident
        return model.append(nn.LogSoftmax(-1)) if log_probabilities else model

    def nll(model: nn.Module) -> None:
        criterion = loss if callable(loss) else F.nll_loss
        criterion(model(X), Y).backward()

    def cross_entropy(model: nn.Module) -> None:
        criterion(model(X), Y).backward()

    criterion = nn.CrossEntropyLoss(reduction=reduction)
    expected = path(network(False), criterion, lr, cross_entropy)
    ours = path(network(True), loss, lr, nll)
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-6, name)


def test_a_trained_classifier_with_log_softmax_goes_on_without_an_error() -> None:
    """Until all examples are predicted with certainty, and their gradients are zero."""
    model = seeded(lambda: nn.Sequential(mlp(5, 16, 3), nn.LogSoftmax(-1)))
    optimizer = bprong.BPRONG(model, "nll", lr="auto")
    for t in range(40):
        optimizer.zero_grad()
        if t == 20:
            with torch.no_grad():
                model[0][2].weight *= 1e4
                model[0][2].bias *= 1e4
        loss = F.nll_loss(model(X), Y)
        loss.backward()
        optimizer.step()
    assert math.isfinite(float(loss.detach()))


# 12. −inf in masked logits --------------------------------------------------------------------------------------------

MASK = torch.zeros(60, 4, dtype=torch.bool)
MASK[torch.arange(60), (Y + 1) % 4] = True  # one forbidden class for each example, never its label


class Masked(nn.Module):
    """Forbidden classes, as forbidden actions of a policy, have logits of −inf or of a very negative number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.body = mlp(5, 4, 4)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).masked_fill(MASK[: len(x)], self.value)


@RATES
@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_logits_of_minus_infinity_are_as_very_negative_ones(lr: Rate, fisher: str) -> None:
    """exp(−10⁴) is zero in float64, so that nothing else may change."""
    options = {"fisher": fisher, "average": 0.0, "seed": 0}

    def backward(model: nn.Module) -> None:
        F.cross_entropy(model(X), Y).backward()

    expected = path(seeded(lambda: Masked(-1e4)), "cross_entropy", lr, backward, options=options)
    ours = path(seeded(lambda: Masked(-math.inf)), "cross_entropy", lr, backward, options=options)
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-9, name)


@RATES
def test_a_class_that_is_masked_in_all_examples_is_as_one_that_is_not_there(lr: Rate) -> None:
    """Its weights get no gradient and do not move."""
    model = seeded(lambda: mlp(5, 4, 4))
    mask = torch.tensor([0, 0, 0, 1], dtype=torch.bool)
    model.append(MaskedColumns(mask))
    before = snapshot(model)
    after = path(model, "cross_entropy", lr, lambda model: F.cross_entropy(model(X), Y).backward())
    assert all(value.isfinite().all() for value in after.values())
    assert_close(after["2.weight"][3], before["2.weight"][3], 1e-12)


class MaskedColumns(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(self.mask, -math.inf)


# 14. PRONG with a single output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", quick_cases([bprong.PRONG, bprong.BPRONG], bprong.BPRONG))
@pytest.mark.parametrize("loss", ["mse", "bce_with_logits", nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("shape", [(60, 1), (60,)])
@RATES
def test_a_model_with_one_output_trains(lr: Rate, kind: type, loss: Any, shape: tuple[int, ...]) -> None:
    """One column, or one number for each example."""
    model = seeded(lambda: nn.Sequential(mlp(5, 6, 1), nn.Identity() if len(shape) == 2 else Row()))
    optimizer = kind(model, loss, lr=lr)
    y = (Y == 0).double().view(shape)
    squared = loss == "mse" or isinstance(loss, nn.MSELoss)
    criterion = loss if isinstance(loss, nn.Module) else F.mse_loss if squared else F.binary_cross_entropy_with_logits
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = criterion(model(X), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]


class Row(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)


@pytest.mark.parametrize("rows", [1, 2])
def test_prong_trains_one_output_on_very_few_examples(rows: int) -> None:
    model = seeded(lambda: nn.Linear(5, 1))
    optimizer = bprong.PRONG(model, "mse", lr="auto")
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(X[:rows]), torch.ones(rows, 1, dtype=torch.float64)).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


# 20. Which of several outputs -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: Tensor
    prediction: Tensor


@dataclass
class Fields:
    hidden: Tensor
    prediction: Tensor


class Several(nn.Module):
    """Returns its hidden state beside its prediction, packed in some way; None: the prediction alone."""

    def __init__(self, packed: Callable[[Tensor, Tensor], Any] | None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)
        self.packed = packed

    def forward(self, x: Tensor) -> Any:
        z = self.first(x).tanh()
        a = self.last(z)
        return a if self.packed is None else self.packed(z, a)


PACKED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any, Callable[[Any], Tensor]]] = {  # packed, output, by hand
    "key": (lambda z, a: {"hidden": z, "prediction": a}, "prediction", lambda out: out["prediction"]),
    "number as key": (lambda z, a: {0: z, 7: a}, 7, lambda out: out[7]),
    "index of a tuple": (lambda z, a: (z, a), 1, lambda out: out[1]),
    "index from the end": (lambda z, a: (z, a), -1, lambda out: out[-1]),
    "index of a list": (lambda z, a: [z, a], 1, lambda out: out[1]),
    "index of a named tuple": (Pair, 1, lambda out: out.prediction),
    "name in a named tuple": (Pair, "prediction", lambda out: out.prediction),
    "name in a dataclass": (Fields, "prediction", lambda out: out.prediction),
    "not called logits": (
        lambda z, a: {"logits": z, "prediction": a}, "prediction", lambda out: out["prediction"]
    ),
}  # fmt: skip


@RATES
@pytest.mark.parametrize("way", PACKED)
def test_a_named_output_is_as_the_only_one(lr: Rate, way: str) -> None:
    packed, output, chosen = PACKED[way]
    criterion = nn.CrossEntropyLoss()
    expected = path(seeded(lambda: Several(None)), criterion, lr, lambda model: criterion(model(X), Y).backward())
    ours = path(
        seeded(lambda: Several(packed)), criterion, lr, lambda model: criterion(chosen(model(X)), Y).backward(),
        options=EXACT | {"output": output},
    )  # fmt: skip
    assert_unchanged(expected, ours)


def test_prong_takes_an_output_too() -> None:
    packed, output, chosen = PACKED["key"]
    expected = path(
        seeded(lambda: Several(None)), "cross_entropy", "auto",
        lambda model: F.cross_entropy(model(X), Y).backward(), bprong.PRONG, options=None,
    )  # fmt: skip
    ours = path(
        seeded(lambda: Several(packed)), "cross_entropy", "auto",
        lambda model: F.cross_entropy(chosen(model(X)), Y).backward(), bprong.PRONG, options={"output": output},
    )  # fmt: skip
    assert_unchanged(expected, ours)


class Answers(nn.Module):
    """Question answering: where in a sequence an answer starts and where it ends, and the loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, y: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        start, end = self.head(self.body(x).tanh()).unbind(-1)
        returned = {"start_logits": start, "end_logits": end}
        if y is not None:
            returned["loss"] = (F.cross_entropy(start, y[0]) + F.cross_entropy(end, y[1])) / 2
        return returned


class Stacked(nn.Module):
    """A wrapper that returns both outputs as one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Answers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        returned = self.model(x)
        return {"logits": torch.stack((returned["start_logits"], returned["end_logits"]), 1)}


SEQUENCES = torch.stack([X, X.flip(0), -X], dim=1)  # (batch, time, features)


def test_two_outputs_of_losses_inside_the_model_are_refused() -> None:
    """One of them would be a part of the loss only."""
    with pytest.raises(TypeError, match=r"losses of 2 tensors of one size.*torch\.stack"):
        path(seeded(Answers), "cross_entropy", 0.1, lambda model: model(SEQUENCES, (Y, Y.flip(0)))["loss"].backward())


@RATES
def test_a_wrapper_returns_two_outputs_as_one(lr: Rate) -> None:
    criterion = nn.CrossEntropyLoss()
    model = seeded(Stacked)
    optimizer = bprong.BPRONG(model, criterion, lr=lr)
    y = torch.stack([Y, Y.flip(0)], dim=1)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = criterion(model(SEQUENCES)["logits"].flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@RATES
def test_a_mapping_without_logits_asks_for_the_name_of_the_output(lr: Rate) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match="'output'"):
        path(
            seeded(lambda: Several(lambda z, a: {"hidden": z, "other": a})), "categorical", lr,
            lambda model: (-model(X)["other"].log_softmax(-1)[torch.arange(60), Y].mean()).backward(),
        )  # fmt: skip


@pytest.mark.parametrize("output", ["absent", 5, "no tensor"])
def test_an_output_that_is_not_there_is_an_error_that_names_the_argument(output: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match="'output'"):
        path(
            seeded(lambda: Several(lambda z, a: {"hidden": z, "other": a, "no tensor": "a"})), "cross_entropy", 0.1,
            lambda model: F.cross_entropy(model(X)["other"], Y).backward(), options=EXACT | {"output": output},
        )  # fmt: skip


@pytest.mark.parametrize("output", [1.5, lambda returned: returned])
def test_an_output_of_another_kind_is_refused_when_the_optimizer_is_made(output: Any) -> None:
    with pytest.raises(TypeError, match=r"output must be a key.*(1\.5|lambda)"):
        bprong.BPRONG(mlp(5, 3), "cross_entropy", lr=0.1, options={"output": output})


@RATES
def test_a_first_output_that_the_loss_is_not_of_is_not_taken_for_it(lr: Rate) -> None:
    """Without a name, the output is found where the loss is computed, or an error asks for its name."""
    expected = path(
        seeded(lambda: Several(None)), "cross_entropy", lr, lambda model: F.cross_entropy(model(X), Y).backward()
    )
    try:
        ours = path(
            seeded(lambda: Several(Pair)), "cross_entropy", lr,
            lambda model: F.cross_entropy(model(X).prediction, Y).backward(),
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeError, bprong.WhiteningWarning) as error:
        assert "'output'" in str(error)  # noqa: PT017  # either of the two will do
    else:
        assert_unchanged(expected, ours)


# Losses computed inside the model


class Loss(nn.Module):
    """Computes its loss itself, and returns it in some way."""

    def __init__(self, packed: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = mlp(5, 4, 3)
        self.packed = packed

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.body(x)
        return self.packed(F.cross_entropy(logits, y), logits)


INSIDE: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "the loss alone": (lambda loss, logits: loss, lambda out: out),
    "loss first": (lambda loss, logits: (loss, logits), lambda out: out[0]),
    "loss last": (lambda loss, logits: (logits, loss), lambda out: out[1]),
    "mapping": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda out: out["loss"]),
    "mapping with the loss alone": (lambda loss, logits: {"loss": loss}, lambda out: out["loss"]),
}


@RATES
@pytest.mark.parametrize("way", INSIDE)
def test_a_loss_computed_inside_the_model_is_as_one_computed_outside(lr: Rate, way: str) -> None:
    packed, chosen = INSIDE[way]
    outside = seeded(lambda: nn.ModuleDict({"body": mlp(5, 4, 3)}))
    expected = path(outside["body"], "cross_entropy", lr, lambda model: F.cross_entropy(model(X), Y).backward())
    ours = path(seeded(lambda: Loss(packed)), "cross_entropy", lr, lambda model: chosen(model(X, Y)).backward())
    for name, value in expected.items():
        assert_close(ours[f"body.{name}"], value, 1e-12, name)


# Weights that are used through views of them --------------------------------------------------------------------------


class Mixer(nn.Module):
    """A depthwise causal convolution as in Mamba, called as a module or given to a function as a view."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(5, 5, 3, groups=5, padding=2)
        self.last = nn.Linear(5, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        w = self.conv1d.weight
        b = self.conv1d.bias
        if self.way == "module":
            z = self.conv1d(x)
        elif self.way == "squeezed view":
            z = F.conv1d(x, w.squeeze(1).unsqueeze(1), b, padding=2, groups=5)
        elif self.way == "torch.conv1d":
            z = torch.conv1d(x, w, b, padding=2, groups=5)
        else:
            z = F.conv1d(x, weight=w, bias=b, padding=2, groups=5)
        return self.last(z[..., : x.shape[-1]].tanh().mean(-1))


@RATES
@pytest.mark.parametrize("way", ["squeezed view", "torch.conv1d", "keywords"])
def test_a_convolution_given_to_a_function_is_as_one_called_as_a_module(lr: Rate, way: str) -> None:
    x = torch.stack([X, X.flip(0), X.roll(7, 0), -X], dim=2)  # (batch, channels, time)

    def backward(model: nn.Module) -> None:
        F.cross_entropy(model(x), Y).backward()

    expected = path(seeded(lambda: Mixer("module")), "cross_entropy", lr, backward)
    ours = path(seeded(lambda: Mixer(way)), "cross_entropy", lr, backward)
    for name, value in expected.items():
        assert_close(ours[name], value, 1e-10, name)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.first.weight.T + self.first.bias).tanh())


def test_a_layer_that_no_statistics_reach_follows_the_fallback_rule() -> None:
    with pytest.warns(bprong.WhiteningWarning, match="layer 'first' follows the fallback rule"):
        path(seeded(ByHand), "cross_entropy", 0.1, lambda model: F.cross_entropy(model(X), Y).backward())
