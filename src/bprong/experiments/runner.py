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
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bprong.experiments.data import Dataset
from bprong.experiments.methods import METHODS, Problem, Trainee
from bprong.experiments.models import perceptron
from bprong.experiments.progress import Progress
from bprong.experiments.records import (
    RecordError,
    Row,
    read_results,
    remove_leftovers,
    write_atomically,
    write_results,
)
from bprong.schedule import WhiteningWarning
from bprong.whitening import WhiteningError

try:
    import fcntl
except ImportError:  # Windows has none; there two runs in one folder are the user's own affair
    fcntl = None  # type: ignore[assignment]

__all__ = ["Config", "OutError", "ResumeError", "load_trained", "run", "train_epoch"]

CHECKPOINTS = "checkpoints"


class OutError(ValueError):
    """An output folder that this run must not write to."""


class ResumeError(ValueError):
    """A checkpoint that does not belong to this run; the message says in what it differs."""


@dataclass(frozen=True)
class Config:
    """What a run does. Everything but methods, seeds and epochs shapes each trial and must be equal to resume it."""

    methods: tuple[str, ...] = ("sgd", "bn", "prong", "bprong", "bprong-fast", "bprong-auto")
    epochs: int = 20
    seeds: int = 1
    activation: str = "relu"
    hidden: tuple[int, ...] = (100, 100, 100)
    lr: float = 0.01
    batch: int = 100
    whitening: Mapping[str, Any] = field(default_factory=dict)  # where the paper's networks differ from their defaults


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
    """Trains and evaluates every trial; returns all rows, which are also in out/results.csv.

    A resumed run keeps the rows of methods and seeds it was not asked for.
    """
    _check(config, data)
    trials = [_start(config, data, method, seed) for seed in range(config.seeds) for method in config.methods]
    others: list[Row] = []
    if resume:
        others = _other_rows(out, trials)
        for trial in trials:
            _load(trial, _path(out, trial), _identity(config, data, trial.method))
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)  # only now: a wrong setting has raised by here
    with _locked(out):
        for trial in trials:
            progress.show(trial.method, trial.rows, config.epochs)
        for trial in _turns(trials, config.epochs):
            if trial.epoch == 0:
                _warm_up(config, data, trial.method)
            _advance(trial, config, data, progress)
            _save(trial, _path(out, trial), _identity(config, data, trial.method))
            write_results(out / "results.csv", [*others, *(row for t in trials for row in t.rows)])
            progress.show(trial.method, trial.rows, config.epochs)
        rows = [*others, *(row for trial in trials for row in trial.rows)]
        write_results(out / "results.csv", rows)
        for folder in (out, out / CHECKPOINTS):
            remove_leftovers(folder)  # of writes that a kill cut short
    return rows


def _check(config: Config, data: Dataset) -> None:
    """What would otherwise be found out in the middle of a run."""
    if data.classes < 2:
        raise ValueError(f"{data.name} has one class only; there is nothing to tell apart")
    if "bn" in config.methods and min(config.batch, len(data.x_train)) < 2:
        raise ValueError("Batch Normalisation needs at least two examples in a batch; leave out bn, or give --batch 2")


def _other_rows(out: Path, trials: Sequence[Trial]) -> list[Row]:
    """Rows already there of trials that this run does not speak of; a broken file has none."""
    own = {(trial.method, trial.seed) for trial in trials}
    try:
        return [row for row in read_results(out / "results.csv") if (row.method, row.seed) not in own]
    except (OSError, RecordError):
        return []


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One run at a time in a folder; the lock goes with the process, however it ends."""
    with (out / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutError(f"another run is writing to {out}; choose another --out") from None
        yield


def _turns(trials: Sequence[Trial], epochs: int) -> Iterator[Trial]:
    """Whose turn it is: seed by seed, and within a seed epoch by epoch; who comes first changes with the epoch."""
    for seed in dict.fromkeys(trial.seed for trial in trials):
        own = [trial for trial in trials if trial.seed == seed]
        for epoch in range(epochs + 1):
            first = epoch % len(own)
            for trial in own[first:] + own[:first]:
                if trial.epoch < epoch and not trial.diverged:
                    yield trial


def _warm_up(config: Config, data: Dataset, method: str) -> None:
    """Two updates of a network to throw away: a process's first are slow, whoever makes them."""
    trainee = _start(config, data, method, seed=0).trainee
    train_epoch(trainee, data.x_train, data.y_train, torch.arange(len(data.x_train))[: 2 * config.batch], config.batch)


def _start(config: Config, data: Dataset, method: str, seed: int) -> Trial:
    plain = perceptron([data.features, *config.hidden, data.classes], config.activation, seed)
    whitening = replace(METHODS[method].whitening, **config.whitening)
    problem = Problem(plain, config.lr, data.x_train, data.y_train, seed, whitening)
    return Trial(method, seed, METHODS[method].prepare(problem), [])


def _advance(trial: Trial, config: Config, data: Dataset, progress: Progress) -> None:
    """Trains for one epoch (not before the first row, the untrained network) and evaluates, outside the clock."""
    epoch = trial.epoch + 1
    step, seconds = (trial.rows[-1].step, trial.rows[-1].seconds) if trial.rows else (0, 0.0)
    failure: Exception | None = None
    if epoch > 0:
        order = torch.randperm(len(data.x_train), generator=_generator(trial.seed, epoch))
        with _warnings_said(f"{trial.method}, seed {trial.seed}, epoch {epoch}", progress):
            start = time.perf_counter()
            try:
                step += train_epoch(
                    trial.trainee, data.x_train, data.y_train, order, config.batch,
                    lambda share: progress.tick(trial.method, share),
                )  # fmt: skip
            except (WhiteningError, FloatingPointError) as reason:  # the second is the drop-in optimizer's
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
    own |= {"hidden": list(config.hidden), "data": data.name, "fingerprint": data.fingerprint}
    own |= {f"optimizer.{name}": value for name, value in METHODS[method].defaults.items()}  # a release may change them
    return own | (asdict(replace(METHODS[method].whitening, **config.whitening)) if METHODS[method].sides else {})


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
    saved = _read(path)
    differing = [k for k in identity if saved["identity"].get(k) != identity[k]]
    if differing:
        said = "; ".join(f"{k} was {saved['identity'].get(k)}, now {identity[k]}" for k in differing)
        raise ResumeError(f"{path} belongs to a run with other settings: {said}. Give those, or another --out")
    trial.trainee.load_state_dict(saved["trainee"])
    trial.rows = [Row(**row) for row in saved["rows"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
        if isinstance(saved, dict) and {"identity", "rows", "trainee"} <= set(saved):
            return saved
    except (RuntimeError, EOFError, ValueError, UnpicklingError):
        pass
    raise ResumeError(f"{path} is not a checkpoint of a run, or is damaged; delete it to train that network again")


def load_trained(path: Path, data: Dataset) -> nn.Module:
    """The network of a checkpoint as it would be used, stock layers and all."""
    if not path.exists():
        raise ResumeError(f"{path}: no such checkpoint; a run keeps them in its folder under {CHECKPOINTS}")
    saved = _read(path)
    identity, method = saved["identity"], path.stem.rpartition("-")[0]
    if identity["fingerprint"] != data.fingerprint:
        raise ResumeError(f"{path} was trained on {identity['data']}; the data given, {data.name}, are other data")
    config = Config(activation=identity["activation"], hidden=tuple(identity["hidden"]))
    trial = _start(config, data, method, seed=0)
    trial.trainee.model.load_state_dict(saved["trainee"]["model"])
    return trial.trainee.deployed()
