"""Attention, embeddings and recurrent cells take the path of the same network written out with `nn.Linear`.

The oracle of `nn.Linear` itself is the paper's network (tests/optim/test_optimizer.py). Attention and recurrent cells
are linear layers and a few formulas, an embedding is a linear layer on one-hot vectors; for convolutions see
test_convolution.py. float64, exact Fisher matrix, momentum, several refreshes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from helpers import SelfAttention, assert_close, mlp, quick_cases, snapshot
from layered import Attention, OneHot, assert_one_path, walk
from training import EXACT


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Attention ------------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Attention of a sequence to itself, to another sequence, or to two others for keys and values."""

    def __init__(self, attention, kind, sizes):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.attention = attention
        self.head = nn.Linear(4, 3)
        self.other = nn.Linear(4, sizes[0])
        self.third = nn.Linear(4, sizes[1])
        self.kind = kind
        unused = {"self": (self.other, self.third), "memory": (self.third,), "three": ()}[kind]
        for layer in unused:
            layer.requires_grad_(False)

    def forward(self, x):
        z = self.first(x)
        if self.kind == "self":
            given = (z, z, z)
        elif self.kind == "memory":
            memory = self.other(x[:, :3])
            given = (z, memory, memory)
        else:
            given = (z, self.other(x[:, :3]), self.third(x[:, :3]))
        return self.head(self.attention(*given, need_weights=False)[0])


ATTENTIONS = [("self", (4, 4)), ("memory", (4, 4)), ("memory", (5, 5)), ("three", (4, 4)), ("three", (5, 6))]


@pytest.mark.parametrize(("kind", "sizes"), quick_cases(ATTENTIONS, ATTENTIONS[0], ATTENTIONS[-1]))
@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_its_projections(kind, bias, sizes):
    mha = nn.MultiheadAttention(4, 2, bias=bias, kdim=sizes[0], vdim=sizes[1], batch_first=True)
    if bias:
        nn.init.normal_(mha.in_proj_bias)
    assert (mha.in_proj_weight is None) == (sizes != (4, 4))
    written_out = Attention(mha)
    x = torch.randn(12, 4, 4)
    y = torch.randint(3, (12, 4))
    optimizer = assert_one_path(Attending(mha, kind, sizes), Attending(written_out, kind, sizes), x, y)
    assert {"attention.q", "attention.k", "attention.v", "attention.out_proj"} <= set(optimizer._whitening.layers)
    assert optimizer.report().fallback == {}


def test_a_transformer_encoder_layer_is_covered_except_for_its_norms():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3))
    x = torch.randn(12, 5, 8)
    y = torch.randint(3, (12, 5))
    outputs, optimizer = walk(model, x, y)
    layers = optimizer._whitening.layers
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out_proj", "linear1", "linear2")
    assert set(layers) == {f"0.{part}" for part in parts} | {"1"}
    assert all(layer.forward.factor is not None and layer.backward.factor is not None for layer in layers.values())
    assert {name.split(".")[1] for name in optimizer.report().fallback} == {"norm1", "norm2"}
    assert torch.isfinite(outputs).all()


def test_the_bias_of_keys_and_values_falls_back():
    mha = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    x = torch.randn(12, 4, 4)
    y = torch.randint(3, (12, 4))
    _, optimizer = walk(Attending(mha, "self", (4, 4)), x, y)
    assert optimizer.report().fallback == {
        "attention.bias_k": "in MultiheadAttention", "attention.bias_v": "in MultiheadAttention"
    }  # fmt: skip


def test_packed_parameters_are_decayed_once():
    mha = nn.MultiheadAttention(4, 2, batch_first=True)
    nn.init.normal_(mha.in_proj_bias)
    model = SelfAttention(mha, nn.Linear(4, 3))
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1, weight_decay=0.5)
    F.cross_entropy(model(torch.randn(5, 3, 4)).flatten(0, 1), torch.arange(15) % 3).backward()
    optimizer.step()
    before = snapshot(model)
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    for name, value in before.items():
        assert_close(model.state_dict()[name], value * 0.95, 1e-6, name)


# Embeddings -----------------------------------------------------------------------------------------------------------


def test_an_embedding_is_a_linear_layer_on_one_hot_vectors():
    embedding = nn.Embedding(7, 4)
    tokens = torch.randint(6, (12, 3))
    y = torch.randint(3, (12, 3))  # the seventh word is never seen
    head = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(head.state_dict())
    model = nn.Sequential(embedding, nn.Tanh(), head)
    optimizer = assert_one_path(model, nn.Sequential(OneHot(embedding), nn.Tanh(), other), tokens, y)
    assert optimizer._whitening.layers["0"].forward.factor.inverse.shape == (7, 1, 1)


def test_the_padding_of_an_embedding_does_not_count():
    def model(padding_idx):
        torch.manual_seed(2)
        return nn.Sequential(nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 3))

    tokens = torch.tensor([[1, 2, 6], [3, 6, 6], [4, 5, 1]])
    with_padding = model(6)
    optimizer = bprong.BPRONG(with_padding, "cross_entropy", lr=0.01, options={"fisher": "exact", "average": 0.0})
    F.cross_entropy(with_padding(tokens).flatten(0, 1), torch.randint(3, (9,))).backward()
    optimizer.step()
    layer = optimizer._whitening.layers["0"]
    assert layer.forward.moments.weight == 6
    assert layer.forward.moments.second.flatten().tolist() == [0, 2 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 0]
    assert torch.equal(with_padding[0].weight[6], torch.zeros(4))
    plain = model(None)  # the same errors, of which those at padding are left out of D
    plain[0].weight.data[6] = 0
    reference = bprong.BPRONG(plain, "cross_entropy", lr=0.01, options={"fisher": "exact", "average": 0.0})
    F.cross_entropy(plain(tokens).flatten(0, 1), torch.randint(3, (9,))).backward()
    reference.step()
    D = reference._whitening.layers["0"].backward.moments.second
    assert torch.linalg.eigvalsh(D - layer.backward.moments.second).min() > -1e-12
    assert float(layer.backward.moments.second.trace()) < float(D.trace())


def test_sparse_and_rescaled_embeddings_follow_the_fallback_rule_and_sparse_gradients_are_refused():
    rescaled = nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    assert list(bprong.coverage(rescaled).fallback) == ["0.weight"]
    sparse = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3))
    assert "sparse=True" in bprong.coverage(sparse).fallback["0.weight"]
    optimizer = bprong.BPRONG(sparse, "cross_entropy", lr=0.01)
    F.cross_entropy(sparse(torch.tensor([1, 2])), torch.tensor([0, 1])).backward()
    with pytest.raises(TypeError, match="use sparse=False"):
        optimizer.step()


# Recurrent cells ------------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """A cell unrolled in Python over time, its last state read out."""

    def __init__(self, cell, written_out):
        super().__init__()
        torch.manual_seed(5)
        self.ih = nn.Linear(3, cell.weight_ih.shape[0])
        self.hh = nn.Linear(4, cell.weight_ih.shape[0])
        self.cell = cell
        self.head = nn.Linear(4, 3)
        self.written_out = written_out
        for linear, W, b in ((self.ih, cell.weight_ih, cell.bias_ih), (self.hh, cell.weight_hh, cell.bias_hh)):
            linear.weight.data = W.data.clone()
            linear.bias.data = b.data.clone()
        cell.requires_grad_(not written_out)
        nn.ModuleList([self.ih, self.hh]).requires_grad_(written_out)

    def step(self, x, h, c):
        if not self.written_out:
            state = self.cell(x, (h, c) if isinstance(self.cell, nn.LSTMCell) else h)
            return state if isinstance(state, tuple) else (state, c)
        a = self.ih(x)
        r = self.hh(h)
        if isinstance(self.cell, nn.LSTMCell):
            i, f, g, o = (a + r).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c
        if isinstance(self.cell, nn.GRUCell):
            reset, update = torch.sigmoid(a[:, :8] + r[:, :8]).chunk(2, 1)
            new = torch.tanh(a[:, 8:] + reset * r[:, 8:])
            return (1 - update) * new + update * h, c
        return (torch.relu if self.cell.nonlinearity == "relu" else torch.tanh)(a + r), c

    def forward(self, x):
        h = x.new_zeros(len(x), 4)
        c = h
        for t in range(x.shape[1]):
            h, c = self.step(x[:, t], h, c)
        return self.head(h)


@pytest.mark.parametrize(
    "cell",
    [
        nn.LSTMCell(3, 4, dtype=torch.float64),
        nn.GRUCell(3, 4, dtype=torch.float64),
        nn.RNNCell(3, 4, dtype=torch.float64),
        nn.RNNCell(3, 4, nonlinearity="relu", dtype=torch.float64),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_an_unrolled_cell_is_two_linear_layers(cell):
    x = torch.randn(12, 5, 3)
    y = torch.randint(3, (12,))
    written_out = Unrolled(copy.deepcopy(cell), written_out=True)
    optimizer = assert_one_path(Unrolled(copy.deepcopy(cell), written_out=False), written_out, x, y, lr=0.02)
    layers = optimizer._whitening.layers.items()
    assert {"cell.weight_ih", "cell.weight_hh", "head"} == {
        name for name, layer in layers if layer.forward.refreshed_at is not None
    }


def test_recurrent_layers_follow_the_fallback_rule():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4)
            self.gru = nn.GRU(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.gru(self.lstm(x)[0])[0])

    x = torch.randn(12, 5, 3)
    y = torch.randint(3, (12, 5))
    with pytest.warns(bprong.WhiteningWarning, match="95% .* in LSTM, in GRU"):
        outputs, optimizer = walk(Reader(), x, y)
    assert torch.isfinite(outputs).all()
    fallback = optimizer.report().fallback
    assert fallback["lstm.weight_ih_l0"] == "in LSTM"
    assert fallback["gru.bias_hh_l0"] == "in GRU"
    assert "not whitened (Adam): lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, … (in LSTM)" in str(
        optimizer.report()
    )


# Biases ---------------------------------------------------------------------------------------------------------------


def test_a_new_centre_does_not_move_the_bias_if_the_weight_does_not_move():
    """With the weight's learning rate at zero, a new centre has nothing to add to the bias's velocity."""
    model = mlp(4, 3)
    x = torch.randn(20, 4, dtype=torch.float64)
    y = torch.arange(20) % 3
    linear = model[0]
    groups = [{"params": [linear.weight], "lr": 0.1}, {"params": [linear.bias], "lr": 0.01}]
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01, params=groups, momentum=0.9, every=2, options=EXACT)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.state[linear.bias]["momentum_buffer"].clone()
    for p in model.parameters():
        p.grad.zero_()
    model(x + 5).sum().mul(0).backward()
    optimizer.step()
    assert_close(optimizer.state[linear.bias]["momentum_buffer"], 0.9 * before, 1e-9)
