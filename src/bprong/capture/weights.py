"""Which weights of a model can be whitened: each is a matrix W that maps rows of inputs z to rows of outputs a.

    a = W z + b         linear layers, attention projections and recurrent cells; convolutions, where z is a patch of
                        the input; embeddings, where z is one-hot

A `WeightMatrix` says how a parameter, and tensors shaped like it (its gradient, its momentum), form that matrix, and in
which blocks its two sides are whitened. Modules of other packages that compute the same are added by `register`.
Parameters of all other modules follow the fallback rule.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from bprong.linalg.moments import Blocks, Limits
from bprong.parallel.slices import written_type

COVERED = (
    "these can be: Linear, Conv1d, Conv2d, Conv3d, Embedding, MultiheadAttention and recurrent cells with real weights "
    "that no other layer shares, and layers that compute the same, if bprong.register is told so. A model converted by "
    "whiten_ is trained by a torch optimizer with Rewhitening"
)


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """A weight and its bias, if it has one.

    inputs, outputs:  the blocks of its two sides
    rows, bias_rows:  its rows of the weight and of the bias, or its index in a stack of weights, where several weights
                      are packed into one parameter
    transposed:       the weight is stored as (in, out)
    one_hot:          an embedding: z is given as indices
    registered:       it belongs to a layer that the user has registered
    module:           the whitened layer that holds it, recorded as a module; None for the layers of torch
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    inputs: Blocks
    outputs: Blocks
    rows: slice | int | None = None
    bias_rows: slice | int | None = None
    transposed: bool = False
    one_hot: bool = False
    registered: bool = False
    module: Any = None

    @property
    def is_trained(self) -> bool:
        return any(p is not None and p.requires_grad for p in (self.weight, self.bias))

    @cached_property
    def is_plain(self) -> bool:
        """Whether the weight itself is the matrix (out, in), and the bias the vector."""
        whole = self.rows is None and self.bias_rows is None and self.weight.ndim == 2
        return whole and not (self.transposed or self.inputs.groups > 1)

    @property
    def shape(self) -> Sequence[int]:
        """That of `own(weight)`."""
        return _own_shape(self.weight.shape, self.rows)

    def of(self, other: Mapping[Tensor, Tensor]) -> WeightMatrix:
        """The same matrix in other parameters, given by those that they stand for."""
        if self.weight not in other:
            return self
        return replace(self, weight=other[self.weight], bias=None if self.bias is None else other[self.bias])

    def own(self, values: Tensor) -> Tensor:
        """This matrix's part of a tensor shaped like the parameter, as a view."""
        return values if self.rows is None else values[self.rows]

    @property
    def argument(self) -> Tensor:
        """The weight as torch's functions take it, as a view: (out, in, …), but (in, out) of an embedding."""
        part = self.own(self.weight.detach())
        return part.T if self.transposed and not self.one_hot else part

    def matrix(self, values: Tensor) -> Tensor:
        """A tensor shaped like `own(weight)` as a matrix (out, in), or (groups, out, in) with several groups."""
        if self.inputs.groups > 1:
            return values.reshape(self.inputs.groups, self.outputs.features, -1)
        return values.T if self.transposed else values.flatten(1)

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
        return matrix.T if self.transposed else matrix.reshape(*self.shape)

    def cost(self, backward: bool) -> dict[str, int]:
        """What whitening this weight takes with exact inverses, on both sides or (backward=False) on the inputs only.

        memory: bytes for moments, inverses and the centre; refresh: floating-point operations to factor its sides;
        per_row: operations to measure one row; step: operations that a step takes beyond those of SGD
        """
        sides = [self.inputs, self.outputs] if backward else [self.inputs]
        features = self.inputs.groups * self.inputs.features
        entries = sum(side.entries for side in sides)
        size = sum(side.size for side in sides)
        centred = self.bias is not None and self.bias.requires_grad
        number_bytes = torch.float64.itemsize + torch.promote_types(self.weight.dtype, torch.float32).itemsize
        return {
            "memory": (entries + features * centred) * number_bytes,
            "refresh": sum(2 * side.entries * side.size for side in sides),  # Cholesky d³/3, its inverse 2d³/3; twice
            "per_row": 2 * entries,
            "step": 2 * features * self.outputs.features * size,
        }


def weight_matrices_of(name: str, module: nn.Module, limits: Limits | None = None) -> list[WeightMatrix]:
    """The weights that a module holds itself; none unless its exact type is supported or registered."""
    layer_type = written_type(module)
    form = _FORMS.get(layer_type)
    is_registered = False
    for kind, registered_form in REGISTERED.values():  # the last of a type holds
        if kind is layer_type:
            form = registered_form
            is_registered = True
    if form is None:
        return []
    matrices = []
    for i, parameter in enumerate(form.weights):
        bias = getattr(module, form.biases[i], None) if i < len(form.biases) else None
        prefix = parameter if len(form.weights) > 1 else ""
        for weight in form.make(module, getattr(module, parameter), bias, limits or Limits()):
            matrices.append(replace(weight, name=dotted(name, prefix, weight.name), registered=is_registered))
    return matrices


def dotted(*names: str) -> str:
    """Join names by dots, without those that are empty."""
    return ".".join(filter(None, names))


def weight_matrix_of(name: str, layer: Any) -> WeightMatrix:
    """The only weight of a layer: a module of torch's, or a whitened layer of the paper's network."""
    if hasattr(layer, "forward_blocks"):
        return WeightMatrix(
            name, layer.weight_dagger, layer.bias_dagger, layer.forward_blocks, layer.backward_blocks, module=layer
        )
    return weight_matrices_of(name, layer)[0]


def covered_weights(model: nn.Module, limits: Limits | None = None) -> Iterator[WeightMatrix]:
    """Every weight of a model that can be whitened, in the order of its modules.

    Left out are subclasses of the supported layers, because what they compute is unknown, and layers that share a
    parameter (tied weights), because its gradient is not the product of one z and one δ. A module may have several
    names.
    """
    uses = Counter(p for module in model.modules() for p in module._parameters.values())
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if any(isinstance(p, nn.UninitializedParameter) for p in parameters):
            raise ValueError(f"{name!r} has parameters without a shape yet (lazy); call the model on a batch first")
        unfit = any(uses[p] > 1 or p.is_complex() or p.numel() == 0 for p in parameters)
        matrices = [] if unfit else weight_matrices_of(name, module, limits)
        used = {p for weight in matrices for p in (weight.weight, weight.bias) if p is not None}
        # A weight computed from other parameters (weight norm, spectral norm) is not itself a parameter.
        if used <= set(parameters):
            yield from matrices


# One function for each kind of module -------------------------------------------------------------------------------


def _own_shape(shape: torch.Size, rows: slice | int | None) -> Sequence[int]:
    """The shape of some rows of a tensor, without indexing it, which would gather a sharded one."""
    if isinstance(rows, slice):
        return rows.stop - rows.start, *shape[1:]
    return shape if rows is None else shape[1:]


def _dense(
    name: str, weight: Tensor, bias: Tensor | None, limits: Limits,
    rows: slice | int | None = None, transposed: bool = False,
) -> WeightMatrix:  # fmt: skip
    """A matrix that a parameter, or a part of one, holds as it is or transposed."""
    shape = _own_shape(weight.shape, rows)
    outputs, inputs = map(limits.blocks, reversed(shape) if transposed else shape)
    return WeightMatrix(name, weight, bias, inputs, outputs, rows, rows, transposed)


def _linear(
    module: nn.Module, W: Tensor, b: Tensor | None, limits: Limits, transposed: bool = False, stacked: bool = False
) -> Iterable[WeightMatrix]:
    """A matrix, or a stack of them."""
    if not stacked:
        return [_dense("", W, b, limits, None, transposed)]
    return [_dense(str(i), W, b, limits, i, transposed) for i in range(len(W))]


def _convolution(module: Any, W: Tensor, b: Tensor | None, limits: Limits) -> Iterator[WeightMatrix]:
    inputs = limits.blocks(module.groups * W.shape[1:].numel(), module.groups)
    yield WeightMatrix("", W, b, inputs, limits.blocks(len(W), module.groups))


def _embedding(module: Any, W: Tensor, b: Tensor | None, limits: Limits) -> Iterator[WeightMatrix]:
    """Its inputs are one-hot, so their second moment is diagonal."""
    if not (module.scale_grad_by_freq or module.sparse):  # the gradient is then not Σ δ zᵀ, or not dense
        outputs = limits.blocks(W.shape[1])
        yield WeightMatrix("", W, None, Blocks(1, len(W)), outputs, transposed=True, one_hot=True)


def _attention(
    module: nn.MultiheadAttention, W: Tensor | None, b: Tensor | None, limits: Limits
) -> Iterator[WeightMatrix]:
    """The query, key and value projections, packed into one parameter or not; the output projection is a submodule."""
    for i, letter in enumerate("qkv"):
        rows = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
        if W is None:
            projection = _dense(letter, getattr(module, f"{letter}_proj_weight"), b, limits)
        else:
            projection = _dense(letter, W, b, limits, rows)
        yield replace(projection, bias_rows=rows)


class Form(NamedTuple):
    """The weights of a kind of module.

    make:             gives the matrices of a weight and its bias
    weights, biases:  the names of its parameters
    """

    make: Callable[..., Iterable[WeightMatrix]]
    weights: Sequence[str] = ("weight",)
    biases: Sequence[str] = ("bias",)


_CELL = Form(_linear, ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh"))  # of their input and of their state
_CONVOLUTION = Form(_convolution)
_LIKE = {
    nn.Linear: Form(_linear),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: Form(_embedding),
}
_FORMS: dict[type[nn.Module], Form] = {
    **_LIKE,
    NonDynamicallyQuantizableLinear: Form(_linear),  # the output projection of attention
    nn.MultiheadAttention: Form(_attention, ("in_proj_weight",), ("in_proj_bias",)),
    nn.RNNCell: _CELL,
    nn.LSTMCell: _CELL,
    nn.GRUCell: _CELL,
}
REGISTERED: OrderedDict[int, tuple[type[nn.Module], Form]] = OrderedDict()  # by handle


def register(
    kind: type[nn.Module],
    *,
    like: type[nn.Module],
    transposed: bool = False,
    stacked: bool = False,
    weight: str | Sequence[str] = "weight",
    bias: str | Sequence[str] = "bias",
) -> RemovableHandle:
    """Whitens layers of this type as a known layer of torch's, in all optimizers that are built later.

    kind        the type of the layer; subclasses are not included, as for torch's own layers
    like        the layer that it computes the same as: nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d or nn.Embedding
    transposed  its weight is stored as (in, out): y = x W + b
    stacked     its weight is a stack of matrices (number, out, in), each of which is used on its own, as by experts
    weight, bias
                the names of its parameters; several weights are given as a tuple, and so are their biases. A missing
                bias is none. Other parameters of the layer follow the fallback rule

    As for torch's hooks, the handle has `remove()` and is a context manager.

    >>> import torch
    >>> class Scores(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = nn.Parameter(torch.randn(4, 3))
    ...     def forward(self, x):
    ...         return x @ self.table
    >>> with register(Scores, like=nn.Linear, transposed=True, weight="table"):
    ...     [(weight.name, str(weight.inputs), str(weight.outputs)) for weight in covered_weights(Scores())]
    [('', '4', '3')]
    >>> list(covered_weights(Scores()))
    []
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register takes a type of module, not {kind!r}")
    if like not in _LIKE:
        raise ValueError(f"like must be one of {', '.join(k.__name__ for k in _LIKE)}, not {like!r}")
    options = {}
    if transposed:
        options["transposed"] = True
    if stacked:
        options["stacked"] = True
    if options and like is not nn.Linear:
        adjectives = " and ".join(options)
        raise ValueError(f"only the weight of an nn.Linear can be {adjectives}, not that of a {like.__name__}")
    weights = (weight,) if isinstance(weight, str) else tuple(weight)
    biases = (bias,) if isinstance(bias, str) else tuple(bias)
    handle = RemovableHandle(REGISTERED)
    REGISTERED[handle.id] = kind, Form(partial(_LIKE[like].make, **options), weights, biases)
    return handle
