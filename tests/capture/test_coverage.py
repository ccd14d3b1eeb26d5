"""`bprong.coverage` predicts what the optimizer then does."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import bprong
from bprong.experiments.models import digits_convnet, perceptron, sequence_transformer
from bprong.linalg.moments import Blocks, Limits
from helpers import assert_close, quick_cases
from training import EXACT


def tensors_in(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)


def stepped(model, x, y, **settings):
    optimizer = bprong.BPRONG(model, "cross_entropy", **({"lr": 0.01, "max_step": None} | settings))
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    return optimizer


def text(n):
    return torch.randint(1, 33, (n, 12)), torch.randint(33, (n, 12))


ten = torch.arange(20) % 10
MODELS = {
    "paper": (lambda: perceptron([784, 100, 100, 100, 10], "relu", seed=0), (torch.randn(20, 784), ten)),
    "conv": (lambda: digits_convnet(0), (torch.randn(20, 1, 8, 8), ten)),
    "transformer": (lambda: sequence_transformer(0), text(8)),
    "wide": (lambda: nn.Sequential(nn.Linear(6000, 30), nn.ReLU(), nn.Linear(30, 10)), (torch.randn(20, 6000), ten)),
}


@pytest.mark.parametrize("name", quick_cases(MODELS, "paper", "conv", "transformer"))
@pytest.mark.parametrize("method", [bprong.BPRONG, pytest.param(bprong.PRONG, marks=pytest.mark.rest)])
def test_the_predicted_memory_is_the_memory_used(name, method):
    make, (x, y) = MODELS[name]
    model = make()
    predicted = bprong.coverage(model, backward=method is bprong.BPRONG).memory
    kept = {}
    for solver in ("exact", "auto"):
        optimizer = method(model, "cross_entropy", lr=0.01, options={"solver": solver})
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        held = {
            "whitening": {name: layer.state_dict() for name, layer in optimizer._whitening.layers.items()},
            "rule": dict(optimizer.state),
        }
        known = [t for t in tensors_in(held) if not t.isnan().all()]  # NaN stands for what is not kept
        tensors = {t.data_ptr(): t.untyped_storage().nbytes() for t in known}
        kept[solver] = sum(tensors.values())
    assert abs(predicted - kept["exact"]) < 0.01 * kept["exact"]
    assert kept["auto"] <= kept["exact"]  # low-rank inverses, where the data allows them, take less


@pytest.mark.parametrize("name", quick_cases(MODELS, "paper", "transformer"))
def test_the_predicted_memory_of_spectral_steps_is_the_memory_used_beside_momentum(name):
    """Adam's moments of biases and embeddings are in it."""
    make, (x, y) = MODELS[name]
    model = make()
    options = {"solver": "exact"}
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, step="spectral", options=options)
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    states = [{k: v for k, v in state.items() if k != "gradient_average"} for state in optimizer.state.values()]
    held = {"whitening": {name: layer.state_dict() for name, layer in optimizer._whitening.layers.items()}}
    held |= dict(enumerate(states))
    tensors = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(held) if not t.isnan().all()}
    used = sum(tensors.values())
    assert abs(bprong.coverage(model, step="spectral").memory - used) < 0.01 * used
    adamw = torch.optim.AdamW(model.parameters())
    adamw.step()
    moments = sum(t.nbytes for state in adamw.state.values() for t in state.values() if t.dim())
    assert 2 * bprong.coverage(model).momentum == moments


def test_coverage_knows_the_step():
    """Embeddings follow Adam under spectral steps."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    natural = bprong.coverage(model)
    assert str(natural) == str(bprong.coverage(model, step="natural"))
    spectral = bprong.coverage(model, step="spectral")
    assert spectral.fallback.keys() - natural.fallback.keys() == {"0.weight"}
    assert "embedding" in spectral.fallback["0.weight"]
    assert spectral.memory == natural.memory + 2 * (model[0].weight.nbytes + model[1].bias.nbytes)
    model.requires_grad_(False)
    assert bprong.coverage(model, step="spectral").momentum == 0
    with pytest.raises(ValueError, match="step must be"):
        bprong.coverage(model, step="muon")


def test_every_parameter_has_a_row():
    model = sequence_transformer(0)
    found = bprong.coverage(model)
    assert [row.parameter for row in found.rows] == [name for name, _ in model.named_parameters()]
    treatments = {row.parameter.split(".", 3)[-1]: row.treatment for row in found.rows}
    assert treatments["self_attn.in_proj_weight"] == treatments["self_attn.in_proj_bias"] == "two-sided"
    assert treatments["linear1.weight"] == "two-sided"
    assert treatments["norm1.weight"] == "fallback: Adam"
    assert treatments["token.weight" if "token.weight" in treatments else "weight"] == "two-sided"
    row = next(row for row in found.rows if row.parameter.endswith("0.self_attn.in_proj_weight"))
    assert (row.inputs, row.outputs) == ("3 × 64", "3 × 64")


def test_coverage_and_optimizer_agree():
    for make, _ in MODELS.values():
        model = make()
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
        fallback = bprong.coverage(model).fallback
        assert fallback == optimizer.report().fallback
        covered = {id(p) for p in optimizer._whitening.layers.parameters}
        assert {n for n, p in model.named_parameters() if id(p) not in covered} == set(fallback)


def test_treatments():
    model = nn.Sequential(
        nn.Linear(8, 4),
        nn.Conv2d(8, 4, 3),
        nn.Linear(4, 4),
        nn.LSTM(4, 4),
        nn.BatchNorm1d(4),
        weight_norm(nn.Linear(4, 4)),
    )
    model[2].requires_grad_(False)
    found = {row.parameter: row for row in bprong.coverage(model, max_dim=16).rows}
    assert found["0.weight"].treatment == "two-sided"
    assert found["0.bias"].reason == "with its weight"
    assert found["1.weight"].treatment == "two-sided"
    assert found["1.weight"].inputs == "24 × 3 blocks"
    assert found["2.weight"].treatment == "frozen"
    assert found["3.weight_hh_l0"].treatment == "fallback: Adam"
    assert found["4.weight"].reason == "in BatchNorm1d"
    assert found["5.parametrizations.weight.original1"].treatment == "fallback: Adam"
    assert {row.treatment for row in bprong.coverage(model[:1], backward=False).rows} == {"forward only"}
    assert bprong.coverage(nn.Linear(9, 2), max_dim=4).rows[0].inputs == "9 diagonal"
    assert bprong.coverage(nn.Linear(8, 2), max_dim=6).rows[0].inputs == "2 × 4 blocks"


def test_nothing_is_allocated():
    model = nn.Sequential(nn.Linear(10**6, 10**5, device="meta"), nn.Embedding(10**6, 64, device="meta"))
    found = bprong.coverage(model)
    assert found.memory < 2 * 12 * 4096**2 + 64 * 2**20


def test_it_prints_as_a_table():
    printed = str(bprong.coverage(nn.Sequential(nn.Linear(784, 100), nn.LayerNorm(100))))
    header, first, *_, last, costs = printed.splitlines()
    assert header.split() == [
        "parameter",
        "shape",
        "treatment",
        "inputs",
        "outputs",
        "memory",
        "refresh",
        "per",
        "row",
        "step",
    ]
    assert first.split()[:5] == ["0.weight", "100", "×", "784", "two-sided"]
    assert last == "in all 7.51 MB beside a momentum of 315 kB, where AdamW keeps 630 kB"
    assert costs.endswith("more than SGD at a step")


def test_a_lazy_layer_raises_an_error():
    with pytest.raises(ValueError, match="call the model on a batch first"):
        bprong.coverage(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("max_dim", [0, 1.5, True])
def test_max_dim_must_be_a_positive_whole_number(max_dim):
    with pytest.raises(ValueError, match="max_dim must be a whole number of at least 1"):
        bprong.coverage(nn.Linear(3, 2), max_dim=max_dim)
    with pytest.raises(ValueError, match="max_dim'. must be a whole number of at least 1"):
        bprong.BPRONG(nn.Linear(3, 2), "cross_entropy", lr=0.01, options={"max_dim": max_dim})


# Too wide to factor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_dim", [1, 3, 4, 7, 12])
def test_a_side_in_blocks_is_the_block_diagonal_of_the_whole(max_dim):
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(12, 6)
        x = torch.randn(30, 12) @ torch.randn(12, 12)
        y = torch.arange(30) % 6
        W = model.weight.detach().clone()
        b = model.bias.detach().clone()
        optimizer = stepped(model, x, y, lr=0.1, options=EXACT | {"max_dim": max_dim})
        p = F.linear(x, W, b).softmax(-1)
        Z = torch.cov(x.T, correction=0)
        D = (torch.diag_embed(p) - p[..., None] * p[:, None]).mean(0)
        g = (p - F.one_hot(y, 6)) / 30
        c = x.mean(0)
        kept = [torch.zeros(n, n) for n in (12, 6)]
        for mask, blocks in zip(kept, map(Limits(max_dim).blocks, (12, 6)), strict=True):
            for i in range(blocks.count):
                mask[i * blocks.size :, i * blocks.size :][: blocks.size, : blocks.size] = 1
        UU = torch.linalg.inv(Z * kept[0] + 0.2 * torch.eye(12))
        RR = torch.linalg.inv(D * kept[1] + 0.015 * torch.eye(6))
        step = RR @ (g.T @ (x - c)) @ UU
        assert_close(model.weight - W, -0.1 * step, 1e-9)
        assert_close(model.bias - b, -0.1 * RR @ g.sum(0) + 0.1 * step @ c, 1e-9)
        assert max(optimizer._whitening.layers[""].forward.factor.inverse.shape[-1], 1) <= max_dim
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("features", [1, 97, 4096, 4097, 5000, 50_000, 50_257, 10**6])
def test_no_side_takes_more_memory_than_one_block_of_max_dim(features):
    blocks = Limits().blocks(features)
    assert blocks.features == features
    assert blocks.entries <= max(4096**2, features)
    assert features > 4096 or blocks == Blocks(features)


WIDE = """
import resource, torch, bprong
from torch import nn
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
model = nn.Sequential(nn.Linear(50_000, 8), nn.ReLU(), nn.Linear(8, 50_000))
optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
for _ in range(2):
    torch.nn.functional.cross_entropy(model(torch.randn(16, 50_000)), torch.arange(16)).backward()
    optimizer.step()
layers = optimizer._whitening.layers
print(layers["0"].forward.factor.inverse.shape, layers["2"].backward.factor.inverse.shape)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.rest
def test_fifty_thousand_inputs_and_outputs_fit():
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([150, 334, 334]) torch.Size([150, 334, 334])"
