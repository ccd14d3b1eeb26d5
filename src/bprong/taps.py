"""Every use of a weight in a forward pass: its input and its output, taken at the functions that do the multiplying.

Hooks on modules would miss attention, which calls its projections as functions, and could not tell what a convolution
does before it convolves. So for the time of a measuring pass torch's own functions are stood in for by ones that look
at the weight they are given; recurrent cells, whose pre-activations no function shows, are computed step by step. The
whitened layers of the paper's network, which compute with several matrices, are tapped as modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.moments import Moments, count_moments, error_moments, input_moments
from bprong.patches import Geometry, patches
from bprong.units import Unit

__all__ = ["Call", "tapped"]

CHUNK = 2**24  # numbers turned into float64 at once: 128 MB


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a unit: its input z (a copy) and the output a (in the graph) whose columns `part` are the unit's."""

    unit: Unit
    z: Tensor
    a: Tensor
    part: slice | None = None  # None: all
    geometry: Geometry | None = None
    left_out: Tensor | None = None  # rows that do not count: an embedding's padding

    @property
    def layer(self) -> str:
        return self.unit.name

    def errors(self, delta: Tensor) -> Tensor:
        """δ of the output as rows (rows, groups, out)."""
        if self.geometry is not None:
            delta = delta.movedim(-1 - len(self.geometry.kernel), -1)
        elif self.part is not None:
            delta = delta[..., self.part]
        rows = delta.reshape(-1, self.unit.backward.groups, self.unit.backward.features)
        return rows if self.left_out is None else rows.masked_fill(self.left_out.view(-1, 1, 1), 0)

    def error_moments(self, delta: Tensor, targets: int) -> Moments:
        blocks = self.unit.backward
        return error_moments(blocks.rows(self.errors(delta)), targets, blocks.lead)

    def input_moments(self, centre: bool, counted: Tensor | None = None) -> Moments | None:
        """Of the rows of z, or of those that are counted; None of no row."""
        if self.left_out is not None:
            counted = ~self.left_out if counted is None else counted & ~self.left_out
        blocks, found = self.unit.forward, None
        for rows in self._inputs(counted):
            if self.unit.one_hot:
                seen = count_moments(rows, blocks.count)
            else:
                seen = input_moments(blocks.rows(rows), centre, blocks.lead)
            found = seen if found is None else found.merge(seen)
        return found

    def _inputs(self, counted: Tensor | None) -> Iterator[Tensor]:
        """z as rows (rows, groups, in), in chunks that fit into memory."""
        blocks, geometry = self.unit.forward, self.geometry
        if geometry is None:
            examples = self.z.flatten() if self.unit.one_hot else self.z.reshape(-1, 1, blocks.features)
            each = 1
        else:
            examples = self.z if self.z.ndim == len(geometry.kernel) + 2 else self.z.unsqueeze(0)
            each = patches(examples[:1], geometry).shape[1]
        size = max(1, CHUNK // (each * blocks.groups * blocks.features))
        for i, chunk in enumerate(torch.split(examples, size)):
            rows = chunk if geometry is None else patches(chunk, geometry).flatten(0, 1)
            if counted is not None:
                rows = rows[counted[i * size * each :][: len(rows)]]
            if len(rows):
                yield rows


@contextmanager
def tapped(units: Iterable[Unit]) -> Iterator[list[Call]]:
    """While it lasts, every use of a unit leaves its input and output behind."""
    taps = _Taps()
    with ExitStack() as stack:
        for unit in units:
            if unit.module is None:
                taps.uses[id(unit.weight)].append(unit)
            else:
                stack.callback(taps.listen(unit, unit.module))
        for place, name, stand_in in taps.stand_ins():
            stack.enter_context(_replaced(place, name, stand_in))
        # Attention in eval mode without gradients is one function, in which no projection could be seen.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        yield taps.calls


@contextmanager
def _replaced(place: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    own = vars(place).get(name)
    setattr(place, name, stand_in)
    try:
        yield
    finally:
        delattr(place, name) if own is None else setattr(place, name, own)


class _Taps:
    """Stand-ins for torch's functions, which do the same and note what was done with a unit's weight."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.uses: dict[int, list[Unit]] = defaultdict(list)

    def stand_ins(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield F, "linear", partial(self._linear, F.linear)
        yield F, "embedding", partial(self._embedding, F.embedding)
        for name in ("conv1d", "conv2d", "conv3d"):
            yield F, name, partial(self._convolution, getattr(F, name))
        for name, cell in CELLS.items():
            yield torch._VF, name, partial(self._cell, getattr(torch._VF, name), cell)

    def _linear(self, linear: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        start, units = self._used(weight)
        for unit in units:
            _check(unit, input)
        a: Tensor = linear(input, weight, bias)
        for unit in units:
            rows = unit.rows or slice(0, len(unit.weight))
            self.calls += _seen(unit, input, a, slice(rows.start - start, rows.stop - start))
        return a.clone() if units else a

    def _used(self, weight: Tensor) -> tuple[int, list[Unit]]:
        """The units that a weight, or some rows of one, makes use of, and the first of these rows."""
        if id(weight) in self.uses:
            return 0, self.uses[id(weight)]
        whole = weight._base if isinstance(weight, Tensor) else None
        if whole is None or id(whole) not in self.uses or weight.shape[1:] != whole.shape[1:]:
            return 0, []
        start = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
        rows = range(start, start + len(weight))
        return start, [u for u in self.uses[id(whole)] if u.rows and u.rows.start in rows and u.rows.stop - 1 in rows]

    def _convolution(self, convolution: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        a: Tensor = convolution(input, weight, *args, **kwargs)
        units = self.uses.get(id(weight), [])
        for unit in units:
            self.calls += _seen(unit, input, a, geometry=_geometry(weight.shape[2:], *args, **kwargs))
        return a.clone() if units else a

    def _embedding(self, embedding: Any, input: Tensor, weight: Tensor, padding: Any = None, *args: Any) -> Tensor:
        a: Tensor = embedding(input, weight, padding, *args)
        units = self.uses.get(id(weight), [])
        for unit in units:
            left_out = None if padding is None else (input == padding % len(weight)).flatten()
            self.calls += _seen(unit, input, a, left_out=left_out)
        return a.clone() if units else a

    def _cell(self, fused: Any, cell: Any, input: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Any:
        if id(w_ih) not in self.uses and id(w_hh) not in self.uses:
            return fused(input, state, w_ih, w_hh, *biases)
        b_ih, b_hh = biases or (None, None)
        h = state[0] if isinstance(state, (tuple, list)) else state
        return cell(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), state)

    def listen(self, unit: Unit, module: nn.Module) -> Callable[[], None]:
        """Taps a whitened layer; what is returned ends it."""
        inputs: list[Tensor] = []

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            z = args[0] if args else kwargs["input"]
            if module.geometry is None:
                _check(unit, z)
            inputs.append(module.padded(z.detach().clone()))

        def after(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self.calls += _seen(unit, inputs.pop(), output, geometry=module.geometry)
            return output.clone()

        handles = ExitStack()
        handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        handles.callback(module.register_forward_hook(after).remove)
        return handles.close


def _seen(unit: Unit, z: Tensor, a: Tensor, part: slice | None = None, **how: Any) -> list[Call]:
    """A call, unless of no row: an expert may be given none of a batch."""
    # What follows may work in place (ReLU), on the input or on the output; the caller passes on a copy of the output.
    return [Call(unit, z.detach().clone(), a, part, **how)] if z.numel() > 0 else []


def _check(unit: Unit, z: Any) -> None:
    width = unit.forward.features
    if not isinstance(z, Tensor) or z.ndim == 0 or z.shape[-1] != width:
        given = f"shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
        raise ValueError(f"layer {unit.name!r} takes rows of {width} features, not {given}")


def _geometry(
    kernel: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Geometry:
    """From the arguments of `F.conv2d` and its like, the first two apart."""
    return Geometry.of(kernel, stride, padding, dilation, groups)


# Recurrent cells, from what their two weights make of input and state: torch's own formulas ---------------------------


def _lstm(a: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (a + r).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(a: Tensor, r: Tensor, h: Tensor) -> Tensor:
    (a_r, a_z, a_n), (r_r, r_z, r_n) = a.chunk(3, dim=-1), r.chunk(3, dim=-1)
    n = (a_n + (a_r + r_r).sigmoid() * r_n).tanh()
    return n + (a_z + r_z).sigmoid() * (h - n)


CELLS: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": lambda a, r, h: (a + r).tanh(),
    "rnn_relu_cell": lambda a, r, h: (a + r).relu(),
}
