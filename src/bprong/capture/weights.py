"""Which weights of a model can be whitened: each is a matrix W that maps rows of inputs z to rows of outputs a.

    a = W z + b         linear layers, attention projections and recurrent cells; convolutions, where z is a patch of
                        the input; embeddings, where z is one-hot

A `WeightMatrix` says how a parameter, and tensors shaped like it (its gradient, its momentum), form that matrix, and in
which blocks its two sides are whitened. `KINDS` has the layers whose weights are known, and `FUNCTIONS` those functions
of torch's that use them. Modules of other packages that compute the same are added by `register`. Weights that layers
share (tied weights) are left out by `covered_weights`; they and the parameters of all other modules follow the fallback
rule.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from bprong.capture.convolution import Geometry
from bprong.linalg.moments import Blocks, Limits, at_least_float32
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
    def parameters(self) -> list[Tensor]:
        """The weight and, if it has one, its bias."""
        return [p for p in (self.weight, self.bias) if p is not None]

    @property
    def is_trained(self) -> bool:
        return any(p.requires_grad for p in self.parameters)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the weight itself is the matrix (out, in), and the bias the vector."""
        is_packed = self.rows is not None or self.bias_rows is not None
        return self.weight.ndim == 2 and not (is_packed or self.transposed or self.inputs.groups > 1)

    @cached_property
    def ndim(self) -> int:
        """The number of dimensions of its part of the parameter."""
        return self.weight.ndim - isinstance(self.rows, int)

    @property
    def numel(self) -> int:
        """The number of entries of the matrix."""
        return self.inputs.groups * self.inputs.features * self.outputs.features

    def of(self, other: Mapping[Any, Tensor]) -> WeightMatrix:
        """The same matrix in other parameters, given by those that they stand for."""
        return replace(self, weight=other.get(self.weight, self.weight), bias=other.get(self.bias, self.bias))

    def own(self, values: Tensor) -> Tensor:
        """This matrix's part of a tensor shaped like the parameter, as a view."""
        return values if self.rows is None else values[self.rows]

    def matrix(self, values: Tensor) -> Tensor:
        """Its part of a tensor shaped like the parameter as a matrix (out, in), or (groups, out, in) of several groups.

        It is a view, if the tensor is contiguous.
        """
        part = self.own(values)
        if self.inputs.groups > 1:
            return part.reshape(self.inputs.groups, self.outputs.features, -1)
        return part.T if self.transposed else part.flatten(1)

    def vector(self, values: Tensor) -> Tensor:
        """Its part of a tensor shaped like the bias as a vector (out,), or (groups, out) of several groups; a view."""
        part = values if self.bias_rows is None else values[self.bias_rows]
        return part.view(self.inputs.groups, -1) if self.inputs.groups > 1 else part

    def cost(self, backward: bool) -> dict[str, int]:
        """What whitening this weight takes with exact inverses, on both sides or (backward=False) on the inputs only.

        memory: bytes for moments, inverses and the centre; refresh: floating-point operations to factor its sides;
        per_row: operations to measure one row; step: operations that a step takes beyond those of SGD
        """
        sides = [self.inputs, self.outputs] if backward else [self.inputs]
        entries = sum(side.entries for side in sides)
        is_centred = self.bias is not None and self.bias.requires_grad
        centre = self.inputs.groups * self.inputs.features if is_centred else 0
        number_bytes = torch.float64.itemsize + at_least_float32(self.weight.dtype).itemsize
        return {
            "memory": (entries + centre) * number_bytes,
            "refresh": sum(2 * side.entries * side.size for side in sides),  # Cholesky d³/3, its inverse 2d³/3; twice
            "per_row": 2 * entries,
            "step": 2 * self.numel * sum(side.size for side in sides),
        }


class Kind(NamedTuple):
    """A kind of layer.

    make:        gives the matrices of a weight and its bias
    parameters:  the names of its weights, each with that of its bias
    """

    make: Callable[..., Iterable[WeightMatrix]]
    parameters: Mapping[str, str] = {"weight": "bias"}


def weight_matrices_of(name: str, module: nn.Module, limits: Limits | None = None) -> list[WeightMatrix]:
    """The weights that a module holds itself; none unless its exact type is supported or registered."""
    layer_type = written_type(module)
    registered = dict(REGISTERED.values())  # the last of a type holds
    weights: list[WeightMatrix] = []
    kind = (KINDS | registered).get(layer_type)
    if kind is None:
        return weights
    for parameter, bias in kind.parameters.items():
        prefix = parameter if len(kind.parameters) > 1 else ""
        for weight in kind.make(module, getattr(module, parameter), getattr(module, bias, None), limits or Limits()):
            weights.append(replace(weight, name=dotted(name, prefix, weight.name), registered=layer_type in registered))
    return weights


def dotted(*names: str) -> str:
    """Join names by dots, without those that are empty."""
    return ".".join(filter(None, names))


def weight_matrix_of(name: str, layer: Any, limits: Limits | None = None) -> WeightMatrix:
    """The only weight of a layer: a module of torch's, or a whitened layer of the paper's network."""
    if hasattr(layer, "forward_blocks"):
        return WeightMatrix(
            name, layer.weight_dagger, layer.bias_dagger, layer.forward_blocks, layer.backward_blocks, module=layer
        )
    return weight_matrices_of(name, layer, limits)[0]


def covered_weights(model: nn.Module, limits: Limits | None = None) -> Iterator[WeightMatrix]:
    """Every weight of a model that can be whitened, in the order of its modules.

    Left out are subclasses of the supported layers, because what they compute is unknown, and layers that share a
    parameter (tied weights), because its gradient is not the product of one z and one δ. A module may have several
    names.
    """
    uses = Counter(p for module in model.modules() for p in module._parameters.values())
    for name, module in model.named_modules():
        parameters = set(module.parameters(recurse=False))
        if any(isinstance(p, nn.UninitializedParameter) for p in parameters):
            raise ValueError(f"{name!r} has parameters without a shape yet (lazy); call the model on a batch first")
        if any(uses[p] > 1 or p.is_complex() or p.numel() == 0 for p in parameters):
            continue
        matrices = weight_matrices_of(name, module, limits)
        # A weight computed from other parameters (weight norm, spectral norm) is not itself a parameter.
        if parameters.issuperset(p for weight in matrices for p in weight.parameters):
            yield from matrices


# The kinds of layers --------------------------------------------------------------------------------------------------


def _linear(
    module: nn.Module, W: Tensor, b: Tensor | None, limits: Limits, transposed: bool = False, stacked: bool = False
) -> Iterator[WeightMatrix]:
    """A matrix, or a stack of them."""
    outputs, inputs = map(limits.blocks, (W.mT if transposed else W).shape[-2:])
    for i in range(len(W)) if stacked else (None,):
        name = "" if i is None else str(i)
        yield WeightMatrix(name, W, b, inputs, outputs, i, i, transposed)


def _convolution(module: Any, W: Tensor, b: Tensor | None, limits: Limits) -> Iterator[WeightMatrix]:
    inputs = limits.blocks(module.groups * W.shape[1:].numel(), module.groups)
    yield WeightMatrix("", W, b, inputs, limits.blocks(len(W), module.groups))


def _convolved(input: Tensor, weight: Tensor, bias: Any = None, *form: Any, **options: Any) -> dict[str, Any]:
    """The geometry of a convolution; form, options: its stride, padding, dilation and groups."""
    return {"geometry": Geometry.of(weight.shape[2:], *form, **options)}


def _embedding(module: Any, W: Tensor, b: Tensor | None, limits: Limits) -> Iterator[WeightMatrix]:
    """Its inputs are one-hot, so their second moment is diagonal."""
    if not (module.scale_grad_by_freq or module.sparse):  # the gradient is then not Σ δ zᵀ, or not dense
        yield WeightMatrix("", W, None, Blocks(1, len(W)), limits.blocks(W.shape[1]), transposed=True, one_hot=True)


def _embedded(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> dict[str, Any]:
    """Which rows of an embedding are padding."""
    return {} if padding_idx is None else {"ignored": input == padding_idx % len(weight)}


def _attention(
    module: nn.MultiheadAttention, W: Tensor | None, b: Tensor | None, limits: Limits
) -> Iterator[WeightMatrix]:
    """The query, key and value projections, packed into one parameter or not; the output projection is a submodule."""
    for i, letter in enumerate("qkv"):
        rows = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
        weight = getattr(module, f"{letter}_proj_weight") if W is None else W
        inputs, outputs = map(limits.blocks, (weight.shape[1], module.embed_dim))
        yield WeightMatrix(letter, weight, b, inputs, outputs, None if W is None else rows, rows)


_CONVOLUTION = Kind(_convolution)
_CELL = Kind(_linear, {"weight_ih": "bias_ih", "weight_hh": "bias_hh"})  # of their input and of their state
LIKE = {  # other layers may be registered like these
    nn.Linear: Kind(_linear),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.Embedding: Kind(_embedding),
}
KINDS: dict[type[nn.Module], Kind] = {
    **LIKE,
    NonDynamicallyQuantizableLinear: Kind(_linear),  # the output projection of attention
    nn.MultiheadAttention: Kind(_attention, {"in_proj_weight": "in_proj_bias"}),
    nn.RNNCell: _CELL,
    nn.LSTMCell: _CELL,
    nn.GRUCell: _CELL,
}
# Torch's functions of an input and a weight, and what tells how a call differs from that of `F.linear` (see `Call`).
FUNCTIONS: list[tuple[Any, str, Callable[..., dict[str, Any]] | None]] = [
    (F, "linear", None),
    (F, "embedding", _embedded),
    *((place, f"conv{n}d", _convolved) for place in (F, torch) for n in (1, 2, 3)),
]
REGISTERED: OrderedDict[int, tuple[type[nn.Module], Kind]] = OrderedDict()  # by handle


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
    if like not in LIKE:
        raise ValueError(f"like must be one of {', '.join(k.__name__ for k in LIKE)}, not {like!r}")
    make = LIKE[like].make
    if transposed or stacked:
        if like is not nn.Linear:
            raise ValueError(
                f"only the weight of an nn.Linear can be transposed or stacked, not that of a {like.__name__}"
            )
        make = partial(make, transposed=transposed, stacked=stacked)
    weights = (weight,) if isinstance(weight, str) else weight
    biases = (bias,) if isinstance(bias, str) else bias
    handle = RemovableHandle(REGISTERED)
    parameters = dict(zip_longest(weights, biases[: len(weights)], fillvalue=""))
    REGISTERED[handle.id] = kind, Kind(make, parameters)
    return handle
