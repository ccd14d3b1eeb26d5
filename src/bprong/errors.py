"""The package's own exception and warning, the line that a warning is about, and how missing packages are installed."""

from __future__ import annotations

import importlib.metadata
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


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of bprong needs, wherever bprong itself was installed from."""
    try:
        requirements = importlib.metadata.requires("bprong") or []
    except importlib.metadata.PackageNotFoundError:  # the source is on the path, and nothing is installed
        requirements = []
    names = []
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        is_needed = marker.replace('"', "'").strip() == f"extra == '{extra}'"
        if is_needed and not name.startswith("bprong["):  # which may not be what is installed here
            names.append(_quoted(name.strip()))
    return "pip install " + (" ".join(names) or f"'bprong[{extra}]'")


def _quoted(requirement: str) -> str:
    """Return a requirement as a shell takes it: a version would be read as a file to write to."""
    return requirement if requirement.replace("_", "").replace("-", "").isalnum() else f"'{requirement}'"
