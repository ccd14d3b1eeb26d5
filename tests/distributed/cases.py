"""What is trained in several processes and in one: models, optimizers, batches.

One process has the batches of all ranks: it accumulates each rank's loss divided by the number of ranks, which is what
DistributedDataParallel averages. With equal batches that is the loss of the concatenated batch.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bprong

CLASSES = 3


class Transformer(nn.Module):
    """A tiny transformer whose query, key and value are packed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.block(self.embed(x.unflatten(1, (2, 5)))).mean(dim=1))


class Experts(nn.Module):
    """Two experts, of which each example uses one: a batch whose first features are all positive uses the first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(10, 6), nn.Linear(10, 6)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        first = x[:, 0] > 0
        hidden = x.new_zeros(len(x), 6)
        for expert, chosen in zip(self.experts, (first, ~first), strict=True):
            if chosen.any():
                hidden[chosen] = expert(x[chosen])
        return self.head(torch.tanh(hidden))


def mlp():
    return nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def wide():
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, CLASSES))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 5)), nn.Conv2d(1, 4, (1, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)
    )


EXACT = {"fisher": "exact"}


@dataclass
class Case:
    """A run; `sizes` are the numbers of examples of each rank's batches, over and over."""

    model: Any = mlp
    optimizer: Any = bprong.BPRONG
    arguments: dict = field(default_factory=dict)
    steps: int = 40
    sizes: Any = (12,)
    accumulate: int = 1
    clip: float | None = None
    reduction: str = "mean"
    sort: bool = False  # the examples of rank 0 use the first expert only
    tolerance: float = 1e-9


def fixed(lr=0.05, **arguments):
    return {"lr": lr, "every": 5, "options": EXACT} | arguments


CASES = {
    "mlp": Case(arguments=fixed()),
    "drift": Case(arguments=fixed(every=None)),
    "momentum": Case(arguments=fixed(momentum=0.9)),
    "clipping": Case(arguments=fixed(momentum=0.9), clip=0.1),
    "sum": Case(arguments=fixed(lr=0.002), reduction="sum"),
    "uneven": Case(arguments=fixed(), sizes=(12, 7, 3)),
    "accumulation": Case(arguments=fixed(), accumulate=3, steps=20),
    "low rank": Case(model=wide, arguments=fixed(options=EXACT | {"solver": "low-rank"})),
    "convolutions": Case(model=convolutions, arguments=fixed()),
    "transformer": Case(model=Transformer, arguments=fixed(momentum=0.9)),
    "idle expert": Case(model=Experts, arguments=fixed(), sort=True),
    "PRONG": Case(optimizer=bprong.PRONG, arguments={"lr": 0.05, "every": 5}),
    "spectral": Case(arguments=fixed(lr=0.01, step="spectral", weight_decay=0.1)),
    "spectral transformer": Case(model=Transformer, arguments=fixed(lr=0.01, step="spectral")),
    "auto": Case(arguments={"options": EXACT}, steps=60),
    "auto, transformer": Case(model=Transformer, arguments={"options": EXACT, "step": "natural"}, steps=60),
    "auto, spectral": Case(arguments={"options": EXACT, "step": "spectral"}, steps=40),  # rounding grows fast here
    "auto, sum": Case(arguments={"options": EXACT}, reduction="sum", sizes=(12, 7), steps=60),
    "auto, uneven": Case(arguments={"options": EXACT, "step": "natural"}, sizes=(12, 7, 3), steps=60),
    "auto, clipping": Case(arguments={"options": EXACT, "step": "natural"}, clip=0.05, steps=60),
    "auto, accumulation": Case(arguments={"options": EXACT}, accumulate=2, steps=30),
}


def data(case, rank, step, micro):
    """The batch of a rank, the same wherever it is asked for."""
    count = case.sizes[(step + rank) % len(case.sizes)]
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(count, 10, generator=generator, dtype=torch.float64)
    x[:, 3] = 2.0  # a constant feature
    if case.sort and rank == 0:
        x[:, 0] = x[:, 0].abs()
    y = (x[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)).argmax(dim=1)
    return x, y


def made(case):
    torch.manual_seed(0)
    return case.model().double()


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def train(case, ranks, rank=None):
    """Trains with the batches of all ranks in this process, or with those of one rank; returns the model and losses."""
    model = made(case)
    criterion = nn.CrossEntropyLoss(reduction=case.reduction)
    wrapped = model if rank is None else DistributedDataParallel(model, find_unused_parameters=case.sort)
    optimizer = case.optimizer(wrapped, criterion, **case.arguments)
    for step in range(case.steps):
        optimizer.zero_grad()
        for one in range(ranks) if rank is None else [rank]:
            for micro in range(case.accumulate):
                waits = rank is not None and micro < case.accumulate - 1
                with wrapped.no_sync() if waits else nullcontext():
                    x, y = data(case, one, step, micro)
                    loss = criterion(wrapped(x), y) / (case.accumulate * (ranks if rank is None else 1))
                    loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return model, optimizer


AVERAGED_STEPS = 12


def averaged_alone(case, ranks):
    """The averages of the parameters after some steps of one process, with the batches of all ranks."""
    model = made(case)
    criterion = nn.CrossEntropyLoss()
    optimizer = case.optimizer(model, criterion, **case.arguments)
    optimizer.averaged()
    for step in range(AVERAGED_STEPS):
        optimizer.zero_grad()
        for one in range(ranks):
            x, y = data(case, one, step, 0)
            (criterion(model(x), y) / ranks).backward()
        optimizer.step()
    with optimizer.averaged():
        return parameters(model)


def paths(rank, size, names=tuple(CASES)):
    """The parameters at the end of every case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: parameters(train(CASES[name], size, rank)[0]) for name in names}


def some_paths(rank, size):
    return paths(rank, size, ("drift", "uneven", "idle expert", "spectral", "auto"))
