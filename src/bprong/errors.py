"""The package's own exception and warning, and the line that a warning is about."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from itertools import takewhile

import torch

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # missing in torch's stubs

_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))


class WhiteningError(RuntimeError):
    """The statistics of a layer cannot be whitened; the message says why."""


class WhiteningWarning(UserWarning):
    """Training goes on, but not as configured: for example, a layer keeps its previous whitener."""


def warn(message: str) -> None:
    """Warn at the innermost line outside of bprong and torch, however deep the warning arises."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe()))
    inside = takewhile(lambda file: file.startswith(_LIBRARIES), files)
    warnings.warn(message, WhiteningWarning, stacklevel=1 + len(list(inside)))
