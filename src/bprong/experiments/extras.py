"""How packages that only the experiments need are installed."""

from __future__ import annotations

import importlib.metadata
import shlex


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
            names.append(shlex.quote(name.strip()))
    return "pip install " + (" ".join(names) or shlex.quote(f"bprong[{extra}]"))
