"""Every use of a weight in a forward pass: its input and its output, taken at the functions that do the multiplying.

Hooks on modules would miss attention, which calls its projections as functions, and could not tell what a convolution
does before it convolves. So for the time of a measuring pass torch's own functions are stood in for by ones that look
at the weight they are given; recurrent cells, whose pre-activations no function shows, are computed step by step. The
whitened layers of the paper's network, which compute with several matrices, are tapped as modules.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mha

from bprong.moments import Moments, count_moments, error_moments, input_moments
from bprong.patches import Geometry, patch_rows
from bprong.units import Unit

__all__ = ["Call", "Calls", "tapped"]

CHUNK = 2**22  # numbers turned into float64 at once: 32 MB


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

    @property
    def lead(self) -> tuple[int, ...]:
        """How its rows are laid out."""
        if self.geometry is None:
            return tuple(self.a.shape[:-1])
        n = len(self.geometry.kernel)
        return (self.a.shape[0] if self.a.ndim == n + 2 else 1, *self.a.shape[-n:])

    def errors(self, delta: Tensor) -> Tensor:
        """δ of the output as rows (rows, groups, out)."""
        if self.geometry is not None:
            delta = delta.movedim(-1 - len(self.geometry.kernel), -1)
        elif self.part is not None:
            delta = delta[..., self.part]
        rows = delta.reshape(-1, self.unit.backward.groups, self.unit.backward.features)
        return rows if self.left_out is None else rows.masked_fill(self.left_out.view(-1, 1, 1), 0)

    def error_moments(self, delta: Tensor, targets: int) -> Moments:
        blocks, rows, found = self.unit.backward, self.errors(delta), None
        for chunk in torch.split(rows, max(1, CHUNK // rows[0].numel())):
            seen = error_moments(blocks.rows(chunk), targets, blocks.lead)
            found = seen if found is None else found.overlay(seen)
        assert found is not None
        return found

    def error_rows(self, delta: Tensor) -> Tensor:
        return self.unit.backward.rows(self.errors(delta.detach()))

    def input_rows(self, counted: Tensor | None = None) -> list[Tensor]:
        """The rows behind `input_moments`."""
        return [self.unit.forward.rows(rows) for rows in self._counted(counted)]

    def input_moments(self, centre: bool, counted: Tensor | None = None) -> Moments | None:
        """Of the rows of z, or of those that are counted; None of no row."""
        blocks, found = self.unit.forward, None
        for rows in self._counted(counted):
            if self.unit.one_hot:
                seen = count_moments(rows, blocks.count)
            else:
                seen = input_moments(blocks.rows(rows), centre, blocks.lead)
            found = seen if found is None else found.merge(seen)
        return found

    def _counted(self, counted: Tensor | None) -> Iterator[Tensor]:
        """Those of the rows of z that count, in chunks."""
        start = 0
        if self.left_out is not None:
            counted = ~self.left_out if counted is None else counted & ~self.left_out
        for chunk in self.inputs():
            rows = chunk if counted is None else chunk[counted[start : start + len(chunk)]]
            start += len(chunk)
            if len(rows):
                yield rows

    def inputs(self) -> Iterator[Tensor]:
        """z as rows (rows, groups, in), or as indices (rows,), in chunks that fit into memory."""
        if self.geometry is not None:
            yield from patch_rows(self.z, self.geometry, CHUNK)
        elif self.unit.one_hot:
            yield self.z.flatten()
        else:
            features = self.unit.forward.features
            yield from torch.split(self.z.reshape(-1, 1, features), max(1, CHUNK // features))


class Calls(list[Call]):
    """Calls, and the names of the units that were called with no row: an expert may be given none of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: set[str] = set()


# What stands in for torch's functions is put in place once, for the first of those who want to know, and asks all of
# them: contexts may end in another order than they began in.
_LISTENING: list[_Taps] = []
_REPLACED: list[tuple[Any, str, Any]] = []
_FAST_PATH: list[bool] = []
_LOCK = threading.RLock()


@contextmanager
def tapped(units: Iterable[Unit]) -> Iterator[Calls]:
    """While it lasts, every use of a unit leaves its input and output behind."""
    taps = _Taps()
    with ExitStack() as stack:
        for unit in units:
            if unit.module is None:
                taps.uses[id(unit.weight)].append(unit)
            else:
                stack.callback(taps.listen(unit, unit.module))
        stack.callback(_stop, taps)
        _start(taps)
        yield taps.calls


def _start(taps: _Taps) -> None:
    with _LOCK:
        _LISTENING.append(taps)
        if len(_LISTENING) == 1:
            # Attention in eval mode without gradients is one function, in which no projection could be seen.
            _FAST_PATH.append(mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            for place, name, stand_in in _stand_ins():
                _REPLACED.append((place, name, vars(place).get(name)))
                setattr(place, name, stand_in)


def _stop(taps: _Taps) -> None:
    with _LOCK:
        _LISTENING.remove(taps)
        if not _LISTENING:
            mha.set_fastpath_enabled(_FAST_PATH.pop())
        while not _LISTENING and _REPLACED:
            place, name, own = _REPLACED.pop()
            delattr(place, name) if own is None else setattr(place, name, own)


def _stand_ins() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Functions that do what torch's do and note what was done with a unit's weight."""
    yield F, "linear", partial(_linear, F.linear)
    yield F, "embedding", partial(_embedding, F.embedding)
    for name in ("conv1d", "conv2d", "conv3d"):
        yield F, name, partial(_convolution, getattr(F, name))
    for name, cell in CELLS.items():
        yield torch._VF, name, partial(_cell, getattr(torch._VF, name), cell)


def _linear(linear: Any, input: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    used = [(taps, start, unit) for taps in _LISTENING for start, unit in taps.used(weight)]
    for _, _, unit in used:
        _check(unit, input)
    a: Tensor = linear(input, weight, bias)
    for taps, start, unit in used:
        rows = unit.rows or slice(0, len(unit.weight))
        taps.note(unit, input, a, slice(rows.start - start, rows.stop - start))
    return a.clone() if used else a


def _convolution(convolution: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    a: Tensor = convolution(input, weight, *args, **kwargs)
    used = [(taps, unit) for taps in _LISTENING for unit in taps.uses.get(id(weight), [])]
    for taps, unit in used:
        taps.note(unit, input, a, geometry=_geometry(weight.shape[2:], *args, **kwargs))
    return a.clone() if used else a


def _embedding(
    embedding: Any, input: Tensor, weight: Tensor, padding_idx: Any = None, *args: Any, **how: Any
) -> Tensor:
    a: Tensor = embedding(input, weight, padding_idx, *args, **how)
    used = [(taps, unit) for taps in _LISTENING for unit in taps.uses.get(id(weight), []) if unit.one_hot]
    for taps, unit in used:
        left_out = None if padding_idx is None else (input == padding_idx % len(weight)).flatten()
        taps.note(unit, input, a, left_out=left_out)
    return a.clone() if used else a


def _cell(fused: Any, cell: Any, input: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, *biases: Any) -> Any:
    if not any(id(weight) in taps.uses for taps in _LISTENING for weight in (w_ih, w_hh)):
        return fused(input, state, w_ih, w_hh, *biases)
    b_ih, b_hh = biases or (None, None)
    h = state[0] if isinstance(state, (tuple, list)) else state
    return cell(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), state)


class _Taps:
    """Which units are looked for, by weight, and what was seen of them."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.uses: dict[int, list[Unit]] = defaultdict(list)

    def used(self, weight: Tensor) -> list[tuple[int, Unit]]:
        """The units that a weight, or some rows of one, makes use of, and the first of these rows."""
        if id(weight) in self.uses:
            return [(0, unit) for unit in self.uses[id(weight)] if not unit.one_hot]
        whole = weight._base if isinstance(weight, Tensor) else None
        if whole is None or id(whole) not in self.uses or weight.stride() != whole.stride():
            return []
        start = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0)
        rows = range(start, start + len(weight))
        units = (unit for unit in self.uses[id(whole)] if unit.rows is not None)
        return [(start, u) for u in units if u.rows and u.rows.start in rows and u.rows.stop - 1 in rows]

    def note(self, unit: Unit, z: Tensor, a: Tensor, part: slice | None = None, **how: Any) -> None:
        """A call. What follows may work in place, so z is copied, and who calls passes on a copy of a."""
        if torch._C._functorch.is_batchedtensor(z):
            raise RuntimeError(f"layer {unit.name!r} is called under vmap, where its rows cannot be seen")
        if z.numel() == 0:
            self.calls.idle.add(unit.name)
        else:
            self.calls.append(Call(unit, z.detach().clone(), a, part, **how))

    def listen(self, unit: Unit, module: nn.Module) -> Callable[[], None]:
        """Taps a whitened layer; what is returned ends it."""
        inputs: list[Tensor] = []

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            z = args[0] if args else kwargs["input"]
            if module.geometry is None:
                _check(unit, z)
            inputs.append(module.padded(z.detach().clone()))

        def after(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self.note(unit, inputs.pop(), output, geometry=module.geometry)
            return output.clone()

        handles = ExitStack()
        handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        handles.callback(module.register_forward_hook(after).remove)
        return handles.close


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
