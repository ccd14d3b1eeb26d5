"""The small networks of the benchmarks, and the sequences that one of them sorts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bprong.experiments.data import LONGEST, NO_TARGET, PAD, SHORTEST, SYMBOLS, sequences_to_sort
from bprong.experiments.models import digits_convnet, sequence_transformer

MODELS = [digits_convnet, sequence_transformer]


@pytest.mark.parametrize("build", MODELS)
def test_weights_come_from_the_seed_alone(build):
    before = torch.random.get_rng_state()
    first, again, other = (build(seed).state_dict() for seed in (7, 7, 8))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim > 1)


def test_the_convnet_has_a_plain_a_strided_and_a_grouped_convolution():
    model = digits_convnet(0)
    convolutions = [m for m in model if isinstance(m, nn.Conv2d)]
    assert [(m.stride[0], m.groups) for m in convolutions] == [(1, 1), (2, 1), (1, 4)]
    assert model(torch.randn(5, 1, 8, 8)).shape == (5, 10)


def test_the_transformer_has_embeddings_attention_norms_and_an_untied_head():
    model = sequence_transformer(0)
    x, _ = sequences_to_sort(5, seed=0)
    assert model(x).shape == (5, LONGEST, SYMBOLS + 1)
    assert model(x[:, :SHORTEST]).shape == (5, SHORTEST, SYMBOLS + 1)
    kinds = {kind: sum(isinstance(m, kind) for m in model.modules()) for kind in (nn.Embedding, nn.MultiheadAttention)}
    assert kinds == {nn.Embedding: 2, nn.MultiheadAttention: 2}
    assert model.head.weight is not model.token.weight
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("training", [True, False])
def test_the_transformer_ignores_padding(training):
    """The output for a sequence is the same with and without padding."""
    model = sequence_transformer(0).double().train(training)
    x, _ = sequences_to_sort(20, seed=0)
    with torch.no_grad():
        together = model(x)
        for tokens, logits in zip(x, together, strict=True):
            length = int((tokens != PAD).sum())
            torch.testing.assert_close(model(tokens[None, :length])[0], logits[:length], rtol=0, atol=1e-12)
        other = torch.where(x == PAD, PAD, x % SYMBOLS + 1)
        assert not torch.allclose(model(other), together)  # while symbols are looked at


def test_targets_are_the_sorted_sequences():
    x, y = sequences_to_sort(200, seed=3)
    lengths = set()
    for tokens, targets in zip(x.tolist(), y.tolist(), strict=True):
        symbols = [token for token in tokens if token != PAD]
        padding = LONGEST - len(symbols)
        lengths.add(len(symbols))
        assert tokens == symbols + [PAD] * padding
        assert targets == sorted(symbols) + [NO_TARGET] * padding
    assert lengths == set(range(SHORTEST, LONGEST + 1))
    assert set(x.flatten().tolist()) == set(range(SYMBOLS + 1))


def test_sequences_come_from_the_seed_alone():
    before = torch.random.get_rng_state()
    (x, y), (again, _), (other, _) = (sequences_to_sort(9, seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert x.dtype == y.dtype == torch.int64


def test_outputs_at_padded_targets_do_not_affect_the_loss():
    _, y = sequences_to_sort(6, seed=0)
    logits = torch.randn(6, LONGEST, SYMBOLS + 1, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    touched = logits.grad.abs().sum(-1) > 0
    assert torch.equal(touched, y != NO_TARGET)
