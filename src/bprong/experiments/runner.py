"""The run: one training loop for all methods, interleaved epoch by epoch, on disk after every epoch.

Every method of a seed starts from the same weights and sees the same batches in the same order. Order and initial
weights follow from the seed and the epoch alone, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.experiments.data import Dataset
from bprong.experiments.methods import METHODS, Problem, Trainee
from bprong.experiments.models import perceptron
from bprong.experiments.progress import Progress
from bprong.experiments.records import Row, write_atomically, write_results
from bprong.schedule import WhiteningWarning
from bprong.whitening import WhiteningError

__all__ = ["Config", "ResumeError", "load_trained", "run", "train_epoch"]

CHECKPOINTS = "checkpoints"


class ResumeError(ValueError):
    """A checkpoint that does not belong to this run; the message says in what it differs."""


@dataclass(frozen=True)
class Config:
    """What a run does. Everything but methods, seeds and epochs shapes each trial and must be equal to resume it."""

    methods: tuple[str, ...] = ("sgd", "bn", "prong", "bprong")
    epochs: int = 20
    seeds: int = 1
    activation: str = "relu"
    hidden: tuple[int, ...] = (100, 100, 100)
    lr: float = 0.01
    batch: int = 100
    whitening: Mapping[str, Any] = field(default_factory=dict)  # what differs from each method's own defaults


@dataclass
class Trial:
    """One method with one seed: the network in training and its rows so far."""

    method: str
    seed: int
    trainee: Trainee
    rows: list[Row]

    @property
    def diverged(self) -> bool:
        return bool(self.rows) and not math.isfinite(self.rows[-1].train_loss)

    @property
    def epoch(self) -> int:
        """The last epoch on record; −1 before the untrained network was evaluated."""
        return self.rows[-1].epoch if self.rows else -1


def run(config: Config, data: Dataset, out: Path, progress: Progress, resume: bool = False) -> list[Row]:
    """Trains and evaluates every trial; returns all rows, which are also in out/results.csv."""
    trials = [_start(config, data, method, seed) for seed in range(config.seeds) for method in config.methods]
    if resume:
        for trial in trials:
            _load(trial, _path(out, trial), _identity(config, data, trial.method))
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)  # only now: a wrong setting has raised by here
    for trial in trials:
        progress.show(trial.method, trial.rows, config.epochs)
    for trial in _turns(trials, config.epochs):
        _advance(trial, config, data, progress)
        _save(trial, _path(out, trial), _identity(config, data, trial.method))
        write_results(out / "results.csv", [row for t in trials for row in t.rows])
        progress.show(trial.method, trial.rows, config.epochs)
    rows = [row for trial in trials for row in trial.rows if row.epoch <= config.epochs]
    write_results(out / "results.csv", rows)
    return rows


def _turns(trials: Sequence[Trial], epochs: int) -> Iterator[Trial]:
    """Whose turn it is: seed by seed, and within a seed epoch by epoch, all methods taking turns."""
    for seed in dict.fromkeys(trial.seed for trial in trials):
        own = [trial for trial in trials if trial.seed == seed]
        for epoch in range(epochs + 1):
            for trial in own:
                if trial.epoch < epoch and not trial.diverged:
                    yield trial


def _start(config: Config, data: Dataset, method: str, seed: int) -> Trial:
    plain = perceptron([data.features, *config.hidden, data.classes], config.activation, seed)
    whitening = replace(METHODS[method].whitening, **config.whitening)
    problem = Problem(plain, config.lr, data.x_train, data.y_train, seed, whitening)
    return Trial(method, seed, METHODS[method].prepare(problem), [])


def _advance(trial: Trial, config: Config, data: Dataset, progress: Progress) -> None:
    """Trains for one epoch (not before the first row, the untrained network) and evaluates, outside the clock."""
    epoch = trial.epoch + 1
    step, seconds = (trial.rows[-1].step, trial.rows[-1].seconds) if trial.rows else (0, 0.0)
    failure: WhiteningError | None = None
    if epoch > 0:
        order = torch.randperm(len(data.x_train), generator=_generator(trial.seed, epoch))
        with _warnings_said(f"{trial.method}, seed {trial.seed}, epoch {epoch}", progress):
            start = time.perf_counter()
            try:
                step += train_epoch(
                    trial.trainee, data.x_train, data.y_train, order, config.batch,
                    lambda share: progress.tick(trial.method, share),
                )  # fmt: skip
            except WhiteningError as reason:
                failure = reason
            seconds += time.perf_counter() - start
    losses = (math.nan, math.nan, math.nan) if failure else _evaluate(trial.trainee.deployed(), data)
    trial.rows.append(Row(trial.method, trial.seed, epoch, step, seconds, *losses))
    if trial.diverged:
        why = failure or "its loss is not finite"
        progress.say(f"{trial.method}, seed {trial.seed}: diverged in epoch {epoch}; {why}")


def train_epoch(
    trainee: Trainee,
    x: Tensor,
    y: Tensor,
    order: Tensor,
    batch: int,
    tick: Callable[[float], None] = lambda share: None,
) -> int:
    """The one training loop: every batch of `order` once; returns the number of updates."""
    model, optimizer, rewhitening = trainee.model.train(), trainee.optimizer, trainee.rewhitening
    updates = max(1, len(order) // batch)
    for step, chosen in enumerate(torch.split(order[: updates * batch], batch), start=1):
        xb, yb = x[chosen], y[chosen]
        if rewhitening is not None:
            rewhitening.step(xb, yb)
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 50 == 0:
            tick(step / updates)
    return updates


@contextmanager
def _warnings_said(where: str, progress: Progress) -> Iterator[None]:
    """Warnings about whiteners become lines of the run's own, which do not tear the bars apart."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WhiteningWarning)
        yield
    for warning in caught:
        progress.say(f"{where}: {warning.message}")


@torch.no_grad()
def _evaluate(model: nn.Module, data: Dataset) -> tuple[float, float, float]:
    """Training loss, validation loss, validation accuracy."""
    output = model(data.x_test)
    accuracy = (output.argmax(dim=1) == data.y_test).double().mean()
    return (
        float(F.cross_entropy(model(data.x_train), data.y_train)),
        float(F.cross_entropy(output, data.y_test)),
        float(accuracy),
    )


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def _identity(config: Config, data: Dataset, method: str) -> dict[str, Any]:
    """What must be equal for a checkpoint to belong to this run."""
    own = {k: v for k, v in asdict(config).items() if k not in ("methods", "epochs", "seeds", "whitening")}
    whitening = asdict(replace(METHODS[method].whitening, **config.whitening))
    return own | {"hidden": list(config.hidden), "data": data.name, "examples": len(data.x_train)} | whitening


def _path(out: Path, trial: Trial) -> Path:
    return out / CHECKPOINTS / f"{trial.method}-{trial.seed}.pt"


def _save(trial: Trial, path: Path, identity: dict[str, Any]) -> None:
    rows = [asdict(row) for row in trial.rows]
    file = io.BytesIO()
    torch.save({"identity": identity, "rows": rows, "trainee": trial.trainee.state_dict()}, file)
    write_atomically(path, file.getvalue())


def _load(trial: Trial, path: Path, identity: dict[str, Any]) -> None:
    if not path.exists():
        return
    saved = torch.load(path, weights_only=True)
    differing = [k for k in identity if saved["identity"].get(k) != identity[k]]
    if differing:
        said = "; ".join(f"{k} was {saved['identity'].get(k)}, now {identity[k]}" for k in differing)
        raise ResumeError(f"{path} belongs to a run with other settings: {said}. Give those, or another --out")
    trial.trainee.load_state_dict(saved["trainee"])
    trial.rows = [Row(**row) for row in saved["rows"]]


def load_trained(path: Path, data: Dataset) -> nn.Module:
    """The network of a checkpoint as it would be used, stock layers and all."""
    if not path.exists():
        raise ResumeError(f"{path}: no such checkpoint; a run keeps them in its folder under {CHECKPOINTS}")
    saved = torch.load(path, weights_only=True)
    identity, method = saved["identity"], path.stem.rpartition("-")[0]
    if identity["data"] != data.name:
        raise ResumeError(f"{path} was trained on {identity['data']}; the data given are {data.name}")
    config = Config(activation=identity["activation"], hidden=tuple(identity["hidden"]))
    trial = _start(config, data, method, seed=0)
    trial.trainee.model.load_state_dict(saved["trainee"]["model"])
    return trial.trainee.deployed()
