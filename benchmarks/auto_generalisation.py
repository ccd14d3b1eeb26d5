"""How do training and validation loss of lr="auto" compare, and what lowers the validation loss?

The paper's network on MNIST, batch 100, five epochs: lr="auto" as it is, with weight decay, with strong damping, and
with averaged weights; Adam and SGD at one customary learning rate each, not tuned.

    python benchmarks/auto_generalisation.py       5 minutes on one core; runs what docs/auto-general.csv lacks
    python benchmarks/auto_generalisation.py --draw          docs/figures/generalisation.png, and a table in Markdown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from harness import figures
from harness.command_line import CommandLine
from harness.training import AUTO, Row, Run, name_of, paths_by
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator
from problems.standard import paper

from bprong.experiments.bench.rows import Log
from bprong.experiments.bench.tables import markdown

AVERAGED = f"{AUTO}, averaged weights"
METHODS: dict[str, tuple[str, dict[str, float]]] = {  # learning rate, settings of BPRONG
    AUTO: ("auto", {}),
    f"{AUTO}, weight decay 1e-4": ("auto", {"weight_decay": 1e-4}),
    f"{AUTO}, weight decay 1e-3": ("auto", {"weight_decay": 1e-3}),
    f"{AUTO}, strong damping": ("auto", {"forward_damping": 1.0, "backward_damping": 0.1}),
    "adam": ("1e-3", {}),
    "sgd": ("0.1", {}),
}


def train(run: Run, epochs: int, steps: int) -> list[Row]:
    """The rows of a run after every epoch, and those of its averaged weights if it has any."""
    averages = []
    for epoch in range(epochs + 1):
        run.until(steps=epoch * steps).record(validate=True)
        if run.average is not None:
            averages.append(run.record_average(AVERAGED))
    return run.rows + averages


def medians(paths: Sequence[list[Row]], column: str) -> list[float]:
    """Medians over seeds after every epoch, without the untrained network."""
    return [median(getattr(row, column) for row in rows) for rows in zip(*paths, strict=False)][1:]


def table(rows: Sequence[Row]) -> str:
    """Training and validation loss after every epoch."""
    lines = []
    for (method, lr), paths in paths_by(rows, "method", "lr").items():
        pairs = zip(medians(paths, "train_loss"), medians(paths, "val_loss"), strict=True)
        least = median(min(row.val_loss for row in path) for path in paths)
        lines.append([name_of(method), lr, *(f"{train:.4f} / {val:.4f}" for train, val in pairs), f"{least:.4f}"])
    epochs = max(len(line) for line in lines) - 3
    return markdown(["method", "lr", *(f"epoch {i + 1}" for i in range(epochs)), "least validation loss"], lines)


def draw_epochs(axes: Axes, rows: Sequence[Row]) -> None:
    """Validation loss against epochs."""
    for (method, _), paths in paths_by(rows, "method", "lr").items():
        losses = [[row.val_loss for row in path[1:]] for path in paths]
        epochs = list(range(1, min(map(len, losses)) + 1))
        figures.band(axes, epochs, [path[: len(epochs)] for path in losses], figures.STYLES[method])
    axes.xaxis.set_major_locator(MultipleLocator(1))
    figures.frame(axes, "Validation loss by epoch", "epochs", "validation loss, nats")


def draw_training(axes: Axes, rows: Sequence[Row]) -> None:
    """Validation loss against training loss, one point per epoch."""
    for (method, lr), paths in paths_by(rows, "method", "lr").items():
        label = name_of(method) if lr == "auto" else f"{name_of(method)}, lr {float(lr):g}"
        train = medians(paths, "train_loss")
        figures.curve(axes, train, medians(paths, "val_loss"), figures.STYLES[method], label)
    figures.log_axis(axes, "x", 100)
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    equal = [low * (high / low) ** (i / 100) for i in range(101)]
    axes.plot(equal, equal, color="black", linewidth=0.9, linestyle=(0, (1, 2)), label="validation = training loss")
    axes.set_xlim(high, low)
    axes.set_ylim(bottom, top)
    figures.frame(
        axes, "Validation against training loss", "training loss, nats (training goes right)", "validation loss, nats"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    with figures.drawing(path, 1, 2, 4.6) as (chart, (left, right)):
        draw_epochs(left, rows)
        draw_training(right, rows)
        seeds = len({row.seed for row in rows})
        figures.legend(
            chart, [figures.explain("band", f"least to greatest of {seeds} seeds (line: median)")], columns=2
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = CommandLine(__doc__, out=True, draw=True)
    parser.setting("seeds", [0, 1, 2], [0], "seeds")
    parser.setting("epochs", 5, 2, "epochs")
    parser.setting("steps", 600, 10, "steps of an epoch")
    options = parser.parse(arguments)
    log = Log(options.out / "auto-general.csv", Row)
    problem = replace(paper(100, options.steps), evaluated=60_000)
    for seed in [] if options.draw else options.seeds:
        for method, (lr, settings) in METHODS.items():
            if (method, seed) not in log.grouped("method", "seed"):
                run = Run("general", problem, method, lr, seed, averaged=method == AUTO, **settings)
                log.add(train(run, options.epochs, options.steps))
                print(run, flush=True)
    print(table(log.rows))
    draw(log.rows, options.out / "figures" / "generalisation.png")


if __name__ == "__main__":
    main()
