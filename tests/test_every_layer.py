"""Layers people use, each against the same network written out with `nn.Linear` on rows: one and the same path.

The oracle of `nn.Linear` itself is the paper's network (test_optimizer.py). Here a convolution is a linear layer on
patches, attention and recurrent cells are linear layers and a few formulas, an embedding is a linear layer on one-hot
vectors. float64, exact Fisher matrix, momentum, several refreshes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from helpers import assert_close

SETTINGS = {"lr": 0.05, "momentum": 0.8, "every": 3, "options": {"fisher": "exact", "average": 0.5}}


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def walk(model, x, y, steps=8, **settings):
    """Where a model goes: its outputs after every step."""
    optimizer = bprong.BPRONG(model, **(SETTINGS | settings))
    outputs = []
    for t in range(steps):
        part = [torch.roll(v, 3 * t, 0)[:9] for v in (x if isinstance(x, tuple) else (x,))]
        target = torch.roll(y, 3 * t, 0)[:9]
        optimizer.zero_grad()
        output = model(*part)
        F.cross_entropy(output.flatten(0, -2), target.flatten()).backward()
        optimizer.step()
        with torch.no_grad():
            outputs.append(model(*part))
    return torch.stack(outputs), optimizer


def assert_one_path(model, written_out, x, y, rtol=1e-9, **settings):
    for ours, theirs in zip(model.parameters(), written_out.parameters(), strict=False):
        assert ours.dtype == theirs.dtype == torch.float64
    ours, optimizer = walk(model, x, y, **settings)
    theirs, _ = walk(written_out, x, y, **settings)
    assert not torch.allclose(ours[0], ours[-1])
    assert_close(ours, theirs, rtol)
    return optimizer


# Convolutions ---------------------------------------------------------------------------------------------------------


class OnPatches(nn.Module):
    """A convolution as linear layers, one a group, on patches cut out one by one."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.groups, self.nd = conv.groups, conv.weight.ndim - 2
        self.kernel, self.stride, self.dilation = conv.kernel_size, conv.stride, conv.dilation
        self.mode = {"zeros": "constant"}.get(conv.padding_mode, conv.padding_mode)
        self.padding = conv._reversed_padding_repeated_twice
        d, out = conv.weight[0].numel(), conv.out_channels // conv.groups
        self.linears = nn.ModuleList(nn.Linear(d, out, bias=conv.bias is not None) for _ in range(conv.groups))
        for g, linear in enumerate(self.linears):
            linear.weight.data = conv.weight.data[g * out : (g + 1) * out].flatten(1).clone()
            if conv.bias is not None:
                linear.bias.data = conv.bias.data[g * out : (g + 1) * out].clone()

    def forward(self, x):
        x = F.pad(x, self.padding, mode=self.mode)
        sizes = [
            (x.shape[2 + i] - self.dilation[i] * (self.kernel[i] - 1) - 1) // self.stride[i] + 1 for i in range(self.nd)
        ]
        cut = []
        for position in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, self.nd).tolist():
            window = x
            for i, p in enumerate(position):
                at = [p * self.stride[i] + self.dilation[i] * k for k in range(self.kernel[i])]
                window = window.index_select(2 + i, torch.tensor(at))
            cut.append(window)
        z = torch.stack(cut, 1)  # (N, positions, C, *kernel)
        parts = [f(p.flatten(2)) for f, p in zip(self.linears, z.chunk(self.groups, dim=2), strict=True)]
        return torch.cat(parts, -1).transpose(1, 2).reshape(len(x), -1, *sizes)


CONVOLUTIONS = {
    "1d": (nn.Conv1d, (4, 4, 3), {}, (7,)),
    "1d strided, dilated, padded": (nn.Conv1d, (4, 6, 3), {"stride": 2, "dilation": 2, "padding": 2}, (9,)),
    "2d": (nn.Conv2d, (2, 3, 2), {}, (4, 3)),
    "2d padded, strided": (nn.Conv2d, (2, 3, 3), {"padding": 1, "stride": (2, 1)}, (4, 3)),
    "2d same, dilated": (nn.Conv2d, (2, 3, 3), {"padding": "same", "dilation": (1, 2)}, (4, 5)),
    "2d same, even kernel": (nn.Conv2d, (2, 3, (2, 3)), {"padding": "same"}, (3, 3)),
    "2d reflected": (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "reflect"}, (4, 3)),
    "2d circular": (nn.Conv2d, (2, 3, 3), {"padding": (1, 2), "padding_mode": "circular"}, (4, 3)),
    "2d replicated": (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "replicate"}, (3, 3)),
    "2d in groups": (nn.Conv2d, (4, 6, 2), {"groups": 2}, (3, 3)),
    "2d depthwise": (nn.Conv2d, (4, 4, 3), {"groups": 4, "padding": 1}, (3, 4)),
    "2d depthwise, several each": (nn.Conv2d, (3, 6, 2), {"groups": 3}, (3, 3)),
    "2d pointwise": (nn.Conv2d, (3, 4, 1), {}, (3, 2)),
    "2d without bias": (nn.Conv2d, (2, 3, 2), {"bias": False}, (3, 3)),
    "2d in groups without bias": (nn.Conv2d, (4, 4, 2), {"bias": False, "groups": 2}, (3, 3)),
    "3d": (nn.Conv3d, (2, 3, 2), {"padding": (0, 1, 0)}, (2, 3, 2)),
    "3d in groups": (nn.Conv3d, (2, 4, (1, 2, 2)), {"groups": 2, "stride": (1, 2, 1)}, (2, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_is_a_linear_layer_on_patches(kind):
    make, args, options, size = CONVOLUTIONS[kind]
    conv = make(*args, **options)
    x, y = torch.randn(12, args[0], *size) + 0.5, torch.randint(3, (12,))
    with torch.no_grad():
        width = conv(x).flatten(1).shape[1]
    head = nn.Linear(width, 3)

    def model(first):
        copy = nn.Linear(width, 3)
        copy.load_state_dict(head.state_dict())
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), copy)

    assert_one_path(model(conv), model(OnPatches(conv)), x, y)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_in_any_memory_format(format):
    x, y = torch.randn(12, 2, 4, 4), torch.randint(3, (12,))
    first, head = nn.Conv2d(2, 3, 2), nn.Linear(27, 3)
    plain = nn.Sequential(first, nn.Tanh(), nn.Flatten(), head)
    other = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    other.load_state_dict(plain.state_dict())
    other = other.to(memory_format=format)
    assert_one_path(other, plain, x.to(memory_format=format), y)


def test_one_image_without_a_batch_dimension():
    class One(nn.Module):
        def __init__(self, squeezed):
            super().__init__()
            torch.manual_seed(1)
            self.conv, self.head, self.squeezed = nn.Conv2d(2, 3, 2), nn.Linear(27, 3), squeezed

        def forward(self, x):
            a = torch.stack([self.conv(image) for image in x]) if self.squeezed else self.conv(x)
            return self.head(torch.tanh(a).flatten(1))

    x, y = torch.randn(12, 2, 4, 4), torch.randint(3, (12,))
    assert_one_path(One(squeezed=True), One(squeezed=False), x, y)


def test_channels_only_is_one_block_that_all_taps_share():
    conv, x = nn.Conv2d(3, 4, 2, padding=1), torch.randn(9, 3, 3, 3) + 1
    model = nn.Sequential(conv, nn.Flatten(), nn.Linear(64, 3))
    optimizer = bprong.BPRONG(model, options={"channels": True, "average": 0.0}, forward_damping=0.1)
    F.cross_entropy(model(x), torch.randint(3, (9,))).backward()
    g_W, g_b = conv.weight.grad.clone(), conv.bias.grad.clone()
    W, b = conv.weight.detach().clone(), conv.bias.detach().clone()
    optimizer.step()
    layer = optimizer.statistics.layers["0"]
    taps = F.unfold(x, 2, padding=1).view(9, 3, 4, -1).permute(0, 3, 2, 1).reshape(-1, 3)  # every tap of every patch
    c = taps.mean(0)
    Z = (taps - c).T @ (taps - c) / len(taps)
    assert_close(layer.UU, torch.linalg.inv(Z + 0.1 * torch.eye(3)), 1e-10)
    centred = g_W - g_b.view(4, 1, 1, 1) * c.view(1, 3, 1, 1)
    step = torch.einsum("op,pchw,cd->odhw", layer.RR, centred, layer.UU)
    assert_close(conv.weight - W, -0.01 * step, 1e-9)
    assert_close(conv.bias - b, -0.01 * (layer.RR @ g_b) + 0.01 * torch.einsum("ochw,c->o", step, c), 1e-9)


# Attention ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention with a linear layer for each projection."""

    def __init__(self, mha: nn.MultiheadAttention):
        super().__init__()
        self.heads, E = mha.num_heads, mha.embed_dim
        packed = mha.in_proj_weight is not None
        weights = mha.in_proj_weight.chunk(3) if packed else (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight)
        biases = (None,) * 3 if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
        self.q, self.k, self.v = (self._linear(W, b) for W, b in zip(weights, biases, strict=True))
        self.out = self._linear(mha.out_proj.weight, mha.out_proj.bias)
        assert self.q.out_features == E

    @staticmethod
    def _linear(W, b):
        linear = nn.Linear(W.shape[1], len(W), bias=b is not None)
        linear.weight.data = W.data.clone()
        if b is not None:
            linear.bias.data = b.data.clone()
        return linear

    def forward(self, query, key, value, **options):
        q, k, v = self.q(query), self.k(key), self.v(value)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if (mask := options.get("key_padding_mask")) is not None:
            scores = scores.masked_fill(mask[:, None, None], -torch.inf)
        a = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        return self.out(a), None


class Attending(nn.Module):
    """What is asked of attention: of itself, of another sequence, of two."""

    def __init__(self, attention, kind, sizes):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.attention, self.head = nn.Linear(4, 4), attention, nn.Linear(4, 3)
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


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("self", (4, 4)), ("memory", (4, 4)), ("memory", (5, 5)), ("three", (4, 4)), ("three", (5, 6))],
)
@pytest.mark.parametrize("bias", [True, False])
def test_attention_is_its_projections(kind, bias, sizes):
    mha = nn.MultiheadAttention(4, 2, bias=bias, kdim=sizes[0], vdim=sizes[1], batch_first=True)
    if bias:
        nn.init.normal_(mha.in_proj_bias)
    assert (mha.in_proj_weight is None) == (sizes != (4, 4))
    written_out = Attention(mha)
    x, y = torch.randn(12, 4, 4), torch.randint(3, (12, 4))
    optimizer = assert_one_path(Attending(mha, kind, sizes), Attending(written_out, kind, sizes), x, y)
    assert {"attention.q", "attention.k", "attention.v", "attention.out_proj"} <= set(optimizer.statistics.layers)
    assert optimizer.report().fallback == {}


def test_a_transformer_encoder_layer_is_covered_but_for_its_norms():
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3))
    x, y = torch.randn(12, 5, 8), torch.randint(3, (12, 5))
    outputs, optimizer = walk(model, x, y)
    layers = optimizer.statistics.layers
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.out_proj", "linear1", "linear2")
    assert set(layers) == {f"0.{part}" for part in parts} | {"1"}
    assert all(layer.UU is not None and layer.RR is not None for layer in layers.values())
    assert {name.split(".")[1] for name in optimizer.report().fallback} == {"norm1", "norm2"}
    assert torch.isfinite(outputs).all()


def test_the_bias_of_keys_and_values_falls_back():
    mha = nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True)
    x, y = torch.randn(12, 4, 4), torch.randint(3, (12, 4))
    _, optimizer = walk(Attending(mha, "self", (4, 4)), x, y)
    assert optimizer.report().fallback == {
        "attention.bias_k": "in MultiheadAttention", "attention.bias_v": "in MultiheadAttention"
    }  # fmt: skip


# Embeddings -----------------------------------------------------------------------------------------------------------


class OneHot(nn.Module):
    """An embedding as a linear layer without a bias on one-hot vectors, padding left out."""

    def __init__(self, embedding):
        super().__init__()
        self.linear = nn.Linear(*embedding.weight.shape, bias=False)
        self.linear.weight.data = embedding.weight.data.T.clone()

    def forward(self, tokens):
        return self.linear(F.one_hot(tokens, self.linear.in_features).to(self.linear.weight))


def test_an_embedding_is_a_linear_layer_on_one_hot_vectors():
    embedding = nn.Embedding(7, 4)
    tokens, y = torch.randint(6, (12, 3)), torch.randint(3, (12, 3))  # the seventh word is never seen
    head = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(head.state_dict())
    model = nn.Sequential(embedding, nn.Tanh(), head)
    optimizer = assert_one_path(model, nn.Sequential(OneHot(embedding), nn.Tanh(), other), tokens, y)
    assert optimizer.statistics.layers["0"].UU.shape == (7, 1, 1)


def test_the_padding_of_an_embedding_does_not_count():
    def model(padding_idx):
        torch.manual_seed(2)
        return nn.Sequential(nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 3))

    tokens = torch.tensor([[1, 2, 6], [3, 6, 6], [4, 5, 1]])
    with_padding = model(6)
    optimizer = bprong.BPRONG(with_padding, options={"fisher": "exact", "average": 0.0})
    F.cross_entropy(with_padding(tokens).flatten(0, 1), torch.randint(3, (9,))).backward()
    optimizer.step()
    moments = optimizer.statistics.layers["0"].moments
    assert moments["forward"].weight == 6
    assert moments["forward"].second.flatten().tolist() == [0, 2 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 0]
    assert torch.equal(with_padding[0].weight[6], torch.zeros(4))
    plain = model(None)  # the same errors, of which those at padding are left out of D
    plain[0].weight.data[6] = 0
    reference = bprong.BPRONG(plain, options={"fisher": "exact", "average": 0.0})
    F.cross_entropy(plain(tokens).flatten(0, 1), torch.randint(3, (9,))).backward()
    reference.step()
    D = reference.statistics.layers["0"].moments["backward"].second
    assert torch.linalg.eigvalsh(D - moments["backward"].second).min() > -1e-12
    assert float(moments["backward"].second.trace()) < float(D.trace())


def test_sparse_and_rescaled_embeddings_follow_the_fallback_rule_and_sparse_gradients_are_refused():
    rescaled = nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Linear(4, 3))
    assert list(bprong.coverage(rescaled).fallback) == ["0.weight"]
    sparse = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3))
    assert "sparse=True" in bprong.coverage(sparse).fallback["0.weight"]
    optimizer = bprong.BPRONG(sparse)
    F.cross_entropy(sparse(torch.tensor([1, 2])), torch.tensor([0, 1])).backward()
    with pytest.raises(TypeError, match="use sparse=False"):
        optimizer.step()


# Recurrent cells ------------------------------------------------------------------------------------------------------


class Unrolled(nn.Module):
    """A cell unrolled in Python over time, its last state read out."""

    def __init__(self, cell, written_out):
        super().__init__()
        torch.manual_seed(5)
        self.ih, self.hh = nn.Linear(3, cell.weight_ih.shape[0]), nn.Linear(4, cell.weight_ih.shape[0])
        self.cell, self.head, self.written_out = cell, nn.Linear(4, 3), written_out
        for linear, W, b in ((self.ih, cell.weight_ih, cell.bias_ih), (self.hh, cell.weight_hh, cell.bias_hh)):
            linear.weight.data, linear.bias.data = W.data.clone(), b.data.clone()
        cell.requires_grad_(not written_out)
        nn.ModuleList([self.ih, self.hh]).requires_grad_(written_out)

    def step(self, x, h, c):
        if not self.written_out:
            state = self.cell(x, (h, c) if isinstance(self.cell, nn.LSTMCell) else h)
            return state if isinstance(state, tuple) else (state, c)
        a, r = self.ih(x), self.hh(h)
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
        h = c = x.new_zeros(len(x), 4)
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
    x, y = torch.randn(12, 5, 3), torch.randint(3, (12,))
    written_out = Unrolled(copy.deepcopy(cell), written_out=True)
    optimizer = assert_one_path(Unrolled(copy.deepcopy(cell), written_out=False), written_out, x, y, lr=0.02)
    layers = optimizer.statistics.layers.items()
    assert {"cell.ih", "cell.hh", "head"} == {name for name, layer in layers if layer.refreshed_at}


def test_recurrent_layers_follow_the_fallback_rule():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.gru, self.head = nn.LSTM(3, 4), nn.GRU(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.gru(self.lstm(x)[0])[0])

    x, y = torch.randn(12, 5, 3), torch.randint(3, (12, 5))
    outputs, optimizer = walk(Reader(), x, y)
    assert torch.isfinite(outputs).all()
    fallback = optimizer.report().fallback
    assert fallback["lstm.weight_ih_l0"] == "in LSTM"
    assert fallback["gru.bias_hh_l0"] == "in GRU"
    assert "by Adam's rule: lstm.weight_ih_l0 (in LSTM)" in str(optimizer.report())
