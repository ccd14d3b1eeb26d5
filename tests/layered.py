"""A convolutional network and a transformer, both small, for the tests of the optimizer's compatibility table.

Both are in float64. The transformer's sequences are padded: padding is masked in attention and its targets are left out
of the loss. Below, every kind of layer is written out with `nn.Linear` on rows, to compare its training with.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from helpers import assert_close, snapshot
from training import EXACT, batches

PADDING = 0
LENGTH = 4
CLASSES = 3


class Stack(nn.Module):
    """Blocks in an order of their own, checkpointed or not."""

    order = (0, 1)
    reentrant = None

    def run(self, z, *args):
        for block in (self.blocks[i] for i in self.order):
            z = block(z, *args) if self.reentrant is None else checkpoint(block, z, *args, use_reentrant=self.reentrant)
        return z


class Conv(Stack):
    def __init__(self, blocks=2, dropout=0.0, phi=nn.ReLU, norm=lambda c: nn.GroupNorm(2, c)):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.norm = norm(4)
        self.phi = phi()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), phi(), nn.Dropout2d(dropout)) for _ in range(blocks)
        )
        self.flatten = nn.Flatten()
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.head(self.flatten(self.run(self.phi(self.norm(self.first(x))))))


class Transformer(Stack):
    def __init__(self, blocks=2, dropout=0.0, phi=F.relu):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.randn(LENGTH, 4))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 6, dropout, activation=phi, batch_first=True) for _ in range(blocks)
        )
        for block in self.blocks:
            nn.init.normal_(block.self_attn.in_proj_bias)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.head(self.run(self.embed(tokens) + self.positions, None, tokens == PADDING))


def make(problem, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return {"conv": Conv, "transformer": Transformer}[problem](**options).to(dtype)


def data(problem, steps, size=8, dtype=torch.float64):
    random = torch.Generator().manual_seed(2)
    if problem == "conv":
        x = torch.randn(24, 2, 6, 6, dtype=dtype, generator=random) + 0.5
        y = torch.randint(CLASSES, (24,), generator=random)
    else:
        x = torch.randint(1, 7, (24, LENGTH), generator=random)
        y = torch.randint(CLASSES, (24, LENGTH), generator=random)
        beyond = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (24, 1), generator=random)
        x[beyond] = PADDING
        y[beyond] = -100
    return list(batches(x, y, size, steps))


def loss_of(output, y, total=None):
    total = (y != -100).sum() if total is None else total
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum") / total


def train(model, optimizer, data, call=None, observe=False):
    for x, y in data:
        optimizer.zero_grad()
        if observe:
            optimizer.observe(x, y)
        loss_of((model if call is None else call)(x), y).backward()
        optimizer.step()


def build(model, kind=bprong.BPRONG, **settings):
    return kind(
        model,
        **(
            {"loss": "cross_entropy", "lr": 0.05, "momentum": 0.5, "every": 3, "max_step": None, "options": EXACT}
            | settings
        ),
    )


def path(problem, model, steps=7, call=None, observe=False, **settings):
    start = snapshot(model)
    train(model, build(model, **settings), data(problem, steps), call, observe)
    end = snapshot(model)
    assert all(not torch.equal(start[name], value) for name, value in end.items())  # every parameter has moved
    return end


def written_out(model):
    """The same network with `nn.Linear` on rows for every layer that is whitened."""
    model = copy.deepcopy(model)
    if isinstance(model, Conv):
        model.first = OnPatches(model.first)
        for block in model.blocks:
            block[0] = OnPatches(block[0])
        return model.double()
    model.embed = OneHot(model.embed)
    for block in model.blocks:
        block.self_attn = Attending(block.self_attn)
    return model.double()


# Layers written out with nn.Linear ------------------------------------------------------------------------------------


class OnPatches(nn.Module):
    """A convolution as linear layers, one for each group, on patches cut out one by one."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.groups = conv.groups
        self.nd = conv.weight.ndim - 2
        self.kernel = conv.kernel_size
        self.stride = conv.stride
        self.dilation = conv.dilation
        self.mode = {"zeros": "constant"}.get(conv.padding_mode, conv.padding_mode)
        self.padding = conv._reversed_padding_repeated_twice
        d = conv.weight[0].numel()
        out = conv.out_channels // conv.groups
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


class Attention(nn.Module):
    """Multi-head attention with a linear layer for each projection."""

    def __init__(self, mha: nn.MultiheadAttention):
        super().__init__()
        self.heads = mha.num_heads
        E = mha.embed_dim
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
        q = self.q(query)
        k = self.k(key)
        v = self.v(value)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if (mask := options.get("key_padding_mask")) is not None:
            scores = scores.masked_fill(mask[:, None, None], -torch.inf)
        a = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        return self.out(a), None


class Attending(Attention):
    def forward(self, query, key, value, **options):
        mask = options["key_padding_mask"] == -torch.inf  # an encoder layer has made numbers of it
        return super().forward(query, key, value, key_padding_mask=mask)


class OneHot(nn.Module):
    """An embedding as a linear layer without a bias on one-hot vectors, padding left out."""

    def __init__(self, embedding):
        super().__init__()
        self.linear = nn.Linear(*embedding.weight.shape, bias=False)
        self.linear.weight.data = embedding.weight.data.T.clone()

    def forward(self, tokens):
        return self.linear(F.one_hot(tokens, self.linear.in_features).to(self.linear.weight))


SETTINGS = {
    "loss": "cross_entropy", "lr": 0.05, "momentum": 0.8, "every": 3, "max_step": None,
    "options": {"fisher": "exact", "average": 0.5},
}  # fmt: skip


def walk(model, x, y, steps=8, **settings):
    """Train a model; its outputs after every step, and the optimizer."""
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


def stepped(model, x, y, loss="cross_entropy", **settings):
    """An optimizer after its first step, at which everything is measured."""
    optimizer = bprong.BPRONG(model, loss, **({"lr": 0.01, "options": EXACT} | settings))
    output = model(x)
    F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    return optimizer
