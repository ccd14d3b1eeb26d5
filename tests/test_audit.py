"""The audit, compared with Fisher matrices summed example by example."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.audit import fisher_factors, fisher_matrices, identity_measures, matrix_measures, second_moments
from bprong.experiments.auditing import in_three_coordinates
from bprong.linalg import moments
from helpers import assert_close, classification, mlp


def brute_force_G(model, x):
    """Σ over examples and classes of p · score scoreᵀ, with scores from autograd; vec stacks the columns of (b, W)."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    total = 0
    for row in x:
        output = model(row[None])
        for k, p in enumerate(output.softmax(-1)[0].detach()):
            nll = F.cross_entropy(output, torch.tensor([k]))
            parameters = [t for m in layers for t in (m.bias, m.weight)]
            grads = torch.autograd.grad(nll, parameters, retain_graph=True)
            parts = [
                torch.cat([b[:, None], W], dim=1).T.reshape(-1) for b, W in zip(grads[::2], grads[1::2], strict=True)
            ]
            score = torch.cat(parts)
            total = total + p * torch.outer(score, score) / len(x)
    return total


def test_the_exact_matrix_is_the_brute_force_one():
    model = mlp(4, 3, 3)
    x, _ = classification(15, 4, 3)
    G = fisher_matrices(fisher_factors(model, x, "cross_entropy"))["exact"]
    assert_close(G, brute_force_G(model, x), 1e-12)


def test_the_kronecker_forms_are_those_of_the_paper():
    """G̃_ij = E[z̄_i z̄_jᵀ] ⊗ E[δ_i δ_jᵀ], Ğ its diagonal blocks."""
    model = mlp(4, 3, 3)
    x, _ = classification(15, 4, 3)
    found = fisher_factors(model, x, "cross_entropy")
    matrices = fisher_matrices(found)
    z0 = torch.cat([torch.ones(15, 1, dtype=torch.float64), x], dim=1)
    z1 = torch.cat([torch.ones(15, 1, dtype=torch.float64), model[1](model[0](x)).detach()], dim=1)
    output = model(x).detach()
    p = output.softmax(-1)
    D01 = torch.zeros(3, 3, dtype=torch.float64)
    D11 = torch.zeros(3, 3, dtype=torch.float64)
    for n in range(15):
        for k in range(3):
            d1 = p[n] - F.one_hot(torch.tensor(k), 3)
            d0 = (1 - z1[n, 1:] ** 2) * (model[2].weight.detach().T @ d1)
            D01 += p[n, k] * torch.outer(d0, d1) / 15
            D11 += p[n, k] * torch.outer(d1, d1) / 15
    assert_close(matrices["kronecker"][:15, 15:], torch.kron(z0.T @ z1 / 15, D01), 1e-12)
    assert_close(matrices["block"][15:, 15:], torch.kron(z1.T @ z1 / 15, D11), 1e-12)
    assert_close(matrices["block"][:15, 15:], torch.zeros(15, 12), 0)


def test_for_one_gaussian_layer_all_three_matrices_agree():
    x, _ = classification(20, 4, 3)
    matrices = fisher_matrices(fisher_factors(mlp(4, 3), x, "gaussian"))
    assert_close(matrices["exact"], matrices["block"], 1e-12)
    assert_close(matrices["kronecker"], matrices["block"], 1e-12)


def test_bidirectional_whitening_without_damping_makes_the_block_matrix_the_identity():
    x, _ = classification(60, 5, 3)
    model = bprong.whiten_(mlp(5, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.Rewhitening(
        model, optimizer, "gaussian", fisher="exact", forward_damping=0, backward_damping=0,
        forward_every=1, backward_every=1, backward_offset=0,
    ).step(x)  # fmt: skip
    report = bprong.audit(model, x, "gaussian")
    block = report["matrices"]["block"]
    assert block["distance"] < 1e-8
    assert block["condition"] == pytest.approx(1, abs=1e-7)
    assert block["near_one"] == block["rank"] == 1
    assert all(side < 1e-8 for layer in report["layers"].values() for side in layer.values())
    # The exact matrix has blocks of the same trace but is not the identity: the approximation leaves that out.
    assert report["matrices"]["exact"]["distance"] > 0.01


def test_whitening_keeps_the_function_and_brings_the_matrix_closer_to_the_identity():
    x, _ = classification(200, 5, 3)
    networks = in_three_coordinates(mlp(5, 4, 3), x, 1e-3, 1e-4)
    for model in networks.values():
        assert_close(model(x), networks["plain"](x), 1e-9)
    distance = {
        name: bprong.audit(m, x, "cross_entropy")["matrices"]["block"]["distance_scaled"]
        for name, m in networks.items()
    }
    assert distance["bidirectional"] < distance["whitened"] < distance["plain"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backward", [True, False, None])
def test_second_moments_alone_give_the_same_block_measures(bias, backward, monkeypatch):
    x, _ = classification(50, 5, 3)
    model = mlp(5, 4, 3, bias=bias)
    if backward is not None:
        model = in_three_coordinates(model, x, 0.1, 0.1)["bidirectional" if backward else "whitened"]
    full = bprong.audit(model, x, "cross_entropy")
    monkeypatch.setattr(importlib.import_module("bprong.audit"), "EXACT_UP_TO", 0)  # bprong.audit is the function
    cheap = bprong.audit(model, x, "cross_entropy")
    assert set(cheap["matrices"]) == {"block"}
    assert cheap["parameters"] == full["parameters"] == (4 * (5 + bias) + 3 * (4 + bias))
    for key, value in full["matrices"]["block"].items():
        if key != "condition":  # it depends on eigenvalues near rounding
            assert cheap["matrices"]["block"][key] == pytest.approx(value, abs=1e-6), key
    for name, sides in full["layers"].items():
        assert cheap["layers"][name] == pytest.approx(sides, rel=1e-6)


def test_second_moments_of_many_outputs_store_no_errors_and_are_summed_in_float64(monkeypatch):
    """Errors of all examples and outputs took gigabytes; products in float32 would hide what rank they have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 40))
    x = torch.randn(300, 8)
    exact = {layer.name: layer.D(layer) for layer in fisher_factors(model, x, "cross_entropy")}
    longest = []
    add_products_ = moments.add_products_
    monkeypatch.setattr(moments, "add_products_", lambda s, r, k=1.0: longest.append(len(r)) or add_products_(s, r, k))
    sides = second_moments(model, x, "cross_entropy")
    assert max(longest) <= len(x)
    for name, (_, D) in sides.items():
        assert_close(D, exact[name], 1e-12)


def test_a_stock_layer_of_any_width_is_one_block_and_padded_rows_count():
    """Wider than what is whitened as one block; and a mask of positions does not take rows away."""
    wide = nn.Sequential(nn.Linear(3, 5000), nn.Linear(5000, 2)).double()
    first, second = fisher_factors(wide, torch.randn(2, 3, dtype=torch.float64), "cross_entropy")
    assert first.delta.shape == (2, 2, 1, 5000)
    assert second.z_bar.shape == (2, 1, 5001)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 3:] = True
    factors = fisher_factors(layer, (x, None, padding), "mse")
    assert [tuple(one.z_bar.shape) for one in factors] == [(4, 5, 9), (4, 5, 17)]


def test_a_layer_that_is_called_twice_is_refused():
    shared = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="0 is called more than once"):
        bprong.audit(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(4, 3), "mse")


def test_measures_of_known_eigenvalues():
    m = identity_measures(torch.tensor([4.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    assert m["distance"] == pytest.approx((9 + 1) ** 0.5 / 2)
    assert m["condition"] == 4
    assert m["rank"] == 0.75
    assert m["near_one"] == 0.5
    assert m["distance_scaled"] == pytest.approx((1 - 36 / (4 * 18)) ** 0.5)
    scaled = identity_measures(torch.full((3,), 7.0, dtype=torch.float64))
    assert scaled["distance_scaled"] == 0
    assert scaled["distance"] == pytest.approx(6)


def test_off_block_is_the_fraction_outside_the_diagonal_blocks():
    G = torch.ones(4, 4, dtype=torch.float64)
    assert matrix_measures(G, [2, 2])["off_block"] == pytest.approx(0.5)
    assert matrix_measures(torch.eye(4, dtype=torch.float64), [2, 2])["off_block"] == 0


def test_sequences_have_exact_and_block_matrices():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, x):
            return self.layer(x)

    x = torch.randn(4, 5, 3, dtype=torch.float64)
    report = bprong.audit(Sequence(), x, "cross_entropy")
    flat = bprong.audit(nn.Sequential(Sequence().layer), x.reshape(-1, 3), "cross_entropy")
    assert set(report["matrices"]) == {"exact", "block"}
    assert report["parameters"] == flat["parameters"] == 8


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (nn.Sequential(nn.ReLU()), torch.ones(2, 3), "no nn.Linear"),
        (nn.Sequential(nn.Linear(3, 2)), torch.full((2, 3), float("nan")), "not finite"),
    ],
)
def test_models_that_cannot_be_audited_are_refused(model, x, message):
    with pytest.raises(ValueError, match=message):
        bprong.audit(model, x, "cross_entropy")


def test_the_default_device_does_not_matter(monkeypatch):
    """With `meta` as the default device, a tensor made without naming a device would not mix with the others."""
    x, _ = classification(20, 5, 3)
    model = in_three_coordinates(mlp(5, 4, 3), x, 0.1, 0.1)["bidirectional"]
    for exact_up_to in (3000, 0):
        monkeypatch.setattr(importlib.import_module("bprong.audit"), "EXACT_UP_TO", exact_up_to)
        expected = bprong.audit(model, x, "cross_entropy")
        with torch.device("meta"):
            assert bprong.audit(model, x, "cross_entropy") == expected


def test_the_report_contains_plain_numbers_only():
    import json

    x, _ = classification(20, 5, 3)
    assert json.loads(json.dumps(bprong.audit(mlp(5, 3), x, "cross_entropy")))["parameters"] == 18
