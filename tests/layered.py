"""A convolutional network and a transformer, both small, for the tests of the optimizer's compatibility table.

Both are in float64. The transformer's sequences are padded: padding is masked in attention and its targets are left out
of the loss.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from helpers import snapshot
from test_every_layer import Attention, OneHot, OnPatches
from training import EXACT, batches

PADDING, LENGTH, CLASSES = 0, 4, 3


class Stack(nn.Module):
    """Blocks in an order of their own, checkpointed or not."""

    order, reentrant = (0, 1), None

    def run(self, z, *args):
        for block in (self.blocks[i] for i in self.order):
            z = block(z, *args) if self.reentrant is None else checkpoint(block, z, *args, use_reentrant=self.reentrant)
        return z


class Conv(Stack):
    def __init__(self, blocks=2, dropout=0.0, phi=nn.ReLU, norm=lambda c: nn.GroupNorm(2, c)):
        super().__init__()
        self.first, self.norm, self.phi = nn.Conv2d(2, 4, 3, padding=1, stride=2), norm(4), phi()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), phi(), nn.Dropout2d(dropout)) for _ in range(blocks)
        )
        self.flatten, self.head = nn.Flatten(), nn.Linear(36, CLASSES)

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
        x[beyond], y[beyond] = PADDING, -100
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
    return kind(model, **({"lr": 0.05, "momentum": 0.5, "every": 3, "options": EXACT} | settings))


def path(problem, model, steps=7, call=None, observe=False, **settings):
    start = snapshot(model)
    train(model, build(model, **settings), data(problem, steps), call, observe)
    end = snapshot(model)
    assert all(not torch.equal(start[name], value) for name, value in end.items())  # it went somewhere, all of it
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


class Attending(Attention):
    def forward(self, query, key, value, **options):
        mask = options["key_padding_mask"] == -torch.inf  # an encoder layer has made numbers of it
        return super().forward(query, key, value, key_padding_mask=mask)
