"""Every use of a weight, and nothing else: what a new user, in time, will do to the taps."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.patches import Geometry, patch_rows, patches
from bprong.schedule import WhiteningWarning
from bprong.taps import tapped
from bprong.units import units_of
from helpers import SelfAttention, assert_close, mlp, snapshot

EXACT = {"fisher": "exact", "average": 0.0}
FUNCTIONS = [(F, name) for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")]
FUNCTIONS += [(torch._VF, name) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")]


def stepped(model, x, y, likelihood="categorical", **settings):
    optimizer = bprong.BPRONG(model, likelihood=likelihood, **({"options": EXACT} | settings))
    output = model(x)
    F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
    optimizer.step()
    return optimizer


def in_place():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3))


def out_of_place():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


class Doubled(nn.Module):
    """An embedding and a linear layer whose outputs are worked on in place."""

    def __init__(self, inplace):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.last, self.inplace = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3), inplace

    def forward(self, tokens):
        z = self.embed(tokens)
        z = z.mul_(2).tanh_() if self.inplace else (z * 2).tanh()
        h = self.first(z)
        return self.last(h.relu_() if self.inplace else h.relu())


def test_what_follows_may_work_in_place():
    torch.manual_seed(0)
    plain = out_of_place().double()
    model = in_place().double()
    model.load_state_dict(plain.state_dict())
    x, y = torch.randn(6, 2, 3, 3, dtype=torch.float64), torch.arange(6) % 3
    ours, theirs = (stepped(m, x, y).statistics.layers for m in (model, plain))
    for name in ("0", "3"):
        assert_close(ours[name].UU, theirs[name].UU, 1e-12)
        assert_close(ours[name].RR, theirs[name].RR, 1e-12)
    tokens, y = torch.randint(7, (9,)), torch.arange(9) % 3
    ours, theirs = (stepped(Doubled(inplace).double(), tokens, y).statistics.layers for inplace in (True, False))
    for name in ("embed", "first", "last"):
        assert_close(ours[name].UU, theirs[name].UU, 1e-12)
        assert_close(ours[name].RR, theirs[name].RR, 1e-12)


def test_torch_is_put_back_whatever_happens():
    before = [getattr(place, name) for place, name in FUNCTIONS]

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fail = nn.Linear(4, 3), False

        def forward(self, x):
            if self.fail:
                raise RuntimeError("out of luck")
            return self.layer(x)

    model = Failing()
    optimizer = bprong.BPRONG(model)
    F.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
    model.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()
    assert [getattr(place, name) for place, name in FUNCTIONS] == before


def test_taps_may_end_in_any_order():
    before = [getattr(place, name) for place, name in FUNCTIONS]
    assert torch.backends.mha.get_fastpath_enabled()
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    first, second = (tapped(units_of("", layer)) for layer in layers)
    calls = [first.__enter__(), second.__enter__()]
    for layer in layers:
        layer(torch.randn(5, 3))
    first.__exit__(None, None, None)
    layers[1](torch.randn(5, 3))
    layers[0](torch.randn(5, 3))
    second.__exit__(None, None, None)
    assert [len(seen) for seen in calls] == [1, 2]
    assert torch.backends.mha.get_fastpath_enabled()
    assert [getattr(place, name) for place, name in FUNCTIONS] == before


def test_another_thread_may_use_torch_meanwhile():
    stop, wrong = threading.Event(), []
    layer, x = nn.Linear(6, 5), torch.randn(4, 6)
    expected = layer(x)

    def work():
        while not stop.is_set():
            if not torch.equal(layer(x), expected):
                wrong.append(1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        model = mlp(5, 8, 3, dtype=torch.float32)
        for _ in range(20):
            stepped(model, torch.randn(10, 5), torch.arange(10) % 3)
    finally:
        stop.set()
        worker.join()
    assert not wrong


# Used in other ways ---------------------------------------------------------------------------------------------------


class ByHand(nn.Module):
    """Layers whose weight is used a second time, in a way that cannot be seen."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed, self.conv, self.head = kind, nn.Embedding(6, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 6)

    def forward(self, tokens):
        h = self.conv(self.embed(tokens).mT).mT
        if self.kind == "tied":
            return self.head(h) + F.linear(h, self.embed.weight)
        if self.kind == "tied, by hand":
            return self.head(h) + h @ self.embed.weight.T
        if self.kind == "transposed":
            return self.head(h) + F.conv_transpose1d(h.mT, self.conv.weight).mT
        return self.head(h) + F.linear(h, self.head.weight.T)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tied", ["embed"]),
        ("tied, by hand", ["embed"]),
        ("transposed", ["conv"]),
        ("of its own transpose", ["head"]),
    ],
)
@pytest.mark.parametrize("method", [bprong.BPRONG, bprong.PRONG])
def test_a_weight_that_does_more_than_is_seen_follows_the_fallback_rule(kind, names, method):
    model = ByHand(kind)
    tokens, y = torch.randint(6, (5, 3)), torch.randint(6, (5, 3))
    optimizer = method(model)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), y.flatten()).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(w.message).split("'")[1] for w in caught if w.category is WhiteningWarning] == names
        names = []
    reasons = set(optimizer.report().fallback.values())
    assert reasons == {"its weight is used in other ways too, which cannot be seen"}
    fresh = method(ByHand(kind))
    fresh.load_state_dict(optimizer.state_dict())
    assert list(fresh.statistics.layers) == list(optimizer.statistics.layers)
    assert fresh.report().fallback == optimizer.report().fallback


def test_functions_called_by_keyword_and_of_uncovered_weights():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

        def forward(self, tokens):
            return self.layer(F.embedding(tokens, self.table, padding_idx=0, max_norm=2.0))

    optimizer = stepped(Keywords(), torch.randint(6, (8,)), torch.arange(8) % 3)
    assert list(optimizer.statistics.layers) == ["layer"]


def test_an_expert_given_no_row_at_the_first_refresh():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return torch.cat([self.one(x), self.two(x[:0])])

    optimizer = stepped(Experts(), torch.randn(6, 4), torch.arange(6) % 3)
    assert optimizer.statistics.layers["one"].UU is not None
    assert optimizer.statistics.layers["two"].UU is None


def test_a_layer_under_vmap_is_refused_by_name():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return torch.vmap(self.layer)(x)

    with pytest.raises(RuntimeError, match="layer 'layer' is called under vmap"):
        stepped(Mapped(), torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_under_checkpointing(cell, reentrant):
    class Steps(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head, self.checkpointed = cell(3, 4), nn.Linear(4, 3), checkpointed

        def two(self, x, h):
            state = (h, h) if cell is nn.LSTMCell else h
            for _ in range(2):
                state = self.cell(x, state)
            return state[0] if cell is nn.LSTMCell else state

        def forward(self, x):
            h = x.new_zeros(len(x), 4)
            if self.checkpointed:
                return self.head(checkpoint(self.two, x, h, use_reentrant=reentrant))
            return self.head(self.two(x, h))

    x, y = torch.randn(6, 3, dtype=torch.float64).requires_grad_(), torch.arange(6) % 3
    ours, theirs = (stepped(Steps(kind).double(), x, y).statistics.layers for kind in (True, False))
    for name, layer in theirs.items():
        assert_close(ours[name].RR, layer.RR, 1e-10, name)


# What counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(10, 3), (3, 3)], ids=["ten", "three"])
def test_dead_units_of_examples_that_count_do(sizes):
    """An ignored image changes nothing for the others, in a network with ReLUs and pooling."""
    n, width = sizes
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, width)).double()
    x, y = torch.randn(n + 1, 1, 8, 8, dtype=torch.float64), torch.arange(n + 1) % width
    y[-1] = -100
    other = copy.deepcopy(model)
    ours = stepped(model, x, y).statistics.layers
    theirs = stepped(other, x[:-1], y[:-1]).statistics.layers
    assert ours["0"].moments["forward"].weight == theirs["0"].moments["forward"].weight == 36 * n
    for name, layer in theirs.items():
        assert_close(ours[name].UU, layer.UU, 1e-12)


def test_a_target_the_model_is_certain_of_is_not_one_left_out():
    model = nn.Linear(4, 3)
    nn.init.constant_(model.weight, 0)
    model.bias.data = torch.tensor([300.0, 0.0, -300.0])
    model.weight.data[0, 0] = 1000.0
    x = torch.randn(30, 4)
    x[:, 0] = torch.linspace(-1, 1, 30)
    optimizer = stepped(model, x, torch.where(x[:, 0] > -0.3, 0, 2))
    weight = optimizer.statistics.layers[""].moments["forward"].weight
    assert weight == 30


def test_several_backward_passes_through_one_output():
    model, x, y = mlp(4, 3), torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    optimizer = bprong.BPRONG(model, options=EXACT)
    output = model(x)
    F.cross_entropy(output[:3], y[:3]).backward(retain_graph=True)
    F.cross_entropy(output[3:5], y[3:5]).backward()
    optimizer.step()
    assert optimizer.statistics.layers["0"].moments["forward"].weight == 5


def test_classes_in_the_second_dimension_are_noticed():
    model = nn.Conv1d(4, 5, 3, padding=1)
    optimizer = bprong.BPRONG(model)
    before = snapshot(model)
    F.cross_entropy(model(torch.randn(6, 4, 7)), torch.randint(5, (6, 7))).backward()
    with pytest.raises(ValueError, match=r"of shape \(6, 5, 7\), the loss has them in the second"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in snapshot(model).items())


def test_a_model_that_returns_something_else_is_recorded():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"scores": self.layer(x)}

    model, x = Named(), torch.randn(6, 4)
    optimizer = bprong.BPRONG(model)
    with optimizer.recording() as record:
        output = model(x)["scores"]
        record(output)
    F.cross_entropy(output, torch.arange(6) % 3).backward()
    optimizer.step()
    assert optimizer.statistics.layers["layer"].UU is not None


# Packed parameters, chunks --------------------------------------------------------------------------------------------


def test_packed_parameters_are_decayed_once():
    mha = nn.MultiheadAttention(4, 2, batch_first=True)
    nn.init.normal_(mha.in_proj_bias)
    model = SelfAttention(mha, nn.Linear(4, 3))
    optimizer = bprong.BPRONG(model, lr=0.1, weight_decay=0.5)
    F.cross_entropy(model(torch.randn(5, 3, 4)).flatten(0, 1), torch.arange(15) % 3).backward()
    optimizer.step()
    before = snapshot(model)
    for p in model.parameters():
        p.grad.zero_()
    optimizer.step()
    for name, value in before.items():
        assert_close(model.state_dict()[name], value * 0.95, 1e-6, name)


@pytest.mark.parametrize("most", [1, 50, 200, 10**6])
def test_patches_in_chunks_are_the_patches(most):
    z = torch.randn(3, 4, 7, 6)
    geometry = Geometry.of([3, 2], 2, 1, 1, 2)
    whole = patches(z, geometry).flatten(0, 1)
    chunks = list(patch_rows(z, geometry, most))
    assert torch.equal(torch.cat(chunks), whole)
    assert most == 10**6 or len(chunks) > 1


def test_masks_are_cut_as_rows_are(monkeypatch):
    monkeypatch.setattr("bprong.taps.CHUNK", 40)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randn(7, 2, 5, dtype=torch.float64), torch.arange(7) % 3
    y[[1, 4]] = -100
    chunked = stepped(model, x, y).statistics.layers["0"]
    monkeypatch.undo()
    whole = bprong.BPRONG(model, options=EXACT)
    kept = y >= 0
    model_x = x[kept].unfold(2, 2, 1).permute(0, 2, 1, 3).reshape(-1, 4)
    assert_close(chunked.c, model_x.mean(0), 1e-12)
    assert chunked.moments["forward"].weight == len(model_x)
    assert whole.statistics.layers["0"].c is None


def test_a_bias_is_not_carried_away_by_a_weight_at_rest():
    """With the weight's learning rate at zero, a new centre has nothing to add to the bias's velocity."""
    model, x, y = mlp(4, 3), torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3
    linear = model[0]
    groups = [{"params": [linear.weight], "lr": 0.1}, {"params": [linear.bias], "lr": 0.01}]
    optimizer = bprong.BPRONG(model, params=groups, momentum=0.9, every=2, options=EXACT)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    before = optimizer.state[linear.bias]["momentum_buffer"].clone()
    for p in model.parameters():
        p.grad.zero_()
    model(x + 5).sum().mul(0).backward()
    optimizer.step()
    assert_close(optimizer.state[linear.bias]["momentum_buffer"], 0.9 * before, 1e-9)
