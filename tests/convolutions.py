"""Small convolutional problems, and the formula of a whitened convolution written literally."""

import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.linalg.moments import Blocks

f64 = torch.float64
FORMS = {"full": {}, "blocks": {"max_dim": 9}, "blocks of outputs": {"max_dim": 3}, "diagonal": {"max_dim": 1}}


def invertible(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=f64, generator=generator) + 3 * torch.eye(shape[-1], dtype=f64)


def moved(layer, seed=0):
    """The layer in some other coordinates."""
    layer.rewhiten_("forward", invertible(layer.U.shape, seed), torch.randn(layer.c.shape, dtype=f64) * layer.centred)
    if layer.R is not None:
        layer.rewhiten_("backward", invertible(layer.R.shape, seed + 1))
    return layer


def whitened(conv, form="full", backward=True, seed=0):
    model = bprong.whiten_(nn.Sequential(conv), backward=backward, **FORMS[form])
    moved(model[0], seed)
    return model


def dense(blocks: Blocks, matrices):
    """The matrix of each group, (groups, features, features), from what a side holds."""
    split = matrices.detach().reshape(blocks.groups, blocks.count, blocks.size, blocks.size)
    return torch.stack([torch.block_diag(*group) for group in split])


def sides(layer):
    """U (G, d, d), c (G, 1, d) and R (G, out/G, out/G), spread out."""
    k = layer.forward_blocks
    return dense(k, layer.U), layer.c.reshape(k.groups, 1, -1), dense(layer.backward_blocks, layer.R)


def rows(conv, x):
    """z of every example, group and position, (N, G, positions, d), padded as torch itself says."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode)
    z = F.unfold(x, conv.kernel_size, conv.dilation, 0, conv.stride)
    return z.unflatten(1, (conv.groups, -1)).mT


def literal(layer, conv, z_centred):
    """Rᵀ (W† U (z − c) + b†), position by position."""
    U, _, R = sides(layer)
    G = conv.groups
    a = z_centred @ U.mT @ layer.weight_dagger.reshape(G, -1, U.shape[-1]).mT
    if layer.bias_dagger is not None:
        a = a + layer.bias_dagger.reshape(G, 1, -1)
    return (a @ R).mT.flatten(1, 2)


def images(n=3, dtype=f64):
    return torch.randn(n, 4, 7, 8, dtype=dtype) + 2


def net(bias=True):
    """Two groups, a stride, a reflected border, and a linear layer at the end; 3 outputs of images (2, 5, 5)."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2, bias=bias), nn.Tanh(),
        nn.Conv2d(4, 4, 2, stride=2, padding=1, padding_mode="reflect"), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3),
    ).double()  # fmt: skip


def batch(n=24):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 2, 5, 5, dtype=f64, generator=generator).cumsum(-1) + 1
    return x, (x.mean((1, 2, 3)) > 1).long() + (x[:, 0].amax((1, 2)) > 4).long()
