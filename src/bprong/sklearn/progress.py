"""The progress of a fit: a bar on a terminal, one line for each iteration elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

WIDTH = 30  # of the bar, in characters


class Progress:
    """Writes to `stream`, unless there is nothing to say (verbose=False)."""

    def __init__(self, verbose: bool | int, max_iter: int, stream: TextIO | None = None) -> None:
        self._stream = (stream or sys.stdout) if verbose else None
        self._bar = self._stream is not None and self._stream.isatty()
        self._max_iter = max_iter

    def iteration(self, done: int, loss: float, score: float | None) -> None:
        """An iteration is done, with this loss and validation score."""
        if self._stream is None:
            return
        if self._bar:
            filled = round(WIDTH * done / self._max_iter)
            bar = "█" * filled + "░" * (WIDTH - filled)
            validation = "" if score is None else f"  validation score {score:.4f}"
            self._write(f"\r{bar} {done}/{self._max_iter}  loss {loss:.6f}{validation}")
            return
        self._write(f"Iteration {done}, loss = {loss:.8f}\n")
        if score is not None:
            self._write(f"Validation score: {score:.6f}\n")

    def end(self, message: str) -> None:
        """Training has stopped, for this reason."""
        self._write(f"\n{message}\n" if self._bar else f"{message}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
