"""Models sharded by FSDP2's `fully_shard`. Each function runs on all ranks."""

import tempfile
import warnings
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from behaviours import RULES, raised
from cases import AVERAGED_STEPS, CASES, EXACT, Case, Transformer, data, made, parameters
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bprong

NAMES = [
    "drift", "momentum", "clipping", "accumulation", "low rank", "convolutions", "transformer", "PRONG",
    "spectral transformer", "auto, transformer", "auto, spectral", "auto, uneven", "auto, clipping",
]  # fmt: skip
SHARDED_CASES = {name: replace(CASES[name], steps=min(24, CASES[name].steps)) for name in NAMES}


def sharded(model, **arguments):
    """Sharded by its children and as a whole, as users do with the blocks of a transformer."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **arguments)
    return fully_shard(model, **arguments)


def whole(model):
    return torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])


def training(case, wrap=sharded, **arguments):
    """A sharded model, its optimizer, and a function that makes a step with this rank's batches."""
    model = wrap(made(case))
    criterion = nn.CrossEntropyLoss(reduction=case.reduction)
    optimizer = case.optimizer(model, criterion, **(case.arguments | arguments))

    def step(t, change=lambda x, y: (x, y)):
        optimizer.zero_grad()
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(micro == case.accumulate - 1)
            x, y = change(*data(case, dist.get_rank(), t, micro))
            (criterion(model(x), y) / case.accumulate).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()

    return model, optimizer, step


def some_paths(rank, size):
    """A case of each step rule."""
    return paths(rank, size, ("drift", "spectral transformer", "auto, transformer"))


def paths(rank, size, names=NAMES):
    """The parameters at the end of some of the cases."""
    found = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _, step = training(SHARDED_CASES[name])
            for t in range(SHARDED_CASES[name].steps):
                step(t)
        found[name] = whole(model)
    return found


def distributed_checkpoint(rank, size):
    """The parameters after 20 steps, and after 10 steps, a checkpoint by torch.distributed.checkpoint and 10 more."""
    found = {}
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    for name, arguments in {**RULES, "auto, spectral": {"step": "spectral"}}.items():
        case = Case(model=Transformer)
        model, optimizer, step = training(case, **arguments)
        for t in range(10):
            step(t)
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=f"{box[0]}/{name}")
        other, other_optimizer, other_step = training(case, **arguments)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=f"{box[0]}/{name}")
        set_state_dict(
            other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )  # fmt: skip
        for t in range(10, 20):
            step(t)
            other_step(t)
        found[name] = whole(model), whole(other)
    return found


AVERAGED = ("momentum", "spectral transformer", "auto, spectral")


def averaged(rank, size):
    """Of sharded models and of DistributedDataParallel: averages, and those of a resumed run."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    found = {}
    never_resharded = partial(sharded, reshard_after_forward=False)
    for way, wrap in (("sharded", never_resharded), ("replicated", DistributedDataParallel)):
        for name in AVERAGED:
            found[way, name] = averages_and_those_of_a_resumed_run(CASES[name], wrap, f"{box[0]}/{way} {name}")
    return found


def averages_and_those_of_a_resumed_run(case, wrap, folder):
    def begun():
        model = wrap(made(case))
        criterion = nn.CrossEntropyLoss()
        optimizer = case.optimizer(model, criterion, **case.arguments)
        optimizer.averaged()
        return model, optimizer, criterion

    def trained(run, steps):
        model, optimizer, criterion = run
        for t in steps:
            optimizer.zero_grad()
            x, y = data(case, dist.get_rank(), t, 0)
            criterion(model(x), y).backward()
            optimizer.step()

    def values(model):
        return parameters(model) if wrap is DistributedDataParallel else whole(model)

    def averages(run):
        model, optimizer, _ = run
        x, _ = data(case, 0, 0, 0)
        before = values(model)
        with torch.no_grad():
            model(x)  # leaves the parameters whole
            with optimizer.averaged():
                average = values(model)
                output = model(x)
            restored = torch.equal(before, values(model))
            return average, output, model(x), restored

    run = begun()
    trained(run, range(AVERAGED_STEPS // 2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(*run[:2]), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    resumed = begun()
    loaded = dict(zip(("model", "optimizer"), get_state_dict(*resumed[:2]), strict=True))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(*resumed[:2], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for one in (run, resumed):
        trained(one, range(AVERAGED_STEPS // 2, AVERAGED_STEPS))
    return averages(run), averages(resumed)


def memory(rank, size):
    """The bytes of factors and moments that this rank has, as a part of those that one process has."""

    def held(optimizer):
        layers = optimizer._whitening.layers
        sides = [side for layer in layers.values() if layers.sharding.is_own(layer.weight) for side in layer.sides]
        return sum(side.factor.inverse.nbytes + side.moments.scatter.nbytes for side in sides)

    case = Case(arguments={"lr": 0.05, "every": 5, "options": {"solver": "exact"}})
    _, optimizer, step = training(case)
    step(0)
    own = held(optimizer)
    total = torch.tensor(float(own))
    dist.all_reduce(total)
    momentum = sum(p.to_local().numel() for p in optimizer.param_groups[0]["params"])
    return own / float(total), momentum / sum(p.numel() for p in optimizer.param_groups[0]["params"])


def a_batch_that_is_not_finite(rank, size):
    """A batch of rank 0 is not finite; messages, and the parameters after two more steps."""
    found = {}
    for name, arguments in RULES.items():
        model, _, step = training(Case(), **arguments)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(0)
            before = whole(model)
            step(1, (lambda x, y: (x * float("nan"), y)) if rank == 0 else (lambda x, y: (x, y)))
            kept = torch.equal(before, whole(model))
            step(2)
            step(3)
        messages = [str(w.message) for w in caught if "refused" in str(w.message)]
        found[name] = kept, messages, whole(model)
    return found


def validated_between_backward_and_step(rank, size):
    """A forward pass without a backward pass leaves the root whole; returns parameters with and without one."""
    found = []
    for validates in (False, True):
        model = sharded(made(Case()))
        criterion = nn.CrossEntropyLoss()
        optimizer = bprong.BPRONG(model, criterion, options=EXACT)
        for t in range(5):
            x, y = data(Case(), rank, t, 0)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            if validates:
                with torch.no_grad():
                    model(x)
            optimizer.step()
            optimizer.report()
        found.append(whole(model))
    return found


class Checkpointed(nn.Module):
    """Its hidden layers are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Tied(nn.Module):
    """Two layers share a weight, which follows the fallback rule."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.second.weight = self.first.weight
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Read(nn.Module):
    """The weight of one layer is also read in a way that cannot be recorded: it is left to the fallback rule."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 12)
        self.read = nn.Linear(12, 3)

    def forward(self, x):
        return self.read(torch.tanh(self.body(x))) + self.read.weight.sum(dim=1)


def other_models(rank, size):
    """Models at lr="auto", sharded as a whole; the parameters after six steps."""
    found = {}
    for name, kind in {"checkpointed": Checkpointed, "tied": Tied, "read": Read}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, _, step = training(Case(model=kind), wrap=fully_shard, options=EXACT, step="natural")
            for t in range(6):
                step(t)
        found[name] = whole(model)
    return found


def mixed_precision(rank, size):
    """The mean loss of the last 10 of 25 steps, for every rule: computed in float32, and by FSDP in bfloat16."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, arguments in RULES.items():
        for own in (MixedPrecisionPolicy(), policy):
            torch.manual_seed(0)
            model = sharded(nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3)), mp_policy=own)
            criterion = nn.CrossEntropyLoss()
            optimizer = bprong.BPRONG(model, criterion, **arguments)
            losses = []
            for t in range(25):
                x, y = data(Case(sizes=(64,)), rank, t, 0)
                optimizer.zero_grad()
                loss = criterion(model(x.float()).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            found.setdefault(name, []).append(fmean(losses[-10:]))
    return found


def refused(rank, size):
    """The messages for models that are sharded in other ways."""

    def made_with(model):
        return raised(lambda: bprong.BPRONG(model, nn.CrossEntropyLoss()))

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    partly = made(Case())
    fully_shard(partly[0])
    ignoring = made(Case())
    fully_shard(ignoring, ignored_params={ignoring[0].weight})
    by_columns = fully_shard(made(Case()), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    later = made(Case())
    optimizer = bprong.BPRONG(later, nn.CrossEntropyLoss())
    fully_shard(later)

    def train_later():
        x, y = data(Case(), rank, 0, 0)
        nn.CrossEntropyLoss()(later(x), y).backward()
        optimizer.step()

    return {
        "HSDP": made_with(fully_shard(made(Case()), mesh=mesh)),
        "a part of the model": made_with(partly),
        "ignored parameters": made_with(ignoring),
        "columns": made_with(by_columns),
        "FSDP1": made_with(FullyShardedDataParallel(made(Case()), device_id=torch.device("cpu"))),
        "sharded later": raised(train_later),
        "the paper's network": raised(lambda: bprong.Rewhitening(fully_shard(made(Case())), None, "cross_entropy")),
    }
