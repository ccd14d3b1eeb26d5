"""Parameters that are not whitened follow Adam, at a rate that can be set."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.optim.rules import Fallback
from helpers import assert_close, classification, mlp
from training import train

MOSTLY_FALLBACK = pytest.mark.filterwarnings("ignore:.* of the trained numbers follow the fallback rule:UserWarning")


class Mixed(nn.Module):
    """Uncovered parameters of three kinds, and one linear layer."""

    uncovered = ("embed.weight", "norm.weight", "norm.bias", "gain")

    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(7, 4)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, tokens):
        return self.out(self.norm(self.embed(tokens)) * self.gain)


def compared_with_adam(rtol, steps=5, **adam):
    """Trains a `Mixed` with BPRONG, and its uncovered parameters with Adam on the same gradients."""

    def run(**options):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05, options=options)
        shadow = copy.deepcopy(model)
        other = torch.optim.Adam([shadow.get_parameter(name) for name in Mixed.uncovered], **adam)
        tokens = torch.randint(7, (20, 2))
        y = torch.randint(3, (20,))
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens), y).backward()
            for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
                q.grad = p.grad.clone()
            optimizer.step()
            other.step()
        for name in Mixed.uncovered:
            assert_close(model.get_parameter(name), shadow.get_parameter(name), rtol, name)
        return optimizer.report()

    return run


@MOSTLY_FALLBACK
def test_parameters_that_are_not_covered():
    """Norm scales, bags of embeddings, bare parameters: Adam at a tenth of lr, and the report says so."""
    report = compared_with_adam(1e-5, lr=0.005)()
    assert report.fallback == {
        "gain": "in Mixed", "embed.weight": "in EmbeddingBag",
        "norm.weight": "in LayerNorm", "norm.bias": "in LayerNorm",
    }  # fmt: skip
    assert "not whitened (Adam): gain (in Mixed)" in str(report)


@MOSTLY_FALLBACK
def test_the_comparison_with_adam_can_fail():
    with pytest.raises(AssertionError, match="off by"):
        compared_with_adam(1e-5, lr=0.0055)()
    with pytest.raises(AssertionError, match="off by"):
        compared_with_adam(1e-5, lr=0.005, betas=(0.91, 0.999))()


@MOSTLY_FALLBACK
def test_tied_weights():
    """They follow the fallback, and the report names them."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.mid = nn.Linear(4, 4)
            self.out = nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens):
            return self.out(torch.tanh(self.mid(self.embed(tokens))))

    model = Tied()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.05)
    tokens = torch.randint(7, (20,))
    train(model, optimizer, [(tokens, tokens)] * 3)
    assert list(optimizer._whitening.layers) == ["mid"]
    assert optimizer.report().fallback == {"embed.weight": "tied: embed.weight, out.weight"}


def test_a_linear_layer_added_later_is_whitened():
    model = mlp(5, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    model.append(nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": model[1].parameters()})
    assert optimizer.report().fallback == {}
    assert list(optimizer._whitening.layers) == ["0", "1"]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_directions_are_the_steps_of_torchs_adam(betas):
    """Of several parameters together, one of which has no gradient at first, at learning rates of their own."""
    torch.manual_seed(0)
    parameters = [torch.randn(6, dtype=torch.float64), torch.randn(2, 3), torch.randn(3, dtype=torch.complex128)]
    expected = [p.clone() for p in parameters]
    rates = dict(zip(parameters, (0.1, 0.2, 0.3), strict=True))
    adam = torch.optim.Adam(
        [{"params": [q], "lr": rates[p]} for p, q in zip(parameters, expected, strict=True)], betas=betas
    )
    fallback = Fallback(betas)
    states = {p: {} for p in parameters}
    for step in range(4):
        gradients = {p: torch.randn_like(p) for p in parameters[: 2 if step == 0 else 3]}
        for p, q in zip(parameters, expected, strict=True):
            q.grad = gradients.get(p)
        adam.step()
        for p, d in fallback.directions(gradients, states, rates).items():
            p.add_(d)
    for p, q in zip(parameters, expected, strict=True):
        real, other = (torch.view_as_real(v) if v.is_complex() else v for v in (p, q))
        assert_close(real, other, 1e-5 if p.dtype is torch.float32 else 1e-13)
    assert fallback.directions({}, states, rates) == {}


def test_the_state_is_saved_with_the_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    other = copy.deepcopy(model)
    optimizer, resumed = (bprong.BPRONG(m, "cross_entropy", lr=0.05, every=4) for m in (model, other))
    data = [classification(60, 5, 3)]
    train(model, optimizer, data * 3)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data * 3)
    train(other, resumed, data * 3)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


class Spectrum(nn.Module):
    """A complex parameter before a layer."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))
        self.head = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        return self.head((x.to(self.filter.dtype) @ self.filter).abs())


@MOSTLY_FALLBACK
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_a_complex_parameter_moves_as_with_torchs_adam(step):
    x, y = classification(40, 5, 3)
    model = Spectrum()
    model.head.requires_grad_(False)
    other = copy.deepcopy(model)
    model.head.weight.requires_grad_()  # an optimizer needs a layer, which stays where it is
    groups = [{"params": [model.filter]}, {"params": [model.head.weight], "lr": 0.0}]
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, step=step, params=groups)
    rate = 0.01 if step == "natural" else 0.1
    train(model, optimizer, [(x, y)] * 5)
    train(other, torch.optim.Adam([other.filter], lr=rate), [(x, y)] * 5)
    assert float((model.filter - other.filter).detach().abs().max()) < 1e-6


@MOSTLY_FALLBACK
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_lr_auto_with_a_complex_parameter(step):
    x, y = classification(40, 5, 3)
    model = Spectrum()
    before = F.cross_entropy(model(x), y).item()
    train(model, bprong.BPRONG(model, nn.CrossEntropyLoss(), step=step), [(x, y)] * 10)
    assert F.cross_entropy(model(x), y).item() < 0.8 * before
