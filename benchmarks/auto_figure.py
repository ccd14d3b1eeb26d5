"""Draws figures/auto.png: the races of auto_autoencoder, auto_paper and auto_deep, from their CSV files. Prints tables.

python benchmarks/auto_figure.py               from docs/auto-*.csv
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import auto_autoencoder
import auto_deep
import auto_paper
from harness import figures
from harness.command_line import DOCS, CommandLine
from harness.training import Row
from problems.standard import DEEP

from bprong.experiments.bench.rows import read


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True)
    parser.add_argument("--csv", type=Path, default=DOCS, help="folder of the CSV files (default: docs)")
    options = parser.parse(arguments)
    rows = {name: read(options.csv / f"auto-{name}.csv", Row) for name in ("autoencoder", "paper", "deep")}
    for name, script in (("autoencoder", auto_autoencoder), ("paper", auto_paper), ("deep", auto_deep)):
        print(f"\nauto-{name}.csv\n\n{script.table(rows[name])}")
    with figures.drawing(options.out / "figures" / "auto.png", 2, 2, 8.4) as (_, axes):
        auto_autoencoder.draw_panel(axes[0], rows["autoencoder"])
        auto_paper.draw_panel(axes[1], rows["paper"])
        for panel, problem in zip(axes[2:], DEEP, strict=True):
            auto_deep.draw_panel(panel, rows["deep"], problem)


if __name__ == "__main__":
    main()
