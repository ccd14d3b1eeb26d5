"""Which weights of a model can be whitened: each is a matrix W that maps rows of inputs z to rows of outputs a.

    a = W z + b         linear layers, attention projections and recurrent cells; convolutions, where z is a patch of
                        the input; embeddings, where z is one-hot

A `WeightMatrix` says how a parameter, and tensors shaped like it (its gradient, its momentum), form that matrix, and in
which blocks its two sides are whitened. To support another kind of module, add it to `_MAKERS` (and, if it computes
with another of torch's functions, to `calls.py`). Parameters of all other modules follow the fallback rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bprong.linalg.blocks import MAX_DIM, Blocks, blocks_of

COVERED = (
    "these can be: Linear, Conv1d, Conv2d, Conv3d, Embedding, MultiheadAttention and recurrent cells with real weights "
    "that no other layer shares. A model converted by whiten_ is trained by a torch optimizer with Rewhitening"
)


@dataclass(frozen=True)
class Limits:
    """max_dim: the largest side whitened as one block; channels: whiten convolutions by their channels only."""

    max_dim: int = MAX_DIM
    channels: bool = False


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A weight and its bias, if it has one.

    inputs, outputs:  the blocks of its two sides
    rows, bias_rows:  its rows of the weight and of the bias, where several weights are packed into one parameter
    one_hot:          an embedding: the weight is stored transposed, (in, out), and z is given as indices
    module:           the whitened layer that holds it, recorded as a module; None for the layers of torch
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    inputs: Blocks
    outputs: Blocks
    rows: slice | None = None
    bias_rows: slice | None = None
    one_hot: bool = False
    module: nn.Module | None = None

    def own(self, values: Tensor) -> Tensor:
        """This matrix's part of a tensor shaped like the parameter, as a view."""
        return values if self.rows is None else values[self.rows]

    def matrix(self, values: Tensor) -> Tensor:
        """A tensor shaped like `own(weight)` as a matrix (out, in), or (groups, out, in) with several groups."""
        if self.inputs.groups > 1:
            return values.reshape(self.inputs.groups, self.outputs.features, -1)
        return values.T if self.one_hot else values.flatten(1)

    def vector(self, values: Tensor) -> Tensor:
        """A tensor shaped like the bias as a vector (out,), or (groups, out) with several groups; a view."""
        values = values if self.bias_rows is None else values[self.bias_rows]
        return values.view(self.inputs.groups, -1) if self.inputs.groups > 1 else values

    def times(self, values: Tensor, z: Tensor) -> Tensor:
        """W z for W shaped like `own(weight)` and z (in,), or (groups, in)."""
        matrix = self.matrix(values)
        return matrix @ z if matrix.ndim == 2 else (matrix @ z.unsqueeze(-1)).squeeze(-1)

    def shaped(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`: a matrix in the shape of `own(weight)`."""
        if self.weight.ndim > 2:
            return matrix.reshape(self.weight.shape)
        return matrix.T if self.one_hot else matrix

    def cost(self, backward: bool) -> dict[str, int]:
        """What whitening this weight takes with exact inverses, on both sides or (backward=False) on the inputs only.

        memory: bytes for moments, inverses and the centre; refresh: floating-point operations to factor its sides;
        per_row: operations to measure one row; step: operations that a step takes beyond those of SGD
        """
        sides = [self.inputs, self.outputs] if backward else [self.inputs]
        kept = torch.promote_types(self.weight.dtype, torch.float32).itemsize
        features = self.inputs.groups * self.inputs.features
        centred = self.bias is not None and self.bias.requires_grad
        centre = features // self.inputs.positions * torch.float64.itemsize + features * kept if centred else 0
        return {
            "memory": sum(side.entries for side in sides) * (torch.float64.itemsize + kept) + centre,
            "refresh": sum(2 * side.entries * side.size for side in sides),  # Cholesky d³/3, its inverse 2d³/3; twice
            "per_row": sum(2 * side.entries for side in sides),
            "step": 2 * features * self.outputs.features * sum(side.size for side in sides),
        }


def weight_matrices_of(name: str, module: nn.Module, limits: Limits | None = None) -> list[WeightMatrix]:
    """The weights that a module holds itself; none unless its exact type is supported."""
    found = _MAKERS[type(module)](module, limits or Limits()) if type(module) in _MAKERS else ()
    return [replace(weight, name=".".join(filter(None, (name, weight.name)))) for weight in found]


def weight_matrix_of(name: str, layer: Any) -> WeightMatrix:
    """The only weight of a layer: a module of torch's, a whitened layer of the paper's network, or a `WeightMatrix`."""
    if isinstance(layer, WeightMatrix):
        return layer
    if hasattr(layer, "forward_blocks"):
        return WeightMatrix(
            name, layer.weight_dagger, layer.bias_dagger, layer.forward_blocks, layer.backward_blocks, module=layer
        )
    return weight_matrices_of(name, layer)[0]


def covered_weights(model: nn.Module, limits: Limits | None = None) -> Iterator[WeightMatrix]:
    """Every weight of a model that can be whitened, in the order of its modules.

    Left out are subclasses of the supported layers, because what they compute is unknown, and layers that share a
    parameter (tied weights), because its gradient is not the product of one z and one δ.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if any(isinstance(p, nn.UninitializedParameter) for p in own):
            raise ValueError(f"{name!r} has parameters without a shape yet (lazy); call the model on a batch first")
        unfit = any(uses[id(p)] > 1 or p.is_complex() for p in own)
        found = [] if unfit else weight_matrices_of(name, module, limits)
        used = {id(p) for weight in found for p in (weight.weight, weight.bias) if p is not None}
        # A weight computed from other parameters (weight norm, spectral norm) is not itself a parameter.
        if used <= {id(p) for p in own} and (isinstance(module, nn.MultiheadAttention) or len(used) == len(own)):
            yield from found


# One function for each kind of module -------------------------------------------------------------------------------


def _dense(name: str, weight: Tensor, bias: Tensor | None, limits: Limits, rows: slice | None = None) -> WeightMatrix:
    """A matrix that a parameter, or some rows of one, holds as it is."""
    outputs, inputs = (blocks_of(size, max_dim=limits.max_dim) for size in weight[rows or slice(None)].shape)
    return WeightMatrix(name, weight, bias, inputs, outputs, rows, rows)


def _linear(module: nn.Linear, limits: Limits) -> Iterator[WeightMatrix]:
    yield _dense("", module.weight, module.bias, limits)


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, limits: Limits) -> Iterator[WeightMatrix]:
    W = module.weight
    features = module.groups * W[0].numel()
    inputs = blocks_of(features, module.groups, W[0, 0].numel(), max_dim=limits.max_dim, channels=limits.channels)
    yield WeightMatrix("", W, module.bias, inputs, blocks_of(len(W), module.groups, max_dim=limits.max_dim))


def _embedding(module: nn.Embedding, limits: Limits) -> Iterator[WeightMatrix]:
    """Its inputs are one-hot, so their second moment is diagonal."""
    W = module.weight
    if not (module.scale_grad_by_freq or module.sparse):  # the gradient is then not Σ δ zᵀ, or not dense
        yield WeightMatrix("", W, None, Blocks(1, len(W)), blocks_of(W.shape[1], max_dim=limits.max_dim), one_hot=True)


def _attention(module: nn.MultiheadAttention, limits: Limits) -> Iterator[WeightMatrix]:
    """The query, key and value projections, packed into one parameter or not; the output projection is a submodule."""
    for i, letter in enumerate("qkv"):
        rows = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
        packed = module.in_proj_weight is not None
        weight = module.in_proj_weight if packed else getattr(module, f"{letter}_proj_weight")
        weight_rows = rows if packed else None
        yield replace(_dense(letter, weight, module.in_proj_bias, limits, weight_rows), bias_rows=rows)


def _cell(module: nn.RNNCellBase, limits: Limits) -> Iterator[WeightMatrix]:
    """The two weights of a recurrent cell: of its input and of its state."""
    yield _dense("ih", module.weight_ih, module.bias_ih, limits)
    yield _dense("hh", module.weight_hh, module.bias_hh, limits)


_MAKERS: dict[type[nn.Module], Callable[[Any, Limits], Iterable[WeightMatrix]]] = {
    nn.Linear: _linear,
    NonDynamicallyQuantizableLinear: _linear,  # the output projection of attention
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.MultiheadAttention: _attention,
    nn.RNNCell: _cell,
    nn.LSTMCell: _cell,
    nn.GRUCell: _cell,
}
