"""What is whitened: weights, each a matrix that acts on rows of inputs z and gives rows of a.

    a = W z + b         linear layers, attention projections, recurrent cells; convolutions, z a patch; embeddings,
                        z one-hot

A unit says how its weight, and what is shaped like it (a gradient, a velocity), is that matrix, and in which blocks
either side is whitened. `units_of` knows which modules have units; everything else follows the fallback rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from bprong.blocks import MAX_DIM, Blocks, blocks_of

__all__ = ["Limits", "Unit", "unit_of", "units_of"]


@dataclass(frozen=True)
class Limits:
    """max_dim: the largest side whitened as one block; channels: convolutions by their channels alone."""

    max_dim: int = MAX_DIM
    channels: bool = False


@dataclass(frozen=True, eq=False)
class Unit:
    """A weight and its bias, if it has one.

    forward, backward:  the blocks of its inputs and of its outputs
    rows, bias_rows:    which of the weight's and the bias's are this unit's, where several are packed into one
                        parameter
    one_hot:            an embedding: the weight is stored transposed, (in, out), and z are indices
    module:             the whitened layer whose calls are looked at, where it is not a stock layer's weight
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    forward: Blocks
    backward: Blocks
    rows: slice | None = None
    bias_rows: slice | None = None
    one_hot: bool = False
    module: nn.Module | None = None

    def own(self, values: Tensor) -> Tensor:
        """The unit's part of a tensor shaped like its weight: a view."""
        return values if self.rows is None else values[self.rows]

    def matrix(self, values: Tensor) -> Tensor:
        """Of a tensor shaped like the unit's own part of the weight: (out, in), or (groups, out, in) of each group."""
        if self.one_hot:
            return values.T
        if values.ndim == 2:
            return values
        groups = self.forward.groups
        return values.reshape(groups, len(values) // groups, -1) if groups > 1 else values.flatten(1)

    def vector(self, values: Tensor) -> Tensor:
        """Of a tensor shaped like the bias: (out,), or (groups, out); a view."""
        values = values if self.bias_rows is None else values[self.bias_rows]
        return values.view(self.forward.groups, -1) if self.forward.groups > 1 else values

    def times(self, values: Tensor, z: Tensor) -> Tensor:
        """W z for z (in,), or (groups, in), and W shaped like the unit's own part of the weight."""
        matrix = self.matrix(values)
        return matrix @ z if matrix.ndim == 2 else (matrix @ z.unsqueeze(-1)).squeeze(-1)

    def shaped(self, matrix: Tensor) -> Tensor:
        """A matrix as the unit's part of the weight is shaped."""
        if self.weight.ndim == 2:
            return matrix.T if self.one_hot else matrix
        return matrix.reshape(self.own(self.weight).shape)


Maker = Callable[[Any, Limits], Iterator[Unit]]


def units_of(name: str, module: nn.Module, limits: Limits | None = None) -> list[Unit]:
    """The units whose parameters a module holds itself, by its exact type; none of those that no rule is known for."""
    make = _MAKERS.get(type(module))
    if make is None:
        return []
    units = make(module, limits or Limits())
    return [replace(unit, name=".".join(filter(None, (name, unit.name)))) for unit in units]


def unit_of(name: str, layer: Unit | nn.Module) -> Unit:
    """A layer that is one unit: a stock one, or a whitened one of the paper's network."""
    if isinstance(layer, Unit):
        return layer
    if (forward := getattr(layer, "forward_blocks", None)) is not None:
        whitened: Any = layer
        return Unit(name, whitened.weight_dagger, whitened.bias_dagger, forward, whitened.backward_blocks, module=layer)
    (unit,) = units_of(name, layer)
    return unit


def _linear(module: nn.Linear, limits: Limits) -> Iterator[Unit]:
    yield _dense("", module.weight, module.bias, limits)


def _dense(name: str, weight: Tensor, bias: Tensor | None, limits: Limits, rows: slice | None = None) -> Unit:
    outputs = len(weight) if rows is None else rows.stop - rows.start
    forward = blocks_of(weight.shape[1], max_dim=limits.max_dim)
    return Unit(name, weight, bias, forward, blocks_of(outputs, max_dim=limits.max_dim), rows, rows)


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, limits: Limits) -> Iterator[Unit]:
    outputs, channels, *_ = module.weight.shape
    groups, taps = module.groups, module.weight[0, 0].numel()
    features = groups * channels * taps
    forward = blocks_of(features, groups, taps, max_dim=limits.max_dim, channels=limits.channels)
    yield Unit("", module.weight, module.bias, forward, blocks_of(outputs, groups, max_dim=limits.max_dim))


def _embedding(module: nn.Embedding, limits: Limits) -> Iterator[Unit]:
    """Its inputs are one-hot, so that their second moment is diagonal whatever the words are."""
    if module.scale_grad_by_freq or module.sparse:  # the gradient is then not what δ and z make of it, or not dense
        return
    words, features = module.weight.shape
    yield Unit("", module.weight, None, Blocks(1, words), blocks_of(features, max_dim=limits.max_dim), one_hot=True)


def _attention(module: nn.MultiheadAttention, limits: Limits) -> Iterator[Unit]:
    """Query, key and value projections, packed into one parameter or not; the output's is a module of its own."""
    size = module.embed_dim
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    for i, letter in enumerate("qkv"):
        rows = slice(i * size, (i + 1) * size)
        if module.in_proj_weight is not None:
            yield _dense(letter, module.in_proj_weight, module.in_proj_bias, limits, rows)
        else:
            yield replace(_dense(letter, apart[i], module.in_proj_bias, limits), bias_rows=rows)


def _cell(module: nn.RNNCellBase, limits: Limits) -> Iterator[Unit]:
    """A recurrent cell: its input's weight and its state's."""
    yield _dense("ih", module.weight_ih, module.bias_ih, limits)
    yield _dense("hh", module.weight_hh, module.bias_hh, limits)


_MAKERS: dict[type[nn.Module], Maker] = {
    nn.Linear: _linear,
    NonDynamicallyQuantizableLinear: _linear,  # attention's output projection; the name is about another matter
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.MultiheadAttention: _attention,
    nn.RNNCell: _cell,
    nn.LSTMCell: _cell,
    nn.GRUCell: _cell,
}
