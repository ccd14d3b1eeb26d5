"""whiten_ and fold keep the function of any module tree, and fold gives the stock model back exactly."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

import bprong
from bprong import WhitenedLinear
from helpers import assert_close, assert_unchanged, classification, layers_of, mlp, snapshot


class Branching(nn.Module):
    """Nested, with layers in lists and dicts, one of them without a bias, and other modules between them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        self.arms = nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4)])
        self.heads = nn.ModuleDict({"out": nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))})

    def forward(self, x):
        h = self.stem(x)
        return self.heads["out"](self.arms[0](h) + torch.tanh(self.arms[1](h)))


def structure(model):
    return [(name, type(module)) for name, module in model.named_modules()]


def refreshed(model, x, **options):
    """The model whitened and re-whitened on x."""
    bprong.whiten_(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bprong.Rewhitening(model, optimizer, "cross_entropy", forward_every=1, backward_every=1, backward_offset=0).step(x)
    return model


@pytest.mark.parametrize("backward", [True, False])
def test_fold_of_whiten_is_the_identity(backward):
    model = Branching().double()
    original = copy.deepcopy(model)
    x, _ = classification(30, 5, 3)
    bprong.whiten_(model, backward=backward)
    assert len(layers_of(model)) == 4
    assert torch.equal(model.eval()(x), original.eval()(x))
    assert_unchanged(snapshot(bprong.fold(model)), snapshot(original))
    assert structure(bprong.fold(model)) == structure(original)


def test_fold_after_rewhitening_gives_a_stock_model_of_the_same_function():
    model = Branching().double()
    original = copy.deepcopy(model)
    x, _ = classification(30, 5, 3)
    refreshed(model, x)
    plain = bprong.fold(model)
    assert structure(plain) == structure(original)
    assert plain.state_dict().keys() == original.state_dict().keys()
    assert_close(plain.eval()(x), original.eval()(x), 1e-12)
    original.load_state_dict(plain.state_dict())
    assert len(layers_of(model)) == 4  # fold makes a copy
    with torch.no_grad():
        plain.arms[1].weight.add_(1)
        plain.stem[1].weight.add_(1)
    assert_close(model.eval()(x), original.eval()(x), 1e-12)


def test_whiten_returns_the_model_itself_with_new_parameters():
    model = mlp(5, 4, 3)
    old = list(model.parameters())
    assert bprong.whiten_(model) is model
    assert not {id(p) for p in old} & {id(p) for p in model.parameters()}


def test_filter_fn_chooses_by_module_and_name():
    model = Branching()
    seen = []
    bprong.whiten_(model, lambda module, name: seen.append((name, type(module))) or name.startswith("arms"))
    assert [name for name, _ in seen] == ["stem.0", "arms.0", "arms.1", "heads.out.1"]
    assert {kind for _, kind in seen} == {nn.Linear}
    assert [n for n, m in model.named_modules() if isinstance(m, WhitenedLinear)] == ["arms.0", "arms.1"]


def test_whitening_twice_is_refused_because_nothing_is_left():
    model = bprong.whiten_(mlp(5, 4, 3))
    with pytest.raises(ValueError, match="nothing to whiten: no nn.Linear"):
        bprong.whiten_(model)


def tied_module():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Tanh(), shared)


def tied_parameter():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)})
    model["out"].weight = model["embed"].weight
    return model


def tied_bias():
    model = mlp(4, 4, 4)
    model[2].bias = model[0].bias
    return model


def hooked_backward():
    model = mlp(3, 2)
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def weight_normed():
    model = mlp(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old form, which keeps the layer's class
        torch.nn.utils.weight_norm(model[0])
    return model


def hooked():
    model = mlp(3, 2)
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tied_module, r"shared \(tied\) by 0.weight, 2.weight"),
        (tied_parameter, r"out: its weight is shared \(tied\) by embed.weight, out.weight"),
        (lambda: DataParallel(mlp(3, 2)), "the model is wrapped in DataParallel.*give the inner model"),
        (lambda: nn.Sequential(DataParallel(mlp(3, 2))), "0 is wrapped in DataParallel"),
        (lambda: nn.Linear(3, 2), "wrap it"),
        (hooked, "it has hooks"),
        (hooked_backward, "it has hooks"),
        (tied_bias, r"its bias is shared \(tied\) by 0.bias, 2.bias"),
        (weight_normed, "computed from other parameters"),
        (lambda: mlp(3, 2, dtype=torch.complex64), "its weight is complex"),
        (lambda: nn.Sequential(nn.ReLU()), "nothing to whiten: no nn.Linear"),
    ],
)
def test_models_that_cannot_be_whitened_are_refused_with_the_reason_and_unchanged(model, message):
    model = model()
    before = snapshot(model)
    kinds = structure(model)
    with pytest.raises(ValueError, match=message):
        bprong.whiten_(model)
    assert structure(model) == kinds
    assert_unchanged(before, snapshot(model))


def test_a_ddp_model_is_refused_before_and_accepted_after_it_was_whitened(tmp_path):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(mlp(3, 2))
        with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
            bprong.whiten_(ddp)
        inner = bprong.whiten_(mlp(3, 2))
        ddp = DistributedDataParallel(inner)
        rewhitening = bprong.Rewhitening(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "cross_entropy")
        assert rewhitening.model is inner
        del ddp, rewhitening  # they hold the group, whose threads are joined by the last one that does
    finally:
        gc.collect()
        dist.destroy_process_group()


def test_weight_norm_by_parametrization_is_refused():
    model = mlp(3, 2)
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match="nothing to whiten"):  # its class is no longer nn.Linear itself
        bprong.whiten_(model)


def test_a_transformer_layer_computes_the_same_in_both_modes():
    """Its eval-mode fast path reads `linear1.weight`, which a whitened layer has in ordinary coordinates."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected = layer(x)
    expected_in_eval_mode = layer.eval()(x)
    layer.train()
    bprong.whiten_(layer)
    assert [n for n, m in layer.named_modules() if isinstance(m, WhitenedLinear)] == ["linear1", "linear2"]
    assert_close(layer(x), expected, 1e-12)
    with torch.no_grad():
        assert_close(layer.eval()(x), expected_in_eval_mode, 1e-12)


def test_training_mode_and_device_are_kept():
    model = mlp(3, 2).eval()
    assert not bprong.fold(bprong.whiten_(model)).training
    meta = bprong.whiten_(mlp(3, 2).to("meta"))
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"}
    assert {t.device.type for t in bprong.fold(meta).state_dict().values()} == {"meta"}


def test_every_reason_against_a_layer_is_named():
    model = hooked()
    model[0].weight.register_hook(lambda gradient: gradient)
    model.append(nn.Linear(2, 3, bias=False))
    model[0].register_parameter("extra", model[1].weight)
    message = (
        r"0: its weight is computed from other parameters .*; it has hooks.*; its extra is shared \(tied\) by 0.extra"
    )
    with pytest.raises(ValueError, match=message):
        bprong.whiten_(model)
