"""What happens to several processes when one of them is different. Each function runs on all ranks."""

import copy
import datetime
import io
import pickle
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CASES, Case, data, made, parameters
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import bprong

RULES = {"fixed": {"lr": 0.05, "momentum": 0.9}, "spectral": {"lr": 0.01, "step": "spectral"}, "auto": {}}


def training(case=None, seed=None, wrap=DistributedDataParallel, **arguments):
    """A wrapped model, its optimizer, and a function that makes a step with this rank's batch."""
    case = case or Case()
    model = wrap(made(case))
    criterion = nn.CrossEntropyLoss()
    if seed is not None:
        torch.manual_seed(seed)
    optimizer = bprong.BPRONG(model, criterion, **arguments)
    rank = dist.get_rank()

    def step(t, change=lambda x, y: (x, y)):
        optimizer.zero_grad()
        x, y = change(*data(case, rank, t, 0))
        output = model(x)
        loss = criterion(output, y) if len(y) else output.sum()
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def raised(action):
    """The message of the error that an action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ranks_seeded_differently(rank, size):
    """Sampled targets: the seed is that of rank 0. Returns the seeds of the targets, and the parameters at the end."""
    found = {}
    for name, arguments in RULES.items():
        model, optimizer, step = training(seed=rank, **arguments)
        for t in range(12):
            step(t)
        whitening = optimizer._whitening
        seed = optimizer._meter._seed(whitening.request(), 0)
        found[name] = whitening.schedule.base_seed, seed, parameters(model)
    return found


def resumed(rank, size):
    """The parameters after 24 steps, and after 12 steps, a checkpoint of rank 0 and 12 more, for every rule."""
    found = {}
    for name, arguments in RULES.items():
        straight, _, step = training(seed=rank, **arguments)
        for t in range(24):
            step(t)
        model, optimizer, step = training(seed=rank, **arguments)
        for t in range(12):
            step(t)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        box = [file.getvalue()]
        dist.broadcast_object_list(box, 0)
        saved = torch.load(io.BytesIO(box[0]), weights_only=True)
        model, optimizer, step = training(seed=rank + 7, **arguments)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for t in range(12, 24):
            step(t)
        found[name] = parameters(straight), parameters(model)
    return found


def saved_for_one_process(rank, size):
    """A distributed checkpoint after 10 steps, as a state dict of rank 0, and the parameters after 20."""
    found = {}
    for name, arguments in RULES.items():
        model, optimizer, step = training(options={"fisher": "exact"}, **arguments)
        for t in range(10):
            step(t)
        state = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
        for t in range(10, 20):
            step(t)
        found[name] = state, parameters(model)
    return found


def distributed_checkpoint(rank, size):
    """The parameters after 20 steps, and after 10 steps, a checkpoint by torch.distributed.checkpoint and 10 more."""
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    found = {}
    for name, arguments in RULES.items():
        straight, _, step = training(**arguments)
        for t in range(20):
            step(t)
        model, optimizer, step = training(**arguments)
        for t in range(10):
            step(t)
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=f"{box[0]}/{name}")
        model, optimizer, step = training(**arguments)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(loaded, checkpoint_id=f"{box[0]}/{name}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for t in range(10, 20):
            step(t)
        found[name] = parameters(straight), parameters(model)
    return found


def a_batch_that_is_not_finite(rank, size):
    """On rank 1 at step 3. Returns the number of steps and the parameters, for every rule."""

    def spoil(x, y):
        return (x * float("nan"), y) if rank == 1 else (x, y)

    found = {}
    for name, arguments in RULES.items():
        model, optimizer, step = training(**arguments)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for t in range(8):
                step(t, spoil if t == 3 else lambda x, y: (x, y))
        warned = any("refused" in str(warning.message) for warning in caught)
        found[name] = optimizer.report().steps, warned, parameters(model)
    return found


def an_empty_batch(rank, size):
    """On rank 1 at the steps 0, 3 and 10."""
    found = {}
    for name, arguments in RULES.items():
        model, optimizer, step = training(**arguments)
        for t in range(12):
            step(t, (lambda x, y: (x[:0], y[:0])) if rank == 1 and t in (0, 3, 10) else (lambda x, y: (x, y)))
        found[name] = optimizer.report().steps, parameters(model)
    return found


def an_error_on_one_rank(rank, size):
    """Rank 1 gives the optimizer no batch: its own error there, and one that names it elsewhere."""
    found = {}
    for name, arguments in RULES.items():
        _, optimizer, _ = training(**arguments)
        optimizer.zero_grad()
        for p in optimizer._parameters:
            p.grad = torch.ones_like(p)
        if rank != 1:
            x, y = data(CASES["mlp"], rank, 0, 0)
            optimizer.observe(x, y)
        found[name] = raised(optimizer.step)
    return found


def clipped(rank, size):
    """lr="auto" with clipping, rank 1 without examples at some steps, and a model of which it uses one layer only."""

    class OneOfMany(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(10, 3) for _ in range(9))

        def forward(self, x):
            return self.layers[4](x) if rank == 1 else sum(layer(x) for layer in self.layers)

    found = {}
    for name, model in {"empty": None, "unused": OneOfMany}.items():
        case = Case() if model is None else Case(model=model)
        wrapped = DistributedDataParallel(made(case), find_unused_parameters=True)
        criterion = nn.CrossEntropyLoss()
        optimizer = bprong.BPRONG(wrapped, criterion, options={"fisher": "exact"})
        for t in range(15):
            optimizer.zero_grad()
            x, y = data(case, rank, t, 0)
            if name == "empty" and rank == 1 and t % 3 == 0:
                wrapped(x[:0]).sum().backward()
            else:
                criterion(wrapped(x), y).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
            optimizer.step()
        found[name] = parameters(wrapped)
    return found


def nothing_counted(rank, size):
    """Rank 1 has no target that the loss counts: the moments are those of rank 0."""
    model = DistributedDataParallel(made(Case()))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    optimizer = bprong.BPRONG(model, criterion, lr=0.01)
    x, y = data(Case(), rank, 0, 0)
    criterion(model(x), y if rank == 0 else y.fill_(-100)).backward()
    optimizer.step()
    return optimizer._whitening.layers["0"].forward.observations


def automatic_by_hand(rank, size):
    """lr="auto" with gradients that the user averages, and a model with a single parameter."""
    model = nn.Linear(10, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, options={"fisher": "exact"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(20):
            optimizer.zero_grad()
            x, y = data(Case(), rank, t, 0)
            criterion(model(x), y).backward()
            dist.all_reduce(model.weight.grad)
            model.weight.grad /= size
            optimizer.step()
    return parameters(model), [str(warning.message) for warning in caught]


def gradients_that_differ(rank, size):
    """A model that is not wrapped, so that nobody averages its gradients."""
    _, _, step = training(wrap=lambda model: model, lr=0.05)
    return raised(lambda: step(0))


def averaged_by_hand(rank, size):
    """The same, with gradients averaged by the user, in the group of all processes."""
    case = Case()
    model = made(case)
    criterion = nn.CrossEntropyLoss()
    optimizer = bprong.BPRONG(model, criterion, lr=0.05, options={"fisher": "exact"})
    for t in range(10):
        optimizer.zero_grad()
        x, y = data(case, rank, t, 0)
        criterion(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= size
        optimizer.step()
    return parameters(model)


def join(rank, size):
    model, _, step = training(lr=0.05)
    with Join([model]):
        return raised(lambda: step(0))


def a_rank_that_does_not_arrive(rank, size):
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    _, _, step = training(wrap=lambda model: DistributedDataParallel(model, process_group=group), lr=0.05, every=1)
    step(0)
    model, optimizer, _ = training(wrap=lambda model: DistributedDataParallel(model, process_group=group), lr=0.05)
    x, y = data(Case(), rank, 0, 0)
    nn.functional.cross_entropy(model(x), y).backward()
    return raised(optimizer.step) if rank == 0 else ""


def copies(rank, size):
    """Copies and pickles of an optimizer of several processes can be made, and go on alike."""
    model, optimizer, step = training(lr=0.05)
    step(0)
    clone, other = copy.deepcopy((model.module, optimizer))
    pickle.dumps((model.module, optimizer))
    return parameters(clone).equal(parameters(model)), other.report().steps


def whitened(rank, size):
    """The paper's network in several processes; returns the parameters of the folded network."""
    return parameters(bprong.fold(train_whitened([rank], DistributedDataParallel)))


def train_whitened(ranks, wrap=lambda model: model, size=1):
    case = Case()
    model = bprong.whiten_(made(case))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    rewhitening = bprong.Rewhitening(
        wrapped, optimizer, "cross_entropy", fisher="exact", forward_every=10, backward_every=10, average=0.5
    )
    criterion = nn.CrossEntropyLoss()
    for t in range(40):
        x, y = (torch.cat(parts) for parts in zip(*(data(case, rank, t, 0) for rank in ranks), strict=True))
        rewhitening.step(x)
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    return model
