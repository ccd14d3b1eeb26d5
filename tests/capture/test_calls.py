"""Every use of a weight is recorded, and nothing else, whatever a model does."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bprong
from bprong.capture.calls import recorded_calls
from bprong.capture.weights import weight_matrices_of
from helpers import assert_close, mlp
from layered import stepped

FUNCTIONS = [(F, name) for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d")]
FUNCTIONS += [(torch._VF, name) for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")]


def in_place():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 3))


def out_of_place():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


class Doubled(nn.Module):
    """An embedding and a linear layer whose outputs are changed in place."""

    def __init__(self, inplace):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.inplace = inplace

    def forward(self, tokens):
        z = self.embed(tokens)
        z = z.mul_(2).tanh_() if self.inplace else (z * 2).tanh()
        h = self.first(z)
        return self.last(h.relu_() if self.inplace else h.relu())


def test_later_operations_may_work_in_place():
    torch.manual_seed(0)
    plain = out_of_place().double()
    model = in_place().double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    y = torch.arange(6) % 3
    ours, theirs = (stepped(m, x, y)._whitening.layers for m in (model, plain))
    for name in ("0", "3"):
        assert_close(ours[name].forward.factor.inverse, theirs[name].forward.factor.inverse, 1e-12)
        assert_close(ours[name].backward.factor.inverse, theirs[name].backward.factor.inverse, 1e-12)
    tokens = torch.randint(7, (9,))
    y = torch.arange(9) % 3
    ours, theirs = (stepped(Doubled(inplace).double(), tokens, y)._whitening.layers for inplace in (True, False))
    for name in ("embed", "first", "last"):
        assert_close(ours[name].forward.factor.inverse, theirs[name].forward.factor.inverse, 1e-12)
        assert_close(ours[name].backward.factor.inverse, theirs[name].backward.factor.inverse, 1e-12)


def test_torch_functions_are_restored_after_an_error():
    before = [getattr(place, name) for place, name in FUNCTIONS]

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.fail = False

        def forward(self, x):
            if self.fail:
                raise RuntimeError("the model failed")
            return self.layer(x)

    model = Failing()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    model.fail = True
    with pytest.raises(RuntimeError, match="the model failed"):
        model(torch.randn(5, 4))
    assert [getattr(place, name) for place, name in FUNCTIONS] == before
    optimizer.observe(torch.randn(5, 4))
    model.layer.weight.grad = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="the model failed"):
        optimizer.step()
    assert [getattr(place, name) for place, name in FUNCTIONS] == before


def test_contexts_may_end_in_any_order():
    before = [getattr(place, name) for place, name in FUNCTIONS]
    assert torch.backends.mha.get_fastpath_enabled()
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    first, second = (recorded_calls(weight_matrices_of("", layer)) for layer in layers)
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


def test_functions_are_replaced_while_calls_are_recorded():
    before = [getattr(place, name) for place, name in FUNCTIONS]
    with recorded_calls(weight_matrices_of("", nn.Linear(3, 2))):
        assert all(getattr(place, name) is not own for (place, name), own in zip(FUNCTIONS, before, strict=True))


def test_another_thread_may_use_torch_while_calls_are_recorded():
    stop = threading.Event()
    wrong = []
    layer = nn.Linear(6, 5)
    x = torch.randn(4, 6)
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


def test_functions_called_by_keyword_and_of_uncovered_weights():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 4))
            self.layer = nn.Linear(4, 3)

        def forward(self, tokens):
            return self.layer(F.embedding(tokens, self.table, padding_idx=0, max_norm=2.0))

    with pytest.warns(bprong.WhiteningWarning, match="62% .* in Keywords"):
        optimizer = stepped(Keywords(), torch.randint(6, (8,)), torch.arange(8) % 3)
    assert list(optimizer._whitening.layers) == ["layer"]


def test_an_expert_given_no_row_at_the_first_refresh():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 3)
            self.two = nn.Linear(4, 3)

        def forward(self, x):
            return torch.cat([self.one(x), self.two(x[:0])])

    optimizer = stepped(Experts(), torch.randn(6, 4), torch.arange(6) % 3)
    assert optimizer._whitening.layers["one"].forward.factor is not None
    assert optimizer._whitening.layers["two"].forward.factor is None


def test_a_layer_under_vmap_follows_the_fallback_rule():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return torch.vmap(self.layer)(x)

    with pytest.warns(bprong.WhiteningWarning, match="layer 'layer' follows the fallback rule"):
        stepped(Mapped(), torch.randn(6, 4), torch.arange(6) % 3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_under_checkpointing(cell, reentrant):
    class Steps(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.cell = cell(3, 4)
            self.head = nn.Linear(4, 3)
            self.checkpointed = checkpointed

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

    x = torch.randn(6, 3, dtype=torch.float64).requires_grad_()
    y = torch.arange(6) % 3
    ours, theirs = (stepped(Steps(kind).double(), x, y)._whitening.layers for kind in (True, False))
    for name, layer in theirs.items():
        assert_close(ours[name].backward.factor.inverse, layer.backward.factor.inverse, 1e-10, name)


def test_a_model_that_returns_something_else_is_recorded():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"scores": self.layer(x)}

    model = Named()
    x = torch.randn(6, 4)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.01)
    with optimizer.recording() as record:
        output = model(x)["scores"]
        record(output)
    F.cross_entropy(output, torch.arange(6) % 3).backward()
    optimizer.step()
    assert optimizer._whitening.layers["layer"].forward.factor is not None
