"""The methods and their search spaces, declared before any complete run and the same for all workloads.

Every tuned method chooses a learning rate, a schedule, weight decay and a momentum from as many quasi-random trials as
all others. The setting "schedule" is applied by `training.py`: a number s means that the rate rises in the first 5 % of
s times the step budget and then falls to zero along a straight line until its end; "averaged" means a constant rate and
an average of the weights over the last 5 % of the steps so far (`optim.averaging`). Automatic methods have one recipe
for all workloads, which their titles name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bprong.experiments.bench import optimizers, peers
from bprong.experiments.bench.search import Choice, LogUniform, Space
from bprong.experiments.bench.training import Trainer
from bprong.experiments.bench.workloads import Loss, Workload
from bprong.experiments.extras import install_command

Settings = Mapping[str, Any]
Make = Callable[[nn.Module, Loss, Mapping[str, Any], int], Trainer]


@dataclass(frozen=True)
class Method:
    """An optimizer as the benchmark sees it.

    make:       makes the trainer from the network, its loss, the settings and the step budget
    space:      what is tuned; empty for an automatic method
    fixed:      settings that are not tuned
    needs:      the package it comes from, if that is neither torch nor ours
    normalised: whether it trains the network with Batch Normalisation
    price:      about how many AdamW runs a run takes; used to plan a budget
    note:       what was done in its favour
    """

    title: str
    make: Make
    space: Space = field(default_factory=dict)
    fixed: Settings = field(default_factory=dict)
    needs: str = ""
    normalised: bool = False
    price: float = 1.0
    note: str = ""

    @property
    def automatic(self) -> bool:
        return not self.space

    @property
    def ours(self) -> bool:
        return "PRONG" in self.title

    def missing(self, workload: Workload) -> str:
        """Why it cannot train a workload here; empty if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"package {self.needs} is not installed ({install_command('bench')})"
        if self.normalised and workload.normalised is None:
            return "the network has no Batch Normalisation"
        return ""


SCHEDULE = Choice(["averaged", "averaged", 0.5, 0.9])  # half of the trials average: what the targets were found with
DECAY = Choice([0.0, 0.01, 0.1])
COUPLED = Choice([0.0, 1e-5, 1e-4])  # of SGD, whose decay is not decoupled
BETAS = Choice([(0.9, 0.95), (0.9, 0.99), (0.9, 0.999)])


def space(low: float, high: float, decay: Choice = DECAY, **more: Choice | LogUniform) -> Space:
    """The search space of a method whose learning rate is between `low` and `high`."""
    return {"lr": LogUniform(low, high), "schedule": SCHEDULE, "weight_decay": decay, **more}


SGD = space(3e-3, 0.5, COUPLED, momentum=Choice([0.9, 0.95]))
ADAMW = space(5e-4, 2e-2, betas=BETAS)

METHODS: dict[str, Method] = {
    "sgd": Method("SGD, momentum", optimizers.sgd, SGD, price=0.9),
    "adamw": Method("AdamW", optimizers.adamw, ADAMW),
    "bn-sgd": Method("BN, SGD", optimizers.sgd, SGD, normalised=True, price=1.2),
    "bn-adamw": Method("BN, AdamW", optimizers.adamw, ADAMW, normalised=True, price=1.3),
    "muon": Method(
        "Muon", optimizers.muon, space(2e-3, 5e-2, momentum=Choice([0.9, 0.95])), price=1.3,
        note="torch.optim.Muon's rule in float32, as bfloat16 is emulated on a CPU; matrices of equal shape are "
             "orthogonalised together; AdamW, at the same rate, trains what is no hidden matrix",
    ),
    "soap": Method(
        "SOAP", peers.soap,
        space(1e-3, 3e-2, betas=Choice([(0.95, 0.95), (0.9, 0.95), (0.95, 0.99)])),
        needs="pytorch_optimizer", price=3.0, note="preconditioner every 10 steps; sides of up to 1,000",
    ),
    "kron": Method(
        "PSGD-Kron", peers.kron, space(3e-4, 1e-2, momentum=Choice([0.9, 0.95])),
        needs="pytorch_optimizer", price=5.0,
        note="opt_einsum is in the extra: without it the products of a step take a minute on a CPU",
    ),
    "shampoo": Method(
        "Shampoo", peers.shampoo, space(1e-3, 0.3, COUPLED, momentum=Choice([0.9, 0.95])),
        needs="pytorch_optimizer", price=5.0, note="preconditioner every 10 steps",
    ),
    "singd": Method(
        "SINGD", peers.singd, space(3e-4, 3e-2, momentum=Choice([0.9, 0.95])), needs="singd", price=3.0,
        note="preconditioner every 10 steps",
    ),
    "kfac": Method(
        "K-FAC", peers.kfac,
        {"relative_lr": LogUniform(0.03, 0.3), "schedule": SCHEDULE, "weight_decay": COUPLED,
         "damping": LogUniform(1e-2, 1.0)},
        needs="asdl", price=3.0,
        note="ASDL's (PyPI: asdfghjkl); factors every 10 steps, momentum 0.9, sampled labels where it has them; the "
             "rate is tuned relative to the damping; SGD trains embeddings, normalisation and grouped convolutions",
    ),
    "schedule-free": Method(
        "Schedule-Free AdamW", peers.schedule_free,
        {"lr": LogUniform(1e-3, 3e-2), "own_warmup": Choice([0.0, 0.02, 0.05]), "weight_decay": DECAY,
         "betas": Choice([(0.9, 0.99), (0.95, 0.99), (0.98, 0.99)])},
        fixed={"warmup": 0.0}, needs="schedulefree",
    ),
    "prodigy": Method(
        "Prodigy, averaged weights", peers.prodigy, fixed={"schedule": "averaged", "warmup": 0.0},
        needs="prodigyopt", price=1.2,
        note="its bias correction and the safeguard of its warm-up are on",
    ),
    "schedule-free-default": Method(
        "Schedule-Free AdamW, its default rate", peers.schedule_free,
        fixed={"lr": 0.0025, "own_warmup": 0.02, "warmup": 0.0}, needs="schedulefree",
    ),
    "prong": Method(
        "PRONG", optimizers.prong, space(1e-3, 0.1, COUPLED), fixed={"momentum": 0.9}, price=1.3,
    ),
    "bprong": Method(
        "BPRONG, fixed rate", optimizers.bprong_,
        space(2e-3, 0.1, COUPLED, by_variance=Choice([0.0, 0.0, 0.3])), fixed={"momentum": 0.9}, price=1.5,
    ),
    "bprong-spectral": Method(
        "BPRONG, spectral", optimizers.bprong_, space(5e-3, 1e-1, damping=Choice([0.1, 1.0])),
        fixed={"step": "spectral"}, price=1.6,
    ),
    "bprong-auto": Method(
        'BPRONG, lr="auto", averaged weights', optimizers.bprong_,
        fixed={"schedule": "averaged", "warmup": 0.0}, price=1.7,
    ),
    "bprong-auto-spectral": Method(
        'BPRONG, lr="auto", spectral, averaged weights', optimizers.bprong_,
        fixed={"step": "spectral", "schedule": "averaged", "warmup": 0.0}, price=1.7,
    ),
}  # fmt: skip
