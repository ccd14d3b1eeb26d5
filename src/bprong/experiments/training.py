"""Train one network of the experiment for an epoch, evaluate it, and save it with its rows.

All methods of a seed start from the same weights and see the same batches in the same order. The order and the initial
weights depend only on the seed and the epoch, so that any process can train the next epoch, from the file of the last
one, with the same results. Processes that train together (torch.distributed) take equal parts of every batch, and the
first one writes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bprong.errors import WhiteningError, WhiteningWarning
from bprong.experiments.bench.timing import Clock
from bprong.experiments.data import Dataset, read_shared
from bprong.experiments.methods import METHODS, Problem, TrainingState, WhiteningSettings
from bprong.experiments.models import perceptron
from bprong.experiments.records import Row, label, write_atomically
from bprong.parallel.processes import Ranks

CHECKPOINTS = "checkpoints"
EVALUATED_AT_ONCE = 1000  # examples


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

    def whitening_of(self, method: str, data: Dataset) -> WhiteningSettings:
        """The settings of a whitened network: the method's defaults for epochs of this length, and those given."""
        defaults = METHODS[method].whitening.for_epochs_of(self.updates(data))
        return replace(defaults, **self.whitening)

    def updates(self, data: Dataset) -> int:
        """The number of updates of an epoch: only full batches, but at least one."""
        return max(1, len(data.x_train) // self.batch)


class Epoch(NamedTuple):
    """A job: one epoch of one method with one seed. Before the first epoch, the untrained network is evaluated."""

    method: str
    seed: int
    epoch: int
    epochs: int

    def __str__(self) -> str:
        seed = f" seed {self.seed}" if self.seed else ""
        return f"{label(self.method)}{seed} epoch {self.epoch}/{self.epochs}"


class Outcome(NamedTuple):
    """The rows of one method with one seed, up to the epoch that was trained, and messages for the user."""

    rows: list[Row]
    messages: list[str]


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


def last_epoch(rows: Sequence[Row]) -> int:
    """The last recorded epoch; −1 if not even the untrained network has been evaluated."""
    return rows[-1].epoch if rows else -1


def diverged(rows: Sequence[Row]) -> bool:
    """Whether training has ended, because the loss was not finite."""
    return bool(rows) and not math.isfinite(rows[-1].train_loss)


@dataclass
class Training:
    """Trains the epochs that it is given. Another process may have trained the ones before.

    source: the data, or the file in which another process has put them
    trials: for each method, the network that this process trained last
    """

    config: Config
    source: Dataset | Path
    out: Path
    trials: dict[str, Trial] = field(default_factory=dict)

    @cached_property
    def data(self) -> Dataset:
        return self.source if isinstance(self.source, Dataset) else read_shared(self.source)

    def __call__(self, job: Epoch) -> Outcome:
        """Train an epoch and save the network."""
        if job.method not in self.trials:
            _warm_up(self.config, self.data, job.method)
        trial = self._trial(job)
        self.trials[job.method] = trial
        messages = []
        while last_epoch(trial.rows) < job.epoch and not diverged(trial.rows):
            messages += _run_epoch(trial, self.config, self.data)
        if Ranks().rank == 0:
            _save(trial, self.out, identity(self.config, self.data, job.method))
        return Outcome(trial.rows, messages)

    def _trial(self, job: Epoch) -> Trial:
        """The network after the epoch before: of this process, or from its file."""
        trial = self.trials.get(job.method)
        if trial is not None and (trial.seed, last_epoch(trial.rows)) == (job.seed, job.epoch - 1):
            return trial
        trial = new_trial(self.config, self.data, job.method, job.seed)
        if job.epoch > 1:
            path = checkpoint(self.out, job.method, job.seed)
            saved = read_checkpoint(path, identity(self.config, self.data, job.method))
            trial.state.load_state_dict(saved["trainee"])
            trial.rows = rows_of(saved)
        return trial


def new_trial(config: Config, data: Dataset, method: str, seed: int) -> Trial:
    """A network before training; ValueError for settings that do not fit together."""
    plain = perceptron([data.features, *config.hidden, data.classes], config.activation, seed)
    whitening = config.whitening_of(method, data)
    problem = Problem(plain, config.lr, data.x_train, data.y_train, seed, whitening)
    return Trial(method, seed, METHODS[method].start(problem, config.epochs * config.updates(data)), [])


def _warm_up(config: Config, data: Dataset, method: str) -> None:
    """Train a network that is thrown away for two updates, because the first updates in a process are slow."""
    trial = new_trial(config, data, method, seed=0)
    first = torch.arange(len(data.x_train))[: 2 * config.batch]
    train_epoch(trial.state, data.x_train, data.y_train, first, config.batch, trial.network)


def _run_epoch(trial: Trial, config: Config, data: Dataset) -> list[str]:
    """Train for one epoch, then evaluate with the clock stopped; return messages.

    A new trial is only evaluated, as epoch 0.
    """
    epoch = last_epoch(trial.rows) + 1
    step = trial.rows[-1].step if trial.rows else 0
    seconds = trial.rows[-1].seconds if trial.rows else 0.0
    failure: Exception | None = None
    messages: list[str] = []
    if epoch > 0:
        generator = torch.Generator().manual_seed(trial.seed * 1_000_003 + epoch)
        order = torch.randperm(len(data.x_train), generator=generator)
        clock = Clock(counts_waiting=Ranks().size > 1)
        with warnings.catch_warnings(record=True) as caught, clock.running():
            warnings.simplefilter("always", WhiteningWarning)
            try:
                step += train_epoch(trial.state, data.x_train, data.y_train, order, config.batch, trial.network)
            except (WhiteningError, FloatingPointError) as error:  # the second comes from the drop-in optimizer
                failure = error
        seconds += clock.seconds
        messages += [f"{trial.method}, seed {trial.seed}, epoch {epoch}: {warning.message}" for warning in caught]
    losses = (math.nan, math.nan, math.nan) if failure else _evaluate(trial.state.deployed(), data)
    trial.rows.append(Row(trial.method, trial.seed, epoch, step, seconds, *losses))
    if diverged(trial.rows):
        reason = failure or "the loss is not finite"
        messages.append(f"{trial.method}, seed {trial.seed}: diverged in epoch {epoch}: {reason}")
    return messages


def train_epoch(
    state: TrainingState, x: Tensor, y: Tensor, order: Tensor, batch: int, network: nn.Module | None = None
) -> int:
    """Train on every full batch of `order` once; return the number of updates.

    network: the model as it is called, if it is wrapped
    """
    model = (state.model if network is None else network).train()
    updates = max(1, len(order) // batch)
    ranks = Ranks()
    for whole in torch.split(order[: updates * batch], batch):
        chosen = whole[ranks.rank :: ranks.size]
        inputs = x[chosen]
        labels = y[chosen]
        if state.rewhitening is not None:
            state.rewhitening.step(*(state.sample or (inputs, labels)))
        state.optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()
        state.after_update()
    return updates


@torch.no_grad()
def _evaluate(model: nn.Module, data: Dataset) -> tuple[float, float, float]:
    """Return training loss, validation loss and validation accuracy."""
    train_loss = F.cross_entropy(_output(model, data.x_train), data.y_train)
    output = _output(model, data.x_test)
    accuracy = (output.argmax(dim=1) == data.y_test).double().mean()
    return float(train_loss), float(F.cross_entropy(output, data.y_test)), float(accuracy)


def _output(model: nn.Module, x: Tensor) -> Tensor:
    """The output on many examples; the activations of so few at a time stay in the processor's cache."""
    return torch.cat([model(part) for part in torch.split(x, EVALUATED_AT_ONCE)])


# Checkpoints ----------------------------------------------------------------------------------------------------------


def identity(config: Config, data: Dataset, method: str) -> dict[str, Any]:
    """The settings that must be equal for a checkpoint to be resumed."""
    own = {k: v for k, v in asdict(config).items() if k not in ("methods", "epochs", "seeds", "whitening")}
    own |= {"hidden": list(config.hidden), "data": data.name, "fingerprint": data.fingerprint}
    own |= {f"optimizer.{name}": value for name, value in METHODS[method].defaults.items()}  # a release may change them
    if (recipe := METHODS[method].recipe) is not None:
        own |= {"epochs": config.epochs} | {f"recipe.{name}": value for name, value in asdict(recipe).items()}
    return own | (asdict(config.whitening_of(method, data)) if METHODS[method].sides else {})


def checkpoint(out: Path, method: str, seed: int) -> Path:
    """The file of a network in training."""
    return out / CHECKPOINTS / f"{method}-{seed}.pt"


def _save(trial: Trial, out: Path, settings: dict[str, Any]) -> None:
    rows = [asdict(row) for row in trial.rows]
    file = io.BytesIO()
    torch.save({"identity": settings, "rows": rows, "trainee": trial.state.state_dict()}, file)
    write_atomically(checkpoint(out, trial.method, trial.seed), file.getvalue())


def read_checkpoint(path: Path, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a checkpoint; ResumeError if it is damaged, or if its settings differ from those given."""
    saved = _read_file(path)
    old = saved["identity"]
    old.setdefault("solver", old.get("factorisation"))  # older checkpoints have the solver under its former name
    differing = [f"{key} was {old.get(key)}, now {new}" for key, new in (settings or {}).items() if old.get(key) != new]
    if differing:
        raise ResumeError(
            f"{path} belongs to a run with other settings: {'; '.join(differing)}. "
            f"Use the same settings, or another --out, or leave out {path.stem.rpartition('-')[0]}"
        )
    return saved


def rows_of(saved: Mapping[str, Any]) -> list[Row]:
    """The rows in a checkpoint."""
    return [Row(**row) for row in saved["rows"]]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
        if isinstance(saved, dict) and {"identity", "rows", "trainee"} <= set(saved):
            return saved
    except (RuntimeError, EOFError, ValueError, UnpicklingError):
        pass
    raise ResumeError(f"{path} is not a checkpoint of a run, or is damaged; delete it to train that network again")


def load_trained(path: Path, data: Dataset) -> nn.Module:
    """Load the network of a checkpoint for use: stock layers, in eval mode."""
    if not path.exists():
        raise ResumeError(f"{path}: no such checkpoint; a run saves them in its output folder, under {CHECKPOINTS}")
    saved = read_checkpoint(path)
    settings = saved["identity"]
    if settings["fingerprint"] != data.fingerprint:
        raise ResumeError(f"{path} was trained on {settings['data']}, which differs from the data given, {data.name}")
    config = Config(activation=settings["activation"], hidden=tuple(settings["hidden"]))
    trial = new_trial(config, data, path.stem.rpartition("-")[0], seed=0)
    trial.state.model.load_state_dict(saved["trainee"]["model"])
    if trial.state.average is not None:
        trial.state.average.load_state_dict(saved["trainee"]["average"])
    return trial.state.deployed()
