"""Puts benchmarks/ on the path, as Python does for a script in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
