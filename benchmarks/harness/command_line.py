"""The command line of a benchmark: options that all of them share, and settings that `--quick` makes small."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"


class CommandLine(argparse.ArgumentParser):
    """A parser with --quick and --threads, and with --out where results are kept, and --draw where there is a figure.

    >>> parser = CommandLine("An example.")
    >>> parser.setting("rounds", 7, 2, "rounds of timing")
    >>> parser.parse(["--quick"]).rounds, parser.parse([]).rounds
    (2, 7)
    """

    def __init__(self, description: str | None, threads: int = 1, out: bool = False, draw: bool = False) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.settings: dict[str, tuple[Any, Any]] = {}
        self.add_argument("--quick", action="store_true", help="a small run that only shows that the script works")
        self.add_argument("--threads", type=int, default=threads, help=f"of torch (default {threads})")
        if out:
            self.add_argument("--out", type=Path, help="folder of results (default: docs, or a new one if --quick)")
        if draw:
            self.add_argument("--draw", action="store_true", help="run nothing; tables and figures of what is in --out")

    def setting(self, name: str, default: Any, quick: Any, text: str) -> None:
        """An option --name with one default for real runs and one for --quick. A list of integers is given as 0,1,2."""
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        kind = integers if isinstance(default, list) else type(default)
        self.add_argument(f"--{name}", type=kind, help=f"{text} (default {shown})")
        self.settings[name] = (default, quick)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options, with defaults filled in and torch's threads set."""
        options = self.parse_args(arguments)
        for name, (default, quick) in self.settings.items():
            if getattr(options, name) is None:
                setattr(options, name, quick if options.quick else default)
        if "out" in options and options.out is None:
            options.out = Path(tempfile.mkdtemp(prefix="bprong-")) if options.quick else DOCS
        torch.set_num_threads(options.threads)
        torch.set_flush_denormal(True)
        return options


def integers(text: str) -> list[int]:
    """
    >>> integers("0,1,2")
    [0, 1, 2]
    """
    return [int(number) for number in text.split(",") if number]
