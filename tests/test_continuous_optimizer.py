"""Continuous whitening in the optimizer: the inverse of the moment it tracks, the whitened network's path, its care."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.continuous import share
from bprong.lowrank import LowRank
from bprong.schedule import WhiteningWarning
from bprong.whitening import Damping
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, snapshot
from training import batches, train

CONTINUOUS = {"refresh": "continuous", "fisher": "exact"}
EPSILON = {"forward_damping": 0.1, "backward_damping": 0.03}


def optimizer_of(model, rate=0.05, lr=0.05, every=1, kind=bprong.BPRONG, **settings):
    options = CONTINUOUS | {"rate": rate} | settings.pop("options", {})
    dampings = EPSILON if kind is bprong.BPRONG else {"forward_damping": 0.1}
    return kind(model, lr=lr, every=every, options=options, **dampings | settings)


def tracks(optimizer):
    return optimizer.statistics._refreshing._tracks


def layer_of(optimizer, name="0"):
    return optimizer.statistics.layers[name]


def eye(d):
    return torch.eye(d, dtype=torch.float64)


def damped(d, epsilon, rate, turn):
    """What the damping adds in one turn; with a rate of a half and more that is ε in every coordinate."""
    if rate >= 0.5:
        return epsilon * eye(d)
    chosen = share(d, epsilon, rate, turn, eye(d))
    return torch.diag(torch.zeros(d, dtype=torch.float64).index_put((chosen.index,), chosen.sizes**2))


def tracked(rows, targets, epsilon, rate, centred):
    """(Σ tracked)⁻¹ and the mean, from the batches' rows, in the dense formula."""
    S = c = None
    for turn, (z, n) in enumerate(zip(rows, targets, strict=True)):
        mean = z.mean(0) if centred else torch.zeros(z.shape[1], dtype=z.dtype)
        second = (z - mean).T @ (z - mean) / n
        if S is None:
            S, c = second + epsilon * eye(len(second)), mean
            continue
        second = second + (1 - rate) * torch.outer(mean - c, mean - c)
        S = (1 - rate) * S + rate * (second + damped(len(S), epsilon, rate, turn - 1))
        c = c + rate * (mean - c)
    return torch.linalg.inv(S), c


@pytest.mark.parametrize("size", [4, 30])  # fewer rows than coordinates, and more
@pytest.mark.parametrize("rate", [0.1, 0.6])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_inverse_of_the_tracked_moment(size, rate, bias):
    x, y = classification(12 * size, 7, 5)
    model = mlp(7, 5, bias=bias)
    optimizer = optimizer_of(model, rate, lr=0.0)
    train(model, optimizer, batches(x, y, size, 12))
    layer, seen = layer_of(optimizer), x.split(size)
    UU, c = tracked(seen, [size] * 12, 0.1, rate, bias)
    assert_close(layer.UU, UU, 1e-8)
    assert (layer.c is None) != bias
    if bias:
        assert_close(layer.c, c, 1e-12)
        assert_close(layer.q, UU @ c, 1e-8)
    errors = []  # diag p − ppᵀ of each example, as rows: a root of it
    for batch in seen:
        p = model(batch).softmax(-1).detach()
        errors.append((p.sqrt().unsqueeze(-1) * (eye(5) - p.unsqueeze(-2))).flatten(0, 1))
    RR, _ = tracked(errors, [size] * 12, 0.03, rate, centred=False)
    assert_close(layer.RR, RR, 1e-8)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("damping", [0.1, Damping(0.1, "variance")])
def test_the_path_is_that_of_the_whitened_network(momentum, damping):
    """The same batches, rate, period and anchors, one of which comes of data that change on the way."""
    x, y = classification(400, 6, 3)
    plain = mlp(6, 5, 3)
    whitened = bprong.whiten_(copy.deepcopy(plain))
    sgd = torch.optim.SGD(whitened.parameters(), lr=0.02, momentum=momentum)
    both = {"forward_damping": damping, "backward_damping": 0.03}
    period = {"forward_every": 2, "backward_every": 2, "backward_offset": 0}
    rewhitening = bprong.Rewhitening(
        whitened, sgd, fisher="exact", refresh="continuous", rate=0.05, **both, **period
    )  # fmt: skip
    optimizer = optimizer_of(plain, lr=0.02, every=2, momentum=momentum, **both)
    anchors, ours = [], []
    data = [(xb if t < 60 else 3 * xb + 5, yb) for t, (xb, yb) in enumerate(batches(x, y, 20, 90))]
    for t, (xb, yb) in enumerate(data):
        anchors += [(done.layer, done.side, t) for done in rewhitening.step(xb)]
        train(whitened, sgd, [(xb, yb)])
        train(plain, optimizer, [(xb, yb)])
        if t % 2 == 0:
            ours += [(*key, t) for key, track in tracks(optimizer).items() if track.age == 0]
    assert sorted(anchors) == sorted(ours)
    assert any(t >= 60 for *_, t in anchors)
    for layer, stock in zip(layers_of(whitened), (plain[0], plain[2]), strict=True):
        assert_close(stock.weight, layer.weight, 1e-8)
        assert_close(stock.bias, layer.bias, 1e-8)


def distance(inverse, second):
    product = inverse @ second - eye(len(second))
    return math.sqrt(max(float((product * product.T).sum()), 0.0) / len(second))


def fed(rows, rate=0.05, width=3, dtype=torch.float64, **settings):
    """A layer that sees batch after batch and does not learn; its inputs' inverse after each."""
    model = mlp(rows[0].shape[1], width, dtype=dtype)
    optimizer = optimizer_of(model, rate, lr=0.0, **settings)
    found = []
    for x in rows:
        train(model, optimizer, [(x.to(dtype), torch.zeros(len(x), dtype=torch.long))])
        found.append(layer_of(optimizer).UU)
    return optimizer, found


def test_it_stays_white_on_data_of_one_kind():
    x, _ = classification(8000, 8, 3)
    x = x / x.std(0)
    optimizer, found = fed(x.split(40), every=2)
    S = torch.cov(x.T, correction=0) + 0.1 * eye(8)
    off = [distance(UU, S) for UU in found]
    assert max(off[40:]) < 0.35
    assert sum(off[100:]) / 100 < 0.7 * off[0]  # many batches tell more than the first
    assert tracks(optimizer)["0", "forward"].age == 99  # no anchor but the first


def test_it_follows_data_that_change_their_scale():
    x, _ = classification(6000, 8, 3)
    slowly = (x / x.std(0)) * torch.logspace(0, 1, 6000, dtype=x.dtype).unsqueeze(-1)
    S = torch.cov(slowly[-600:].T, correction=0) + 0.1 * eye(8)
    _, found = fed(slowly.split(40), rate=0.1)
    assert distance(found[-1], S) < 0.5
    assert distance(found[0], S) > 5
    abruptly = torch.cat([x[:3000], 100 * x[3000:]])
    optimizer, found = fed(abruptly.split(40))
    S = torch.cov(abruptly[3000:].T, correction=0) + 0.1 * eye(8)
    assert distance(found[-1], S) < 0.5
    assert 0 <= tracks(optimizer)["0", "forward"].age < 75  # anchored anew


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rank_deficient_inputs_are_bounded_by_the_damping(dtype):
    x = torch.randn(6000, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 4:] = 0
    x[:, 5] = x[:, 0]
    _, found = fed(x.split(4), dtype=dtype)
    spectrum = torch.linalg.eigvalsh(torch.stack(found).double())
    assert float(spectrum.min()) > 0.01
    assert float(spectrum.max()) < 1.3 / 0.1  # the ripple of the damping's turns


def test_several_batches_before_a_step_are_one():
    x, y = classification(40, 6, 3)
    models = [mlp(6, 3)]
    models.append(copy.deepcopy(models[0]))
    for model, parts in zip(models, (1, 2), strict=True):
        optimizer = optimizer_of(model)
        for _ in range(6):
            optimizer.zero_grad()
            for xb, yb in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(xb), yb) / parts).backward()
            optimizer.step()
    assert_close(models[1][0].weight, models[0][0].weight, 1e-10)


# State ----------------------------------------------------------------------------------------------------------------


def run(optimizer, model, start, stop):
    x, y = classification(400, 5, 3)
    train(model, optimizer, list(batches(x, y, 20, stop))[start:])


@pytest.mark.parametrize("kind", [bprong.BPRONG, bprong.PRONG])
@pytest.mark.parametrize("damping", [0.1, Damping(0.1, "variance")])
def test_it_resumes_bit_for_bit(kind, damping):
    torch.manual_seed(0)
    settings = {"kind": kind, "every": 3, "momentum": 0.9, "forward_damping": damping, "options": {"fisher": "sampled"}}
    model = mlp(5, 4, 4, 3)
    optimizer = optimizer_of(model, **settings)
    run(optimizer, model, 0, 77)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    torch.manual_seed(5)
    other = mlp(5, 4, 4, 3)
    other.load_state_dict(weights)
    resumed = optimizer_of(other, **settings)
    resumed.load_state_dict(state)
    assert {"forward_age", "forward_from_white"} <= set(resumed.report().layers[0])
    run(optimizer, model, 77, 160)
    run(resumed, other, 77, 160)
    assert_unchanged(snapshot(model), snapshot(other))
    assert len(tracks(resumed)) == (6 if kind is bprong.BPRONG else 3)
    assert all(track.smoothed == tracks(resumed)[key].smoothed for key, track in tracks(optimizer).items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(copied):
    model = mlp(5, 4, 3)
    optimizer = optimizer_of(model, momentum=0.9)
    run(optimizer, model, 0, 10)
    optimizer_too = copied(optimizer)
    model_too = optimizer_too.statistics.model
    run(optimizer, model, 10, 30)
    run(optimizer_too, model_too, 10, 30)
    assert model_too is not model
    assert_unchanged(snapshot(model), snapshot(model_too))
    assert tracks(optimizer_too)["0", "forward"].age == 29
    assert layer_of(optimizer_too) is optimizer_too.statistics._refreshing._layers["0"]


def test_a_state_of_another_pace_is_anchored_anew():
    x, y = classification(400, 300, 3, dtype=torch.float32)
    x[:, 20:] *= 1e-3
    model = mlp(300, 3, dtype=torch.float32)
    before = bprong.BPRONG(model, every=2, options={"refresh": "drift", "solver": "low-rank"})
    train(model, before, batches(x, y, 100, 20))
    assert isinstance(layer_of(before).UU, LowRank)
    after = optimizer_of(model)
    after.load_state_dict(before.state_dict())
    assert not tracks(after)
    train(model, after, batches(x, y, 100, 30))
    assert isinstance(layer_of(after).UU, torch.Tensor)
    assert tracks(after)["0", "forward"].age > 2


# Care -----------------------------------------------------------------------------------------------------------------


def test_an_unfit_batch_keeps_the_inverse_and_is_warned_of():
    x, y = classification(40, 5, 3)
    model = mlp(5, 3)
    optimizer = optimizer_of(model)
    train(model, optimizer, [(x, y)] * 3)
    before, bad = layer_of(optimizer).state_dict(), x.clone()
    bad[3, 1] = math.nan
    optimizer.observe(bad)
    with pytest.warns(WhiteningWarning, match="layer '0' keeps its previous forward whitener: .*not finite"):
        train(model, optimizer, [(x, y)])
    after = layer_of(optimizer).state_dict()
    assert all(torch.equal(after[key], before[key]) for key in ("UU", "c", "RR"))
    assert after["refreshed_at"] == {"forward": 2, "backward": 2}
    train(model, optimizer, [(x, y)])
    assert layer_of(optimizer).refreshed_at == {"forward": 4, "backward": 4}
    for _ in range(2):
        optimizer.observe(bad)
        train(model, optimizer, [(x, y)])
    optimizer.observe(bad)
    with pytest.raises(bprong.whitening.WhiteningError, match="3 times in a row"):
        train(model, optimizer, [(x, y)])


def test_a_bias_that_is_frozen_on_the_way_takes_an_anchor():
    x, y = classification(40, 5, 3)
    model = mlp(5, 3)
    optimizer = optimizer_of(model)
    train(model, optimizer, [(x, y)] * 3)
    model[0].bias.requires_grad_(False)
    train(model, optimizer, [(x, y)])
    assert layer_of(optimizer).c is None
    assert tracks(optimizer)["0", "forward"].age == 0
    assert tracks(optimizer)["0", "backward"].age == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_weights_the_inverses_are_float32(dtype):
    x, y = classification(200, 6, 3, dtype=dtype)
    model = mlp(6, 5, 3, dtype=dtype)
    optimizer = optimizer_of(model)
    train(model, optimizer, batches(x, y, 20, 40))
    for layer in optimizer.statistics.layers.values():
        assert layer.UU.dtype == layer.RR.dtype == layer.c.dtype == torch.float32
        assert float(torch.linalg.eigvalsh(layer.UU).min()) > 0
    assert all(p.isfinite().all() for p in model.parameters())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.conv = nn.Embedding(20, 4), nn.Conv1d(4, 4, 3, groups=2)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        z = self.conv(self.embedding(x).mT).mT
        return self.head((z + self.attention(z, z, z, need_weights=False)[0])[:, -1])


def test_other_layers_are_refreshed_as_by_drift():
    torch.manual_seed(0)
    model = Mixed().double()
    x = torch.randint(20, (400, 6))
    optimizer = optimizer_of(model, every=2, momentum=0.5, options={"fisher": "sampled"})
    train(model, optimizer, batches(x, x[:, -1] % 3, 40, 120))
    followed = {name for name, _ in tracks(optimizer)}
    assert followed == {"attention.q", "attention.k", "attention.v", "attention.out_proj", "head"}
    schedule, rows = optimizer.statistics.schedule, {row["layer"]: row for row in optimizer.report().layers}
    assert all(slow == 1 for (name, _), slow in schedule._slow.items() if name in followed)
    assert schedule._slow["embedding", "forward"] > 1
    assert all(rows[name]["forward_age"] == 2 for name in followed)
    assert all(0 <= rows[name]["forward_from_white"] < 2 for name in followed)
    assert F.cross_entropy(model(x), x[:, -1] % 3) < 0.5


def test_the_period_is_five_steps_unless_given_and_the_budget_does_not_matter():
    x, y = classification(40, 5, 3)
    for options, expected in (({}, [0, 5, 10]), ({"forward_every": 4, "overhead": 0.5}, [0, 4, 8])):
        model = mlp(5, 3)
        optimizer = bprong.BPRONG(model, options=CONTINUOUS | options)
        due = []
        for t in range(12):
            due += [t] if optimizer.statistics.due else []
            train(model, optimizer, [(x, y)])
        assert due == expected


def test_it_learns():
    x, y = classification(400, 6, 3)
    model = mlp(6, 8, 3)
    train(model, optimizer_of(model, every=5), batches(x, y, 40, 150))
    assert F.cross_entropy(model(x), y) < 0.3


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"options\['rate'\] must be"):
        optimizer_of(mlp(5, 3), rate=1.0)
    with pytest.raises(ValueError, match="leave out record_every"):
        optimizer_of(mlp(5, 3), options={"record_every": 2})
