"""A due step leaves no trace: everything but the parameters is, bit for bit, as it is without the optimizer.

For each condition a model is trained with an optimizer whose statistics are due at every step, and its twin, given the
same parameters, runs the same forward and backward passes with none. After every backward pass and after every step
these must be equal: gradients, the states of torch's, numpy's and Python's random numbers, buffers, everything that
modules keep in attributes (hidden states, counters, generators of their own), and how often forward hooks were called.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.errors import WhiteningWarning
from helpers import assert_unchanged, classification, mlp, snapshot

RATES = pytest.mark.parametrize("lr", [0.01, "auto"])
Rate = float | str
STEPS = 3
X, Y = classification(24, 5, 3)
SEQUENCES = torch.stack([X, X.flip(0), X.roll(5, 0), -X], dim=1)  # (batch, time, features)
IMAGES = torch.linspace(-1, 1, 24 * 2 * 36, dtype=torch.float64).sin().view(24, 2, 6, 6)


# Models ---------------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """A hidden layer, something in the middle, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x).tanh()))

    def between(self, z: Tensor) -> Tensor:
        return self.middle(z).tanh()


class Checkpointed(Body):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def between(self, z: Tensor) -> Tensor:
        return checkpoint(self.block, z, use_reentrant=self.reentrant)

    def block(self, z: Tensor) -> Tensor:
        return self.dropout(self.middle(z).tanh())


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


class LayerDrop(Body):
    def __init__(self, uniform: Callable[[], float]) -> None:
        super().__init__()
        self.uniform = uniform

    def between(self, z: Tensor) -> Tensor:
        return z + self.middle(z).tanh() if self.uniform() < 0.5 else z


class OwnGenerators(Body):
    """Draws from generators that the module keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.python_generator = random.Random(3)

    def between(self, z: Tensor) -> Tensor:
        z = z + 0.1 * torch.randn(z.shape, dtype=z.dtype, generator=self.torch_generator)
        z = z * self.numpy_generator.uniform(0.9, 1.1)
        return self.middle(z).tanh() * self.python_generator.uniform(0.9, 1.1)


class NoisyRouting(Body):
    """Each example goes to the expert with the largest noisy score."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def between(self, z: Tensor) -> Tensor:
        scores = self.router(z)
        gate, chosen = (scores + torch.randn_like(scores)).softmax(-1).max(-1)
        out = torch.zeros_like(z)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, gate[rows, None] * expert(z[rows]).tanh())
        return z + out


class Stateful(nn.Module):
    """A recurrent network whose hidden state outlives the batch, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(5, 6)
        self.last = nn.Linear(6, 3)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6, dtype=x.dtype) if self.h is None else self.h
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        self.h = h.detach()
        return self.last(h)


class Counting(Body):
    """Counts its calls, appends to a list, changes a dict and advances an annealed temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[float] = []
        self.statistics = {"largest": 0.0, "seen": {"examples": 0}}
        self.temperature = 1.0

    def between(self, z: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(float(z.detach().mean()))
        self.statistics["largest"] = max(self.statistics["largest"], float(z.detach().abs().max()))
        self.statistics["seen"]["examples"] += len(z)
        self.temperature *= 0.9
        return (self.middle(z) / self.temperature).tanh()


class Popping(Body):
    """Takes a dict of inputs, from which it removes what it has used."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch.pop("x")
        batch["used"] = torch.ones(1)
        return super().forward(x)


class ReplacedBuffers(Body):
    """Running averages, one written in place, one replaced, one created at the first call; and a plain tensor."""

    running: Tensor
    codebook: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("codebook", torch.ones(6))
        self.register_buffer("late", None)
        self.plain = torch.zeros(6, dtype=torch.float64)

    def between(self, z: Tensor) -> Tensor:
        mean = z.detach().mean(0)
        self.running.lerp_(mean, 0.1)
        self.codebook = 0.9 * self.codebook + 0.1 * mean
        self.late = mean if self.late is None else self.late + mean
        self.plain += mean
        return self.middle(z - self.running).tanh()


class Caching(Body):
    """Keeps a table that it computes at the first call, by the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def between(self, z: Tensor) -> Tensor:
        if len(z) not in self.tables:
            self.tables[len(z)] = torch.randn(len(z), 1, dtype=z.dtype)
        return self.middle(z + 0.1 * self.tables[len(z)]).tanh()


class Variational(nn.Module):
    """A variational autoencoder: noise in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 8)
        self.decoder = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent = kind(5, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0][:, -1])


class Unrolled(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(5, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.last(state[0] if isinstance(state, tuple) else state)


class Encoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layer = layer
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)).mean(1))


class Attending(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class WithLoss(Body):
    """Computes its loss itself and returns it with the logits."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * (1 - x.tanh() ** 2)


class CustomFunction(Body):
    def between(self, z: Tensor) -> Tensor:
        return Doubled.apply(self.middle(z))


class InPlace(Body):
    """Everything after a layer works in place."""

    def between(self, z: Tensor) -> Tensor:
        a = self.middle(z)
        a *= 0.5
        a[:, 0] += 1.0
        return F.dropout(a, 0.3, inplace=True).sigmoid_()


class Gumbel(Body):
    def between(self, z: Tensor) -> Tensor:
        return F.gumbel_softmax(self.middle(z), tau=1.0, hard=True)


class Global(Body):
    """Draws Python's, numpy's and torch's global random numbers."""

    def between(self, z: Tensor) -> Tensor:
        z = z * random.uniform(0.9, 1.1) * np.random.uniform(0.9, 1.1)
        return self.middle(z + 0.1 * torch.randn_like(z)).tanh()


def hooked() -> nn.Module:
    """A model with forward hooks of the user's own that change what layers are given and return."""
    model = Body()
    model.seen = []
    model.middle.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.middle.register_forward_hook(lambda module, args, output: model.seen.append(len(output)) or output + 1)
    model.register_forward_hook(lambda module, args, output: output / 2)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 3)
    )


def parametrized(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Body()
    kind(model.middle)
    return model


def encoder_layer() -> nn.Module:
    return Encoder(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True))


# Passes: what the user does between zero_grad and step ----------------------------------------------------------------


def plain(model: nn.Module, x: Tensor = X) -> None:
    F.cross_entropy(model(x), Y).backward()


def sequence(model: nn.Module) -> None:
    plain(model, SEQUENCES)


def image(model: nn.Module) -> None:
    plain(model, IMAGES)


def autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(X.float())
    F.cross_entropy(output.float(), Y).backward()


def two_calls(model: nn.Module) -> None:
    first = model(X[:12])
    second = model(X[12:])
    (F.cross_entropy(first, Y[:12]) / 2).backward()
    (F.cross_entropy(second, Y[12:]) / 2).backward()


def summed_calls(model: nn.Module) -> None:
    (F.cross_entropy(model(X[:12]), Y[:12]) / 2 + F.cross_entropy(model(X[12:]), Y[12:]) / 2).backward()


def retained(model: nn.Module) -> None:
    loss = F.cross_entropy(model(X), Y) / 2
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (F.cross_entropy(output, Y) + 0.1 * slope.square().mean()).backward()
    model.gradient_by_inputs = x.grad


def hidden_labels(model: nn.Module) -> None:
    model(X, labels=Y)["loss"].backward()


def popped(model: nn.Module) -> None:
    batch = {"x": X}
    plain(model, batch)
    model.left_in_the_batch = sorted(batch)


def scaled_in_place(model: nn.Module) -> None:
    output = model(X)
    loss = F.cross_entropy(output, Y)
    output.mul_(0.5)
    loss.backward()


def logged(model: nn.Module) -> None:
    model.accuracy = float((model(X).argmax(-1) == Y).double().mean())
    plain(model)
    model.eval()
    with torch.no_grad():
        model.validation = float(F.cross_entropy(model(X), Y))
    model.train()


def reconstruction(model: nn.Module) -> None:
    F.mse_loss(model(X), X).backward()


def adversarial(pair: nn.Module) -> None:
    """The turns of a generator and a discriminator, the gradients of both."""
    fake = pair.generator(torch.randn(12, 2, dtype=torch.float64))
    F.cross_entropy(pair.discriminator(torch.cat([X[:12], fake])), Y).backward()


def generative() -> nn.Module:
    return nn.ModuleDict({"generator": mlp(2, 4, 5), "discriminator": normed()})


@dataclass
class Condition:
    """A model and what is done with it.

    root:     the part of the model that has the optimizer
    hooked:   whether calls of forward hooks are counted at all modules; in a checkpoint, torch calls them once more
              in every backward pass
    """

    make: Callable[[], nn.Module]
    run: Callable[[Any], None] = plain
    dtype: torch.dtype = torch.float64
    loss: str = "cross_entropy"
    root: Callable[[Any], nn.Module] = lambda model: model
    hooked: bool = True


CONDITIONS: dict[str, Condition] = {
    "perceptron": Condition(Body),
    "in-place ReLU": Condition(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))),
    "everything in place": Condition(InPlace),
    "dropout": Condition(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))),
    "checkpoint": Condition(Checkpointed, hooked=False),
    "reentrant checkpoint": Condition(ReentrantlyCheckpointed, hooked=False),
    "encoder layer": Condition(encoder_layer, sequence),
    "encoder": Condition(lambda: Encoder(nn.TransformerEncoder(encoder_layer().layer, 2)), sequence),
    "attention": Condition(lambda: Encoder(Attending()), sequence),
    "attention with separate projections": Condition(lambda: Encoder(Attending(kdim=6, vdim=6, bias=False)), sequence),
    "bf16 autocast": Condition(Body, autocast, torch.float32),
    "bf16 autocast with dropout": Condition(Checkpointed, autocast, torch.float32, hooked=False),
    "bf16": Condition(Body, lambda model: plain(model, X.bfloat16()), torch.bfloat16),
    "two calls": Condition(Body, two_calls),
    "two calls with one backward pass": Condition(Global, summed_calls),
    "BatchNorm": Condition(normed),
    "convolutions": Condition(convolutional, image),
    "LayerDrop": Condition(lambda: LayerDrop(lambda: float(torch.rand(())))),
    "LayerDrop by random": Condition(lambda: LayerDrop(random.random)),
    "LayerDrop by numpy": Condition(lambda: LayerDrop(np.random.rand)),
    "noisy routing": Condition(NoisyRouting),
    "global random numbers": Condition(Global),
    "own generators": Condition(OwnGenerators),
    "Gumbel softmax": Condition(Gumbel),
    "forward hooks": Condition(hooked, hooked=False),  # these change what is computed, and count in an attribute
    "state in an attribute": Condition(Stateful, sequence),
    "counters": Condition(Counting),
    "replaced buffers": Condition(ReplacedBuffers),
    "table made at the first call": Condition(Caching),
    "input that is changed": Condition(Popping, popped),
    "weight norm": Condition(lambda: parametrized(parametrizations.weight_norm)),
    "spectral norm": Condition(lambda: parametrized(parametrizations.spectral_norm)),
    "orthogonal weight": Condition(lambda: parametrized(parametrizations.orthogonal)),
    "LSTM": Condition(lambda: Recurrent(nn.LSTM), sequence),
    "GRU": Condition(lambda: Recurrent(nn.GRU), sequence),
    "LSTM cell": Condition(lambda: Unrolled(nn.LSTMCell), sequence),
    "GRU cell": Condition(lambda: Unrolled(nn.GRUCell), sequence),
    "adversarial pair": Condition(generative, adversarial, root=lambda model: model.discriminator),
    "variational autoencoder": Condition(Variational, reconstruction, loss="mse"),
    "loss inside": Condition(WithLoss, hidden_labels),
    "custom function": Condition(CustomFunction),
    "backward twice": Condition(Body, retained),
    "gradient penalty": Condition(Body, penalty),
    "output changed in place": Condition(Body, scaled_in_place),
    "logging and validation": Condition(Checkpointed, logged, hooked=False),
}


# Everything that must not change --------------------------------------------------------------------------------------


def plainly(value: Any) -> Any:
    """A copy of a value that can be compared with `==`; None for parameters, which steps move, and for functions."""
    match value:
        case nn.Parameter():
            found: Any = None
        case Tensor():
            found = (str(value.dtype), tuple(value.shape), value.detach().reshape(-1).tolist())
        case np.ndarray():
            found = value.tolist()
        case torch.Generator():
            found = value.get_state().tolist()
        case np.random.Generator():
            found = plainly(value.bit_generator.state)
        case random.Random():
            found = value.getstate()
        case dict():
            found = {key: plainly(item) for key, item in value.items()}
        case list() | tuple() | set():
            found = [plainly(item) for item in value]
        case _:
            found = value if isinstance(value, (int, float, str, bool)) else None
    return found


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every attribute of every module that is not one of torch's own."""
    own = set(vars(nn.Module()))
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in own:
                yield f"{name}.{key}", plainly(value)


def trace(model: nn.Module, calls: dict[str, int]) -> dict[str, Any]:
    """All state of a model and of the process that training without the optimizer has as well."""
    found: dict[str, Any] = {f"gradient of {name}": plainly(p.grad) for name, p in model.named_parameters()}
    found |= {f"buffer {name}": plainly(buffer) for name, buffer in model.named_buffers()}
    found |= {f"attribute {name}": value for name, value in attributes(model)}
    found |= {f"mode of {name}": module.training for name, module in model.named_modules()}
    found |= {f"trained {name}": p.requires_grad for name, p in model.named_parameters()}
    found["torch's random numbers"] = torch.get_rng_state().tolist()
    found["numpy's random numbers"] = plainly(list(np.random.get_state()))
    found["Python's random numbers"] = random.getstate()
    found["calls of forward hooks"] = dict(calls)
    return found


def count_calls(model: nn.Module) -> dict[str, int]:
    """Counts the calls of forward hooks and of forward pre-hooks of every module."""
    calls: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] = calls.get(name, 0) + 1

        return count

    for name, module in model.named_modules():
        module.register_forward_hook(counting(f"{name} after"))
        module.register_forward_pre_hook(counting(f"{name} before"))
    return calls


def prepared(condition: Condition) -> tuple[nn.Module, dict[str, int]]:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    model = condition.make().to(condition.dtype)
    return model, count_calls(model) if condition.hooked else {}


def with_optimizer(condition: Condition, lr: Rate) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """The traces after every backward pass and after every step, and the parameters that every step began with."""
    model, calls = prepared(condition)
    root = condition.root(model)
    optimizer = bprong.BPRONG(root, condition.loss, lr=lr, every=1)
    traces = []
    parameters = []
    for _ in range(STEPS):
        parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
        model.zero_grad()
        condition.run(model)
        traces.append(trace(model, calls))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WhiteningWarning)  # of approximations under lr="auto"
            optimizer.step()
        traces.append(trace(model, calls))
    assert optimizer.report().steps == STEPS
    return traces, parameters


def without_optimizer(condition: Condition, parameters: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """The traces of the same passes at the same parameters."""
    model, calls = prepared(condition)
    traces = []
    for values in parameters:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])
        model.zero_grad()
        condition.run(model)
        traces += [trace(model, calls)] * 2  # a step changes none of this
    return traces


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name in {**expected, **found} if found.get(name) != expected.get(name)]


@RATES
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_due_step_changes_nothing_but_the_parameters(name: str, lr: Rate) -> None:
    found, parameters = with_optimizer(CONDITIONS[name], lr)
    expected = without_optimizer(CONDITIONS[name], parameters)
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        moment = ("after the backward pass", "after the step")[i % 2]
        assert differences(ours, theirs) == [], f"{moment} of step {i // 2}"


def test_the_comparison_notices_each_kind_of_trace() -> None:
    """It would fail if one of them had changed."""
    model = Counting().double()
    model.register_buffer("buffer", torch.zeros(1))
    model.generator = torch.Generator().manual_seed(0)
    calls = count_calls(model)
    before = trace(model, calls)
    model.buffer += 1
    model.history.append(1.0)
    torch.rand(1, generator=model.generator)
    torch.rand(1)
    np.random.rand()
    random.random()
    model.first.weight.grad = torch.zeros_like(model.first.weight)
    model.last(torch.zeros(1, 6, dtype=torch.float64))
    assert set(differences(trace(model, calls), before)) == {
        "gradient of first.weight", "buffer buffer", "attribute .history", "attribute .generator",
        "torch's random numbers", "numpy's random numbers", "Python's random numbers", "calls of forward hooks",
    }  # fmt: skip


# Steps that are not due, and passes that fail -------------------------------------------------------------------------


@RATES
def test_a_step_between_refreshes_leaves_no_trace_either(lr: Rate) -> None:
    model, calls = prepared(CONDITIONS["global random numbers"])
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=100)
    for _ in range(STEPS):
        model.zero_grad()
        plain(model)
        before = trace(model, calls)
        optimizer.step()
        assert differences(trace(model, calls), before) == []


class Failing(Body):
    fails = False

    def between(self, z: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("a fault of the user's own")
        return super().between(z)


@RATES
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_exception_in_a_pass_of_the_user_leaves_nothing_switched_on(lr: Rate, moment: str) -> None:
    """torch's functions are its own again, and training goes on as if the pass had never been begun."""

    def run(failing: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = Failing().double()
        functions = {name: getattr(F, name) for name in ("linear", "conv2d", "embedding", "cross_entropy")}
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options={"fisher": "exact"})
        for _ in range(STEPS):
            optimizer.zero_grad()
            if failing and moment == "forward":
                model.fails = True
                with pytest.raises(KeyError, match="of the user's own"):
                    model(2 * X)
                model.fails = False
            elif failing:
                output = model(2 * X)
                output.register_hook(_fail)
                with pytest.raises(KeyError, match="of the user's own"):
                    F.cross_entropy(output, Y).backward()
                model.zero_grad()
            assert functions == {name: getattr(F, name) for name in functions}
            assert torch.overrides._get_current_function_mode_stack() == []
            plain(model)
            optimizer.step()
        return snapshot(model)

    assert_unchanged(run(False), run(True))


def _fail(gradient: Tensor) -> Tensor:
    raise KeyError("a fault of the user's own")


@RATES
def test_a_copy_of_the_model_made_between_the_passes_is_not_measured(lr: Rate) -> None:
    """For example a teacher, which is a deep copy of the model and is called in training mode."""

    def run(teacher: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = Body().double()
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options={"fisher": "exact"})
        for _ in range(STEPS):
            optimizer.zero_grad()
            output = model(X)
            if teacher:
                copied = copy.deepcopy(model)
                F.cross_entropy(copied(3 * X), Y).backward()
            F.cross_entropy(output, Y).backward()
            optimizer.step()
        return snapshot(model)

    assert_unchanged(run(False), run(True))
