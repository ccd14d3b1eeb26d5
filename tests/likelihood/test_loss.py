"""What a user may declare as the loss, what is refused, and that the options of a loss are read when they are used."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bprong.likelihood.declared import ACCEPTED, KINDS, declared_loss
from bprong.likelihood.families import Bernoulli, Categorical, Gaussian, Likelihood
from bprong.likelihood.loss import LossCall, loss_of_call

f = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [0.0, 3.0, 1.0], [-2.0, 0.5, 0.75]], dtype=torch.float64)
LABELS = torch.tensor([2, 0, 0, 1])
BITS = F.one_hot(LABELS, 3).double()
WEIGHT = torch.tensor([0.5, 1.0, 3.0])

MODULES = {
    nn.CrossEntropyLoss: (F.cross_entropy, ("cross_entropy",), Categorical, LABELS),
    nn.NLLLoss: (F.nll_loss, ("nll", "nll_loss"), Categorical, LABELS),
    nn.BCEWithLogitsLoss: (
        F.binary_cross_entropy_with_logits,
        ("bce_with_logits", "binary_cross_entropy_with_logits"),
        Bernoulli,
        BITS,
    ),
    nn.MSELoss: (F.mse_loss, ("mse", "mse_loss"), Gaussian, BITS),
}
WORDS = {"categorical": (Categorical, LABELS), "bernoulli": (Bernoulli, BITS), "gaussian": (Gaussian, BITS)}


ONE = torch.ones((), dtype=torch.float64)


def value(loss, f, y):
    """The loss as the user computes it."""
    return loss.multiple(y, ONE.to(f)) * loss.mean(f, y)


# What is accepted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_a_module_its_function_and_its_names_are_one_loss(module):
    function, names, family, y = MODULES[module]
    for given in (module(), function, functools.partial(function), *names):
        loss = declared_loss(given)
        assert type(loss.likelihood) is family
        assert value(loss, f, y) == function(f, y)
        assert not loss.sums
        assert loss.functions == {function.__name__}


OPTIONS = [
    (nn.CrossEntropyLoss, {"reduction": "sum"}),
    (nn.CrossEntropyLoss, {"weight": WEIGHT, "ignore_index": 0, "label_smoothing": 0.25}),
    (nn.CrossEntropyLoss, {"label_smoothing": 0.1, "reduction": "sum"}),
    (nn.NLLLoss, {"weight": WEIGHT, "reduction": "sum", "ignore_index": 1}),
    (nn.BCEWithLogitsLoss, {"pos_weight": WEIGHT}),
    (nn.BCEWithLogitsLoss, {"weight": WEIGHT, "reduction": "sum"}),
    (nn.MSELoss, {"reduction": "sum"}),
]


@pytest.mark.parametrize(("module", "options"), OPTIONS)
def test_options_of_a_module_and_of_a_partial_function_are_those_of_the_loss(module, options):
    function, _, _, y = MODULES[module]
    in_float64 = {name: o.double() if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    for given in (module(**options), functools.partial(function, **options)):
        loss = declared_loss(given)
        assert value(loss, f, y).item() == pytest.approx(function(f, y, **in_float64).item(), rel=1e-15)
        assert loss.sums == (options.get("reduction") == "sum")
        if "ignore_index" in options:
            assert loss.likelihood.ignore_index == options["ignore_index"]


@pytest.mark.parametrize("word", WORDS)
def test_the_papers_words_are_the_mean_nll_of_a_target(word):
    family, y = WORDS[word]
    loss = declared_loss(word)
    assert type(loss.likelihood) is family
    assert value(loss, f, y) == family().nll(f, y).mean()
    assert float(loss.multiple(y, ONE)) == 1
    assert loss.functions == {function.__name__ for function, _, kind, _ in MODULES.values() if kind is family}


class Poisson(Likelihood):
    def nll(self, output, y):
        return (output.exp() - y * output).sum(-1)

    def sample(self, output):
        return torch.poisson(output.exp())


def test_a_users_own_likelihood_is_the_mean_nll_of_a_target():
    own = Poisson()
    loss = declared_loss(own)
    assert loss.likelihood is own
    assert loss.name == "Poisson"
    assert not loss.functions
    assert value(loss, f, BITS) == pytest.approx(float(own.nll(f, BITS).mean()))


def test_the_name_is_the_one_that_the_user_knows():
    for given, name in (
        (nn.CrossEntropyLoss(), "nn.CrossEntropyLoss"),
        (F.mse_loss, "F.mse_loss"),
        (functools.partial(F.mse_loss, reduction="sum"), "F.mse_loss"),
        ("bce_with_logits", '"bce_with_logits"'),
        ("categorical", '"categorical"'),
    ):
        assert declared_loss(given).name == name


class Renamed(nn.CrossEntropyLoss):
    """A subclass that computes what its parent computes."""


def test_a_subclass_that_computes_the_same_is_accepted():
    assert value(declared_loss(Renamed(reduction="sum")), f, LABELS) == F.cross_entropy(f, LABELS, reduction="sum")


def test_a_loss_of_a_sequence_is_that_of_its_positions():
    sequence = f.reshape(2, 2, 3)
    y = LABELS.reshape(2, 2)
    assert value(declared_loss("cross_entropy"), sequence, y) == F.cross_entropy(f, LABELS)
    assert value(declared_loss(nn.NLLLoss(reduction="sum")), sequence, y) == F.nll_loss(f, LABELS, reduction="sum")


@pytest.mark.parametrize("module", MODULES)
def test_values_of_each_element_are_taken_for_a_mean(module):
    """With reduction="none" the user reduces them; the call of the loss shows how."""
    function, _, _, y = MODULES[module]
    loss = declared_loss(module(reduction="none"))
    assert value(loss, f, y) == function(f, y)
    assert not loss.sums


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
@pytest.mark.parametrize(
    "given", [nn.CrossEntropyLoss(weight=WEIGHT), F.mse_loss, functools.partial(F.nll_loss, reduction="sum"), "mse"]
)
def test_a_copy_is_the_same_loss(given, clone):
    loss = declared_loss(given)
    y = BITS if isinstance(loss.likelihood, Gaussian) else LABELS
    assert value(clone(loss), f, y) == value(loss, f, y)


# Multiples of −log p --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("module", MODULES)
def test_the_loss_is_a_multiple_of_the_mean_nll(module, reduction):
    """The sum over targets is that many times their mean; a mean over elements is divided by those of a target."""
    _, _, family, y = MODULES[module]
    loss = declared_loss(module(reduction=reduction))
    log_p = f.log_softmax(-1) if module is nn.NLLLoss else f
    expected = float(loss.multiple(y, ONE)) * family().nll(log_p, y).mean()
    assert value(loss, log_p, y) == pytest.approx(float(expected))


def test_the_sum_with_class_weights_is_a_multiple_of_the_weighted_mean():
    loss = declared_loss(nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"))
    weighted_mean = F.cross_entropy(f, LABELS, weight=WEIGHT.double())
    assert value(loss, f, LABELS) == pytest.approx(float(loss.multiple(LABELS, ONE) * weighted_mean))


# Options are read when they are used ----------------------------------------------------------------------------------


def test_weights_that_are_changed_after_the_declaration_count():
    criterion = nn.CrossEntropyLoss(weight=WEIGHT)
    loss = declared_loss(criterion)
    before = value(loss, f, LABELS)
    criterion.weight.mul_(torch.tensor([4.0, 1.0, 1.0]))
    assert value(loss, f, LABELS) != before
    assert value(loss, f, LABELS) == F.cross_entropy(f, LABELS, weight=criterion.weight.double())
    criterion.weight = None
    assert value(loss, f, LABELS) == F.cross_entropy(f, LABELS)


def test_other_options_that_are_changed_after_the_declaration_count():
    criterion = nn.CrossEntropyLoss()
    loss = declared_loss(criterion)
    criterion.reduction = "sum"
    assert loss.sums
    assert value(loss, f, LABELS) == F.cross_entropy(f, LABELS, reduction="sum")
    criterion.label_smoothing = 0.3
    assert value(loss, f, LABELS) == F.cross_entropy(f, LABELS, reduction="sum", label_smoothing=0.3)


def test_weights_follow_the_dtype_and_the_device_of_the_output():
    loss = declared_loss(nn.CrossEntropyLoss(weight=WEIGHT.double()))
    assert value(loss, f.float(), LABELS).dtype is torch.float32
    assert value(declared_loss(functools.partial(F.cross_entropy, weight=WEIGHT)), f, LABELS).dtype is torch.float64
    assert value(declared_loss("bce_with_logits"), f, BITS.float()).dtype is torch.float64


# What is refused ------------------------------------------------------------------------------------------------------


class Focal(nn.CrossEntropyLoss):
    """A loss of its own behind the name of a known one."""

    def forward(self, input, target):
        p = input.softmax(-1).gather(1, target[:, None])
        return (-(1 - p) * p.log()).mean()


def own_loss(output, y):
    return (output - y).abs().mean()


REFUSED = {
    "Huber": (nn.HuberLoss(), TypeError, "HuberLoss"),
    "smooth L1": (F.smooth_l1_loss, TypeError, "smooth_l1_loss"),
    "CTC": (nn.CTCLoss(), TypeError, "CTCLoss"),
    "a lambda": (lambda output, y: output.sum(), TypeError, "<lambda>"),
    "a function": (own_loss, TypeError, "own_loss"),
    "BCELoss": (nn.BCELoss(), TypeError, "BCELoss"),
    "binary_cross_entropy": (F.binary_cross_entropy, TypeError, "binary_cross_entropy"),
    "a learning rate": (0.01, TypeError, "0.01"),
    "True": (True, TypeError, "True"),
    "the value of a loss": (torch.tensor(0.3), TypeError, "Tensor"),
    "a class of modules": (nn.CrossEntropyLoss, TypeError, "CrossEntropyLoss"),
    "a class of likelihoods": (Poisson, TypeError, "Poisson"),
    "a subclass with a forward of its own": (Focal(), TypeError, "Focal"),
    "an unknown name": ("softmax", ValueError, "'softmax'"),
    "the name of a module": ("CrossEntropyLoss", ValueError, "'CrossEntropyLoss'"),
    "auto": ("auto", ValueError, "'auto'"),
    "a partial with positional arguments": (functools.partial(F.cross_entropy, f), TypeError, "partial"),
    "a partial with unknown options": (functools.partial(F.cross_entropy, size_average=True), TypeError, "partial"),
    "a partial of another function": (functools.partial(F.huber_loss, delta=0.5), TypeError, "partial"),
    "a model": (nn.Linear(2, 2), TypeError, "Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_with_what_can(name):
    given, error, shown = REFUSED[name]
    with pytest.raises(error) as caught:
        declared_loss(given)
    message = str(caught.value)
    assert message.startswith(f"loss cannot be {shown}.")
    assert ACCEPTED in message
    assert "bprong.Likelihood" in message
    assert "nll(output, y)" in message
    assert "sample(output)" in message
    assert "bprong.PRONG(model, lr=0.01)" in message


@pytest.mark.parametrize("given", ["softmax", nn.HuberLoss()])
def test_the_list_names_everything_that_is_accepted(given):
    with pytest.raises((TypeError, ValueError)) as caught:
        declared_loss(given)
    names = ["nll", "cross_entropy", "bce_with_logits", "mse", *WORDS]
    for accepted in [f"nn.{module.__name__}" for module in MODULES] + [f'"{name}"' for name in names]:
        assert accepted in str(caught.value)
        if accepted.startswith('"'):
            declared_loss(accepted.strip('"'))


@pytest.mark.parametrize("given", [nn.BCELoss(), F.binary_cross_entropy])
def test_a_binary_cross_entropy_of_probabilities_is_refused_with_the_way_to_logits(given):
    with pytest.raises(TypeError, match=r"Remove the sigmoid at the end of the model and use nn\.BCEWithLogitsLoss"):
        declared_loss(given)
    with pytest.raises(TypeError) as caught:
        declared_loss(nn.HuberLoss())
    assert "sigmoid" not in str(caught.value)


def test_without_a_loss_nothing_can_be_computed():
    loss = declared_loss(None)
    assert not loss.functions
    for method in (loss.likelihood.nll, lambda *_: loss.likelihood.sample(f)):
        with pytest.raises(TypeError, match="no loss was declared"):
            method(f, LABELS)


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "options"), [*OPTIONS, *((module, {}) for module in MODULES)])
def test_the_loss_of_a_call_has_the_options_of_the_call(module, options):
    function, _, family, y = MODULES[module]
    likelihood = family()
    in_float64 = {name: o.double() if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    (kind,) = (kind for kind in KINDS.values() if kind.function is function)
    loss = loss_of_call(likelihood, LossCall(kind, f, y, options, torch.zeros(())), f)
    assert type(loss.likelihood) is family
    assert likelihood.ignore_index == family().ignore_index  # calls may differ in it
    assert value(loss, f, y) == function(f, y, **in_float64)
    assert loss.sums == (options.get("reduction") == "sum")
