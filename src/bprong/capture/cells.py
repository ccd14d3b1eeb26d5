"""The formulas of torch's recurrent cells (LSTMCell, GRUCell, RNNCell), by the names of their fused functions.

The fused functions do not show their pre-activations, so they are replaced by these formulas. a and r are the products
of a cell's two weights with its input and with its state. nn.LSTM and nn.GRU, which are fused over time too, have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def _lstm(a: Tensor, r: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the new state (h, c)."""
    i, f, g, o = (a + r).chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(a: Tensor, r: Tensor, h: Tensor) -> Tensor:
    """Return the new state h."""
    a_r, a_z, a_n = a.chunk(3, dim=-1)
    r_r, r_z, r_n = r.chunk(3, dim=-1)
    n = (a_n + (a_r + r_r).sigmoid() * r_n).tanh()
    return n + (a_z + r_z).sigmoid() * (h - n)


CELLS: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": lambda a, r, h: (a + r).tanh(),
    "rnn_relu_cell": lambda a, r, h: (a + r).relu(),
}
