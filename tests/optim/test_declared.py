"""The declared loss as a user meets it: if its call is seen, nothing is said; if not, an error or one warning."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.errors import WhiteningWarning
from helpers import classification, mlp, quick_cases, snapshot
from training import EXACT, assert_same_path

RATES = [0.01, "auto"]
STEPS = 3  # statistics are measured at the first one and, with lr="auto", at the third
x, LABELS = classification(60, 5, 3)
BITS = F.one_hot(LABELS, 3).double()
NUMBERS = (x @ torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 10).sin()


def network(*end):
    torch.manual_seed(1)
    return nn.Sequential(*mlp(5, 8, 3), *end)


class Problem:
    """A loss of torch with targets for it, and a network that returns what it is computed from."""

    def __init__(self, module, function, name, y, *end):
        self.module = module
        self.function = function
        self.name = name
        self.y = y
        self.end = end

    def declared(self, form):
        """What is declared, and what the user computes the loss with."""
        module = self.module()
        forms = {
            "module": (module, module),
            "function": (self.function, self.function),
            "partial": (functools.partial(self.function, reduction="mean"), self.function),
            "name": (self.name, self.function),
            "another module": (self.module(), module),
        }
        return forms[form]

    def start(self):
        return network(*self.end)


PROBLEMS = {
    "classes": Problem(nn.CrossEntropyLoss, F.cross_entropy, "cross_entropy", LABELS),
    "log-probabilities": Problem(nn.NLLLoss, F.nll_loss, "nll", LABELS, nn.LogSoftmax(-1)),
    "bits": Problem(nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, "bce_with_logits", BITS),
    "numbers": Problem(nn.MSELoss, F.mse_loss, "mse", NUMBERS),
}
FORMS = ["module", "function", "partial", "name", "another module"]


class Run:
    """The losses and warnings of a training loop of full batches, each cut into `parts` that are accumulated."""

    def __init__(self, model, declared, loss, y, lr, parts=1, steps=STEPS, before_step=lambda model: None, **options):
        self.model = model
        self.optimizer = bprong.BPRONG(model, declared, lr=lr, **({"options": EXACT} | options))
        self.losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                self.optimizer.zero_grad()
                total = 0.0
                for inputs, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
                    value = loss(model(inputs), targets)
                    value.backward()
                    total += float(value.detach())
                before_step(model)
                self.optimizer.step()
                self.losses.append(total)
        self.warnings = [str(warning.message) for warning in caught]
        assert all(warning.category is WhiteningWarning for warning in caught)

    def assert_silent(self):
        assert self.warnings == []
        self.assert_falls()

    def assert_falls(self):
        assert self.losses[-1] < self.losses[0]

    def assert_warned_once(self, *words):
        (message,) = self.warnings
        assert message.startswith("the loss that was declared")
        for word in ("was not called with the output of the model", "observe(x, y)", *words):
            assert word in message, message


def test_the_assertions_fail():
    problem = PROBLEMS["classes"]
    right = Run(problem.start(), "cross_entropy", F.cross_entropy, LABELS, 0.01, steps=2)
    wrong = Run(problem.start(), "cross_entropy", lambda f, y: F.cross_entropy(f / 2, y), LABELS, 0.01, steps=2)
    still = Run(problem.start(), "cross_entropy", F.cross_entropy, LABELS, 0.0, steps=2)
    for assertion in (wrong.assert_silent, still.assert_silent, lambda: wrong.assert_warned_once("F.mse_loss")):
        with pytest.raises(AssertionError):
            assertion()
    with pytest.raises(ValueError, match="not enough values"):
        right.assert_warned_once()


# Right declarations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", quick_cases(RATES, "auto"))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_declaration_is_silent(name, form, lr):
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)
    Run(problem.start(), declared, loss, problem.y, lr).assert_silent()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("word", ["categorical", "bernoulli", "gaussian"])
def test_the_papers_words_are_the_mean_over_targets(word, lr):
    losses = {
        "categorical": (F.cross_entropy, LABELS),
        "bernoulli": (lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum") / len(f), BITS),
        "gaussian": (lambda f, y: F.mse_loss(f, y, reduction="sum") / len(f) / 2, NUMBERS),
    }
    Run(network(), word, *losses[word], lr).assert_silent()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", ["module", "function"])
def test_squared_errors_of_probabilities_are_silent(form, lr):
    declared, loss = PROBLEMS["numbers"].declared(form)
    Run(network(nn.Softmax(-1)), declared, loss, BITS, lr).assert_silent()


class Laplace(bprong.Likelihood):
    def nll(self, output, y):
        return (output - y).abs().sum(dim=-1)

    def sample(self, output):
        return torch.distributions.Laplace(output.detach(), 1.0).sample()


@pytest.mark.parametrize("lr", RATES)
def test_a_likelihood_of_the_users_own_is_silent_if_its_targets_are_observed(lr):
    model = network()
    optimizer = bprong.BPRONG(model, Laplace(), lr=lr)
    for _ in range(STEPS):
        optimizer.zero_grad()
        optimizer.observe(x, NUMBERS)
        Laplace().nll(model(x), NUMBERS).mean().backward()
        optimizer.step()
    if lr != "auto":  # a fixed rate does not need the targets
        Run(network(), Laplace(), lambda f, y: Laplace().nll(f, y).mean(), NUMBERS, lr, options={}).assert_silent()


IGNORED = LABELS.masked_fill(torch.arange(60) % 3 == 0, -100)
OPTIONS = {
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double()), LABELS),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), LABELS),
    "weights and smoothing": (
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.2),
        LABELS,
    ),
    "ignored": (nn.CrossEntropyLoss(), IGNORED),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), LABELS),
    "soft": (nn.CrossEntropyLoss(), NUMBERS.softmax(-1)),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 5.0, 20.0]).double()), BITS),
    "squares, sum": (nn.MSELoss(reduction="sum"), NUMBERS),
}


@pytest.mark.parametrize("lr", quick_cases(RATES, "auto"))
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_taken_into_account(name, same, lr):
    """Whether the loss module itself is called, or another one."""
    criterion, y = OPTIONS[name]
    lr = 1e-4 if lr != "auto" and criterion.reduction == "sum" else lr
    Run(network(), criterion, criterion if same else copy.deepcopy(criterion), y, lr).assert_silent()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", quick_cases(["module", "function"], "function"))
@pytest.mark.parametrize("name", quick_cases(PROBLEMS, "classes", "numbers"))
def test_accumulated_losses_may_be_divided_by_their_number_or_not(name, form, lr):
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)
    parts = 2
    Run(problem.start(), declared, lambda f, y: loss(f, y) / parts, problem.y, lr, parts).assert_silent()
    Run(problem.start(), declared, loss, problem.y, lr, parts).assert_silent()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", quick_cases(["module", "function"], "function"))
@pytest.mark.parametrize("name", quick_cases(PROBLEMS, "classes", "numbers"))
def test_clipped_gradients_are_not_another_loss(name, form, lr):
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    Run(problem.start(), declared, loss, problem.y, lr, before_step=clip).assert_silent()
    Run(problem.start(), declared, lambda f, y: loss(f, y) / 3, problem.y, lr, 3, before_step=clip).assert_silent()


def trained_with_a_scaler(name, form, lr, skipped=(), clip=None):
    """Losses of a training in which some steps are skipped, because their gradients are not finite."""
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)
    model = problem.start().float()
    optimizer = bprong.BPRONG(model, declared, lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    y = problem.y.float() if problem.y.is_floating_point() else problem.y
    losses = []
    for t in range(6):
        optimizer.zero_grad()
        value = loss(model(x.float()), y)
        before = snapshot(model)
        scaler.scale(value * (torch.inf if t in skipped else 1)).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        still = all(torch.equal(before[key], tensor) for key, tensor in snapshot(model).items())
        assert still == (t in skipped)
        losses.append(float(value.detach()))
    return losses


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", quick_cases(["module", "function"], "function"))
@pytest.mark.parametrize("name", quick_cases(PROBLEMS, "classes", "numbers"))
def test_mixed_precision_with_skipped_steps_is_silent(name, form, lr):
    losses = trained_with_a_scaler(name, form, lr, skipped=(0, 3))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", quick_cases(["module", "function"], "function"))
@pytest.mark.parametrize("name", quick_cases(PROBLEMS, "classes", "numbers"))
def test_mixed_precision_with_clipped_gradients_is_silent(name, form, lr):
    losses = trained_with_a_scaler(name, form, lr, clip=0.1)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", ["module", "function"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_outputs_in_bf16_are_silent(name, form, lr):
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)
    model = problem.start().float()
    optimizer = bprong.BPRONG(model, declared, lr=lr)
    y = problem.y.float() if problem.y.is_floating_point() else problem.y
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x.float())
            value = loss(output, y)
        assert output.dtype is torch.bfloat16
        value.backward()
        optimizer.step()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", ["module", "function"])
def test_mixup_is_silent_as_two_losses_and_as_soft_targets(form, lr):
    declared, loss = PROBLEMS["classes"].declared(form)
    other = LABELS.roll(1)

    def two_losses(f, y):
        return 0.7 * loss(f, y) + 0.3 * loss(f, other)

    Run(network(), declared, two_losses, LABELS, lr).assert_silent()
    soft = 0.7 * F.one_hot(LABELS, 3) + 0.3 * F.one_hot(other, 3)
    Run(network(), declared, loss, soft.double(), lr).assert_silent()


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("end", [(), (nn.LogSoftmax(1),)], ids=["logits", "log-probabilities"])
@pytest.mark.parametrize("size", [(7,), (3, 4)], ids=["(B, C, T)", "(B, C, H, W)"])
def test_classes_may_be_in_the_second_dimension(size, end, lr):
    conv = nn.Conv1d if len(size) == 1 else nn.Conv2d
    torch.manual_seed(1)
    model = nn.Sequential(conv(4, 6, 3, padding=1), nn.Tanh(), conv(6, 3, 1), *end)
    inputs = torch.randn(10, 4, *size)
    y = inputs[:, :3].argmax(dim=1)
    y[:2] = -100
    criterion = nn.NLLLoss() if end else nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, lr=lr)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(model(inputs), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lr", RATES)
def test_one_criterion_may_serve_two_models(lr):
    """Their paths are those with a criterion of their own."""

    def trained(criteria, together):
        models = [network(), network()]
        models[1][0].weight.data *= 2
        optimizers = [
            bprong.BPRONG(model, criterion, lr=lr, options=EXACT)
            for model, criterion in zip(models, criteria, strict=True)
        ]
        ys = (NUMBERS, NUMBERS.flip(0))
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if together:
                outputs = [model(x) for model in models]
                sum(criterion(f, y) for criterion, f, y in zip(criteria, outputs, ys, strict=True)).backward()
            else:
                for model, criterion, y in zip(models, criteria, ys, strict=True):
                    criterion(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [snapshot(model) for model in models]

    shared = nn.MSELoss()
    expected = trained([nn.MSELoss(), nn.MSELoss()], together=False)
    for together in (False, True):
        for ours, theirs in zip(trained([shared, shared], together), expected, strict=True):
            assert_same_path(ours, theirs)


@pytest.mark.parametrize("lr", RATES)
def test_one_criterion_of_a_discriminator_and_its_generator(lr):
    """The generator's loss sends gradients through the discriminator, which are set to zero before its own step."""
    torch.manual_seed(1)
    discriminator = mlp(5, 8, 1)
    generator = mlp(2, 8, 5)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = bprong.BPRONG(discriminator, criterion, lr=lr)
    other = torch.optim.Adam(generator.parameters(), lr=1e-3)
    z = torch.randn(60, 2, dtype=torch.float64)
    one = torch.ones(60, 1, dtype=torch.float64)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        fake = generator(z)
        loss = criterion(discriminator(x), one) + criterion(discriminator(fake.detach()), 0 * one)
        loss.backward()
        optimizer.step()
        other.zero_grad()
        criterion(discriminator(fake), one).backward()
        other.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", ["module", "function"])
def test_gradients_may_be_set_to_zero_between_the_passes(form, lr):
    declared, loss = PROBLEMS["numbers"].declared(form)

    def trained(between):
        model = network()
        optimizer = bprong.BPRONG(model, declared, lr=lr, options=EXACT)
        for _ in range(STEPS):
            if not between:
                optimizer.zero_grad()
            value = loss(model(x), NUMBERS)
            if between:
                optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return snapshot(model)

    assert_same_path(trained(between=True), trained(between=False))


# The call is the truth ------------------------------------------------------------------------------------------------


@functools.cache
def plain_end(name):
    """Where the mean of a problem leads at lr="auto"."""
    problem = PROBLEMS[name]
    declared, loss = problem.declared("module")
    return snapshot(Run(problem.start(), declared, loss, problem.y, "auto", steps=7).model)


FACTORS = [1e-3, 0.1, 10.0, 1e4]
OTHER_CALLS = {
    **{f"{factor:g} times": lambda loss, f, y, factor=factor: factor * loss(f, y) for factor in FACTORS},
    "a sum": lambda loss, f, y: loss(f, y, reduction="sum"),
    "none, then mean": lambda loss, f, y: loss(f, y, reduction="none").mean(),
    "in two halves": lambda loss, f, y: (loss(f[:30], y[:30]) + loss(f[30:], y[30:])) / 2,
}


@pytest.mark.parametrize("call", quick_cases(OTHER_CALLS, "10 times", "a sum"))
@pytest.mark.parametrize("form", ["function", "name", "another module"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_factor_and_reduction_of_the_call_change_nothing_without_a_learning_rate(name, form, call):
    """Whatever was declared, and without a warning."""
    problem = PROBLEMS[name]
    declared, _ = problem.declared(form)
    loss = functools.partial(OTHER_CALLS[call], problem.function)
    run = Run(problem.start(), declared, loss, problem.y, "auto", steps=7)
    run.assert_silent()
    assert_same_path(snapshot(run.model), plain_end(name), 1e-6)


@pytest.mark.parametrize("factor", quick_cases([0.1, 10.0, 100.0], 10.0))
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_factor_multiplies_a_fixed_learning_rate(name, factor):
    problem = PROBLEMS[name]
    declared, loss = problem.declared("module")
    run = Run(problem.start(), declared, lambda f, y: factor * loss(f, y), problem.y, 5e-2)
    plain = Run(problem.start(), declared, loss, problem.y, factor * 5e-2)
    run.assert_silent()
    assert_same_path(snapshot(run.model), snapshot(plain.model), 1e-9)


class Coded(nn.Module):
    """With a loss of its own inside, as the codes of a VQ-VAE have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.last = nn.Linear(3, 5)
        self.inside = None

    def forward(self, x):
        z = self.first(x)
        self.inside = F.mse_loss(z, z.detach().round())
        return self.last(z)


@pytest.mark.parametrize("lr", RATES)
def test_the_declared_module_outside_wins_over_a_loss_inside_of_the_model(lr):
    """As in a VQ-VAE: the targets are those of the reconstruction, not of the codes."""
    criterion = nn.MSELoss()
    torch.manual_seed(1)
    model = Coded().double()
    optimizer = bprong.BPRONG(model, criterion, lr=lr)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output, x)
        (loss + 0.25 * model.inside).backward()
        for batch in optimizer._recorder.seen():  # none at a fixed rate, when nothing is due
            assert torch.equal(batch.output, output)
            assert torch.equal(batch.targets.y, x)
            assert batch.targets.total == loss.item()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_declared_module_wins_over_other_calls_of_its_function():
    """Such as an auxiliary loss of the same output with other targets."""
    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion)
    output = model(x)
    (criterion(output, LABELS) + 0.1 * F.cross_entropy(output, LABELS.roll(1))).backward()
    (batch,) = optimizer._recorder.seen()
    (term,) = batch.targets.terms
    assert torch.equal(term.y, LABELS)
    assert term.multiple == 1


# Further terms --------------------------------------------------------------------------------------------------------


def dice(f, y):
    p = f.sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


FURTHER = {
    "a penalty on the output": ("classes", lambda f, y: 0.02 * f.square().mean()),
    "an entropy bonus": ("classes", lambda f, y: 0.01 * (f.softmax(-1) * f.log_softmax(-1)).sum(-1).mean()),
    "REINFORCE": ("classes", lambda f, y: -0.1 * ((y == 0).double() * f.log_softmax(-1)[:, 0]).mean()),
    "Dice": ("bits", dice),
    "absolute errors": ("numbers", lambda f, y: 0.1 * (f - y).abs().mean()),
}


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("form", quick_cases(["module", "function"], "function"))
@pytest.mark.parametrize("term", FURTHER)
def test_further_terms_beside_the_declared_loss_are_silent(term, form, lr):
    name, further = FURTHER[term]
    problem = PROBLEMS[name]
    declared, loss = problem.declared(form)
    Run(problem.start(), declared, lambda f, y: loss(f, y) + further(f, y), problem.y, lr).assert_silent()


# Wrong declarations ---------------------------------------------------------------------------------------------------


def bits_of_classes(f, y):
    return F.binary_cross_entropy_with_logits(f, F.one_hot(y, 3).to(f))


def cross_entropy_by_hand(f, y):
    return -f.log_softmax(-1)[torch.arange(len(y)), y].mean()


WRONG = {
    "squares under cross-entropy": (
        "cross_entropy", lambda f, y: F.mse_loss(f, F.one_hot(y, 3).to(f)), LABELS, (), "F.mse_loss",
    ),
    "bits under cross-entropy": (
        "cross_entropy", bits_of_classes, LABELS, (), "F.binary_cross_entropy_with_logits",
    ),
    "cross-entropy under squares": ("mse", F.cross_entropy, LABELS, (), "F.cross_entropy"),
    "log-probabilities under cross-entropy": (
        "cross_entropy", F.nll_loss, LABELS, (nn.LogSoftmax(-1),), "F.nll_loss",
    ),
    "probabilities under bits": (
        "bce_with_logits", F.binary_cross_entropy, BITS, (nn.Sigmoid(),), "no call of it was seen",
    ),
    "a temperature": ("cross_entropy", lambda f, y: F.cross_entropy(f / 2, y), LABELS, (), "F.cross_entropy"),
    "a softmax": ("mse", lambda f, y: F.mse_loss(f.softmax(-1), y), BITS, (), "F.mse_loss"),
    "by hand": ("cross_entropy", cross_entropy_by_hand, LABELS, (), "no call of it was seen"),
}  # fmt: skip
DECLARED_MODULES = {"cross_entropy": nn.CrossEntropyLoss, "bce_with_logits": nn.BCEWithLogitsLoss, "mse": nn.MSELoss}


@pytest.mark.parametrize("form", ["name", "module"])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_was_declared_and_not_called_is_an_error_without_a_learning_rate(name, form):
    """The message says what was called instead; nothing is changed."""
    declared, loss, y, end, called = WRONG[name]
    model = network(*end)
    before = snapshot(model)
    declared = declared if form == "name" else DECLARED_MODULES[declared]()
    with pytest.raises(RuntimeError, match=f"was not called with the output of the model: .*{called}.*observe"):
        Run(model, declared, loss, y, "auto")
    assert all(torch.equal(before[key], tensor) for key, tensor in snapshot(model).items())


@pytest.mark.parametrize("form", ["name", "module"])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_was_declared_and_not_called_is_one_warning_at_a_fixed_rate(name, form):
    declared, loss, y, end, called = WRONG[name]
    declared = declared if form == "name" else DECLARED_MODULES[declared]()
    run = Run(network(*end), declared, loss, y, 0.01, every=1)
    run.assert_warned_once(called)
    run.assert_falls()


BY_HAND = {
    "categorical": (cross_entropy_by_hand, LABELS),
    "bernoulli": (lambda f, y: -(y * F.logsigmoid(f) + (1 - y) * F.logsigmoid(-f)).sum(-1).mean(), BITS),
    "gaussian": (lambda f, y: (f - y).square().sum(-1).mean() / 2, NUMBERS),
}


@pytest.mark.parametrize("word", BY_HAND)
def test_the_papers_words_may_be_computed_by_hand_at_a_fixed_rate(word):
    """Which needs no targets; without a learning rate they are needed, and observed."""
    Run(network(), word, *BY_HAND[word], 0.01).assert_silent()
    with pytest.raises(RuntimeError, match="was not called with the output of the model"):
        Run(network(), word, *BY_HAND[word], "auto")


def test_without_a_learning_rate_targets_that_cannot_be_seen_are_observed():
    """The calls of a likelihood of the user's own, and the targets of x alone, cannot be seen."""
    message = "Laplace, was not called with the output of the model: no call of it was seen.*observe\\(x, y\\)"

    def loss(f, y):
        return Laplace().nll(f, y).mean()

    Run(network(), Laplace(), loss, NUMBERS, 0.01, options={}).assert_silent()
    with pytest.raises(RuntimeError, match=message):
        Run(network(), Laplace(), loss, NUMBERS, "auto", options={})
    model = network()
    optimizer = bprong.BPRONG(model, Laplace())
    start = snapshot(model)
    for t in range(3):
        optimizer.zero_grad()
        optimizer.observe(x, NUMBERS if t < 2 else None)
        loss(model(x), NUMBERS).backward()
        if t < 2:
            optimizer.step()
            start = snapshot(model)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same_path(snapshot(model), start, 0)


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("word", BY_HAND)
def test_a_loss_by_hand_whose_targets_are_observed_trains_as_with_the_function(word, lr):
    loss, y = BY_HAND[word]
    functions = {
        "categorical": F.cross_entropy,
        "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, y, reduction="sum") / len(f),
        "gaussian": lambda f, y: F.mse_loss(f, y, reduction="sum") / len(f) / 2,
    }
    model = network()
    optimizer = bprong.BPRONG(model, word, lr=lr, options=EXACT)
    for _ in range(7):
        optimizer.zero_grad()
        optimizer.observe(x, y)
        loss(model(x), y).backward()
        optimizer.step()
    expected = Run(network(), word, functions[word], y, lr, steps=7)
    expected.assert_silent()
    assert_same_path(snapshot(model), snapshot(expected.model), 1e-6)


# What a user may type -------------------------------------------------------------------------------------------------


def rewhitening(**arguments):
    model = bprong.whiten_(network())
    return bprong.Rewhitening(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


TAKES_LOSS = {
    "BPRONG": lambda **arguments: bprong.BPRONG(network(), **arguments),
    "PRONG": lambda **arguments: bprong.PRONG(network(), **arguments),
    "Rewhitening": rewhitening,
    "audit": lambda **arguments: bprong.audit(network(), x, **arguments),
}


@pytest.mark.parametrize("argument", ["likelihood", "betas", "eps", "nesterov"])
@pytest.mark.parametrize("name", TAKES_LOSS)
def test_arguments_of_other_optimizers_are_refused_by_name(name, argument):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
        TAKES_LOSS[name](loss="cross_entropy", **{argument: 1})
    TAKES_LOSS[name](loss="cross_entropy")


@pytest.mark.parametrize("name", TAKES_LOSS)
def test_a_loss_that_cannot_be_expressed_is_refused_at_construction(name):
    with pytest.raises(TypeError, match=r"loss cannot be HuberLoss.*nn\.CrossEntropyLoss.*bprong\.Likelihood"):
        TAKES_LOSS[name](loss=nn.HuberLoss())


@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
def test_parameters_instead_of_the_model_are_refused_with_what_to_pass(method):
    for parameters in (network().parameters(), list(network().parameters())):
        with pytest.raises(TypeError, match=r"the model itself.*the model and the loss, not model\.parameters\(\)"):
            method(parameters, "cross_entropy")


def test_a_learning_rate_in_the_place_of_the_loss_is_refused():
    for method in (bprong.BPRONG, bprong.PRONG):
        with pytest.raises(TypeError, match=r"loss cannot be 0\.01.*the loss that you minimise"):
            method(network(), 0.01)


def test_a_loss_is_needed_unless_nothing_is_measured_with_it():
    with pytest.raises(TypeError, match="loss"):
        bprong.BPRONG(network())
    for lr in RATES:
        with pytest.raises(TypeError, match=r"BPRONG needs the loss that you minimise: nn\.CrossEntropyLoss"):
            bprong.BPRONG(network(), None, lr=lr)
    with pytest.raises(TypeError, match=r"PRONG needs the loss that you minimise: nn\.CrossEntropyLoss"):
        bprong.PRONG(network(), lr="auto")


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_whitening_at_a_fixed_rate_needs_no_loss(name):
    """Its path is the same with a loss, which would only be checked."""
    problem = PROBLEMS[name]

    def trained(*declared):
        model = problem.start()
        optimizer = bprong.PRONG(model, *declared)
        for _ in range(STEPS):
            optimizer.zero_grad()
            problem.function(model(x), problem.y).backward()
            optimizer.step()
        return snapshot(model)

    assert_same_path(trained(), trained(problem.name), 0)


def test_no_learning_rate_is_the_default_with_a_loss():
    assert bprong.BPRONG(network(), "cross_entropy")._rule.kind == "Automatic"
    assert bprong.BPRONG(network(), "cross_entropy", 0.1)._rule.kind == "FixedRate"
    assert bprong.PRONG(network())._rule.kind == "FixedRate"


# Copies ---------------------------------------------------------------------------------------------------------------

CLONES = {"deepcopy": copy.deepcopy, "pickle": lambda given: pickle.loads(pickle.dumps(given))}


def advanced(model, criterion, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), NUMBERS).backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_a_copied_optimizer_continues_with_its_own_loss_module(clone, lr):
    model = network()
    criterion = nn.MSELoss()
    optimizer = bprong.BPRONG(model, criterion, lr=lr, every=2, options={"fisher": "exact", "seed": 0})
    advanced(model, criterion, optimizer)
    others = clone((model, criterion, optimizer))
    before = snapshot(model)
    ours = advanced(*others)
    assert all(torch.equal(before[key], tensor) for key, tensor in snapshot(model).items())
    assert_same_path(ours, advanced(model, criterion, optimizer), 0)
    assert [len(module._forward_hooks) for module in others[:2]] == [0, 0]
    assert not others[0]._forward_pre_hooks


@pytest.mark.parametrize("clone", CLONES.values(), ids=CLONES)
def test_no_hook_outlives_its_optimizer_on_the_model_or_the_loss(clone):
    model = network()
    criterion = nn.MSELoss()
    optimizer = bprong.BPRONG(model, criterion)
    advanced(model, criterion, optimizer, steps=1)
    other_model, other_criterion, other = clone((model, criterion, optimizer))
    advanced(other_model, other_criterion, other, steps=1)
    del optimizer, other
    for module in (model, criterion, other_model, other_criterion):
        assert not module._forward_hooks
        assert not module._forward_hooks_with_kwargs
        assert not module._forward_pre_hooks
        assert module._compiled_call_impl is None


def test_a_copied_loss_module_can_be_declared_again():
    """As in a search over settings, where model and criterion are copied for each run."""
    model = network()
    criterion = nn.MSELoss()
    optimizer = bprong.BPRONG(model, criterion)
    other_model, other_criterion = copy.deepcopy((model, criterion))
    other = bprong.BPRONG(other_model, other_criterion)
    advanced(other_model, other_criterion, other)
    assert other_model._compiled_call_impl.__self__ is other._recorder.listener
    assert optimizer._recorder.seen() == []
