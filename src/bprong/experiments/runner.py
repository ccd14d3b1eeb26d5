"""Train all methods in one loop, taking turns epoch by epoch, and save everything after every epoch.

All methods of a seed start from the same weights and see the same batches in the same order. The order and the initial
weights depend only on the seed and the epoch, so an interrupted run can be resumed with the same results. In several
processes each takes an equal part of every batch, and the first one writes.
"""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bprong.distributed import Ranks
from bprong.errors import WhiteningError, WhiteningWarning
from bprong.experiments.data import Dataset
from bprong.experiments.methods import METHODS, Problem, TrainingState
from bprong.experiments.models import perceptron
from bprong.experiments.progress import Progress
from bprong.experiments.records import (
    RecordError,
    Row,
    read_results,
    remove_temporary_files,
    write_atomically,
    write_results,
)

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in the same folder are not detected
    fcntl = None  # type: ignore[assignment]

CHECKPOINTS = "checkpoints"


class OutError(ValueError):
    """The run must not write to this output folder."""


class ResumeError(ValueError):
    """A checkpoint does not belong to this run; the message says how it differs."""


@dataclass(frozen=True)
class Config:
    """The settings of a run. A resumed run may change methods, epochs and seeds; all others must stay the same.

    The schedule of a recipe covers all epochs, so a run that resumes a recipe may not change the number of epochs.

    whitening: settings of the paper's whitened networks that differ from the defaults, by name
    """

    methods: tuple[str, ...] = (
        "sgd", "bn", "prong", "bprong", "bprong-fast", "bprong-auto", "bprong-recipe", "bn-recipe",
    )  # fmt: skip
    epochs: int = 20
    seeds: int = 1
    activation: str = "relu"
    hidden: tuple[int, ...] = (100, 100, 100)
    lr: float = 0.01
    batch: int = 100
    whitening: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Trial:
    """One method with one seed: the network in training and its rows so far."""

    method: str
    seed: int
    state: TrainingState
    rows: list[Row]

    @cached_property
    def network(self) -> nn.Module:
        """The network as training calls it; in several processes, wrapped to average gradients."""
        model = self.state.model
        return model if Ranks().size == 1 else DistributedDataParallel(model)

    @property
    def diverged(self) -> bool:
        return bool(self.rows) and not math.isfinite(self.rows[-1].train_loss)

    @property
    def epoch(self) -> int:
        """The last recorded epoch; −1 if not even the untrained network has been evaluated."""
        return self.rows[-1].epoch if self.rows else -1


def run(config: Config, data: Dataset, out: Path, progress: Progress, resume: bool = False) -> list[Row]:
    """Train and evaluate every method with every seed; return all rows, which are also written to out/results.csv.

    A resumed run keeps the rows of methods and seeds that it does not train itself.
    """
    _check(config, data)
    trials = [_new_trial(config, data, method, seed) for seed in range(config.seeds) for method in config.methods]
    kept: list[Row] = []
    if resume:
        kept = _rows_of_others(out, trials)
        for trial in trials:
            _load(trial, out, _identity(config, data, trial.method))
    writes = Ranks().rank == 0
    (out / CHECKPOINTS).mkdir(parents=True, exist_ok=True)  # after everything that raises for a wrong setting
    with locked(out) if writes else nullcontext():
        for trial in trials:
            progress.update(trial.method, trial.rows, config.epochs)
        for trial in _turns(trials, config.epochs):
            if trial.epoch == 0:
                _warm_up(config, data, trial.method)
            _run_epoch(trial, config, data, progress)
            if writes:
                _save(trial, out, _identity(config, data, trial.method))
                write_results(out / "results.csv", _all_rows(kept, trials))
            progress.update(trial.method, trial.rows, config.epochs)
        if writes:
            write_results(out / "results.csv", _all_rows(kept, trials))
            for folder in (out, out / CHECKPOINTS):
                remove_temporary_files(folder)  # of an earlier run that was killed while writing
    return _all_rows(kept, trials)


def _all_rows(kept: Sequence[Row], trials: Sequence[Trial]) -> list[Row]:
    return [*kept, *(row for trial in trials for row in trial.rows)]


def _check(config: Config, data: Dataset) -> None:
    """Raise for settings that would otherwise fail in the middle of a run."""
    if data.classes < 2:
        raise ValueError(f"{data.name} has only one class; at least two are required")
    processes = Ranks().size
    if min(config.batch, len(data.x_train)) % processes:
        raise ValueError(f"--batch {config.batch} cannot be divided equally among {processes} processes")
    normalised = [name for name in ("bn", "bn-recipe") if name in config.methods]
    if normalised and min(config.batch, len(data.x_train)) < 2 * processes:
        raise ValueError(
            "batch normalisation requires at least two examples per batch; use --batch 2 or leave out "
            + " and ".join(normalised)
        )


def _rows_of_others(out: Path, trials: Sequence[Trial]) -> list[Row]:
    """The rows in results.csv of methods and seeds not in `trials`; none if the file is missing or malformed."""
    own = {(trial.method, trial.seed) for trial in trials}
    try:
        return [row for row in read_results(out / "results.csv") if (row.method, row.seed) not in own]
    except (OSError, RecordError):
        return []


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Allow one run at a time in a folder; the operating system drops the lock when the process ends."""
    with (out / ".lock").open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OutError(f"another run is writing to {out}; choose another --out") from None
        yield


def _turns(trials: Sequence[Trial], epochs: int) -> Iterator[Trial]:
    """The trials in the order in which they train: seed by seed, epoch by epoch, each epoch with another method first.

    Methods that take turns share slow phases of the machine, so that their times can be compared.
    """
    for seed in dict.fromkeys(trial.seed for trial in trials):
        own = [trial for trial in trials if trial.seed == seed]
        for epoch in range(epochs + 1):
            first = epoch % len(own)
            for trial in own[first:] + own[:first]:
                if trial.epoch < epoch and not trial.diverged:
                    yield trial


def _warm_up(config: Config, data: Dataset, method: str) -> None:
    """Train a network that is thrown away for two updates, because the first updates in a process are slow."""
    trial = _new_trial(config, data, method, seed=0)
    first = torch.arange(len(data.x_train))[: 2 * config.batch]
    train_epoch(trial.state, data.x_train, data.y_train, first, config.batch, network=trial.network)


def _new_trial(config: Config, data: Dataset, method: str, seed: int) -> Trial:
    plain = perceptron([data.features, *config.hidden, data.classes], config.activation, seed)
    whitening = replace(METHODS[method].whitening, **config.whitening)
    problem = Problem(plain, config.lr, data.x_train, data.y_train, seed, whitening)
    updates = config.epochs * _updates(len(data.x_train), config.batch)
    return Trial(method, seed, METHODS[method].start(problem, updates), [])


def _updates(examples: int, batch: int) -> int:
    """The number of updates of an epoch: only full batches, but at least one."""
    return max(1, examples // batch)


def _run_epoch(trial: Trial, config: Config, data: Dataset, progress: Progress) -> None:
    """Train for one epoch, then evaluate with the clock stopped. A new trial is only evaluated, as epoch 0."""
    epoch = trial.epoch + 1
    step = trial.rows[-1].step if trial.rows else 0
    seconds = trial.rows[-1].seconds if trial.rows else 0.0
    failure: Exception | None = None
    name = f"{trial.method}, seed {trial.seed}"
    if epoch > 0:
        generator = torch.Generator().manual_seed(trial.seed * 1_000_003 + epoch)
        order = torch.randperm(len(data.x_train), generator=generator)
        with _warnings_as_messages(f"{name}, epoch {epoch}", progress):
            start = time.perf_counter()
            try:
                step += train_epoch(
                    trial.state, data.x_train, data.y_train, order, config.batch,
                    lambda fraction: progress.tick(trial.method, fraction), trial.network,
                )  # fmt: skip
            except (WhiteningError, FloatingPointError) as error:  # the second comes from the drop-in optimizer
                failure = error
            seconds += time.perf_counter() - start
    losses = (math.nan, math.nan, math.nan) if failure else _evaluate(trial.state.deployed(), data)
    trial.rows.append(Row(trial.method, trial.seed, epoch, step, seconds, *losses))
    if trial.diverged:
        progress.message(f"{name}: diverged in epoch {epoch}: {failure or 'the loss is not finite'}")


def train_epoch(
    state: TrainingState,
    x: Tensor,
    y: Tensor,
    order: Tensor,
    batch: int,
    tick: Callable[[float], None] = lambda fraction: None,
    network: nn.Module | None = None,
) -> int:
    """Train on every full batch of `order` once; return the number of updates.

    tick:    receives the fraction done
    network: the model as it is called, if it is wrapped
    """
    model = (state.model if network is None else network).train()
    updates = _updates(len(order), batch)
    ranks = Ranks()
    for step, whole in enumerate(torch.split(order[: updates * batch], batch), start=1):
        chosen = whole[ranks.rank :: ranks.size]
        inputs = x[chosen]
        labels = y[chosen]
        if state.rewhitening is not None:
            state.rewhitening.step(inputs, labels)
        state.optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()
        state.after_update()
        if step % 50 == 0:
            tick(step / updates)
    return updates


@contextmanager
def _warnings_as_messages(where: str, progress: Progress) -> Iterator[None]:
    """Report whitening warnings through `progress`, because printing them directly would garble the bars."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WhiteningWarning)
        yield
    for warning in caught:
        progress.message(f"{where}: {warning.message}")


@torch.no_grad()
def _evaluate(model: nn.Module, data: Dataset) -> tuple[float, float, float]:
    """Return training loss, validation loss and validation accuracy."""
    output = model(data.x_test)
    train_loss = F.cross_entropy(model(data.x_train), data.y_train)
    accuracy = (output.argmax(dim=1) == data.y_test).double().mean()
    return float(train_loss), float(F.cross_entropy(output, data.y_test)), float(accuracy)


def _identity(config: Config, data: Dataset, method: str) -> dict[str, Any]:
    """The settings that must be equal for a checkpoint to be resumed."""
    own = {k: v for k, v in asdict(config).items() if k not in ("methods", "epochs", "seeds", "whitening")}
    own |= {"hidden": list(config.hidden), "data": data.name, "fingerprint": data.fingerprint}
    own |= {f"optimizer.{name}": value for name, value in METHODS[method].defaults.items()}  # a release may change them
    if (recipe := METHODS[method].recipe) is not None:
        own |= {"epochs": config.epochs} | {f"recipe.{name}": value for name, value in asdict(recipe).items()}
    return own | (asdict(replace(METHODS[method].whitening, **config.whitening)) if METHODS[method].sides else {})


def _path(out: Path, trial: Trial) -> Path:
    return out / CHECKPOINTS / f"{trial.method}-{trial.seed}.pt"


def _save(trial: Trial, out: Path, identity: dict[str, Any]) -> None:
    rows = [asdict(row) for row in trial.rows]
    file = io.BytesIO()
    torch.save({"identity": identity, "rows": rows, "trainee": trial.state.state_dict()}, file)
    write_atomically(_path(out, trial), file.getvalue())


def _load(trial: Trial, out: Path, identity: dict[str, Any]) -> None:
    """Continue from the trial's checkpoint if there is one; ResumeError if its settings differ."""
    path = _path(out, trial)
    if not path.exists():
        return
    saved = _read_checkpoint(path)
    old = saved["identity"]
    if differing := "; ".join(
        f"{key} was {old.get(key)}, now {new}" for key, new in identity.items() if old.get(key) != new
    ):
        raise ResumeError(
            f"{path} belongs to a run with other settings: {differing}. "
            f"Use the same settings, or another --out, or leave out {trial.method}"
        )
    trial.state.load_state_dict(saved["trainee"])
    trial.rows = [Row(**row) for row in saved["rows"]]


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
        if isinstance(saved, dict) and {"identity", "rows", "trainee"} <= set(saved):
            # Older checkpoints have the solver under its former name.
            saved["identity"].setdefault("solver", saved["identity"].get("factorisation"))
            return saved
    except (RuntimeError, EOFError, ValueError, UnpicklingError):
        pass
    raise ResumeError(f"{path} is not a checkpoint of a run, or is damaged; delete it to train that network again")


def load_trained(path: Path, data: Dataset) -> nn.Module:
    """Load the network of a checkpoint for use: stock layers, in eval mode."""
    if not path.exists():
        raise ResumeError(f"{path}: no such checkpoint; a run saves them in its output folder, under {CHECKPOINTS}")
    saved = _read_checkpoint(path)
    identity = saved["identity"]
    if identity["fingerprint"] != data.fingerprint:
        raise ResumeError(f"{path} was trained on {identity['data']}, which differs from the data given, {data.name}")
    config = Config(activation=identity["activation"], hidden=tuple(identity["hidden"]))
    trial = _new_trial(config, data, path.stem.rpartition("-")[0], seed=0)
    trial.state.model.load_state_dict(saved["trainee"]["model"])
    if trial.state.average is not None:
        trial.state.average.load_state_dict(saved["trainee"]["average"])
    return trial.state.deployed()
