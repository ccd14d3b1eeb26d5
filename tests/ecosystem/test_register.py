"""`bprong.register`: layers of other packages that compute what a known layer does are whitened like it.

    handle = bprong.register(kind, like=nn.Linear, transposed=False, stacked=False, weight="weight", bias="bias")

    kind        the type of the layer; subclasses are not included, as for torch's own layers
    like        the layer of torch's that it computes the same as: nn.Linear, nn.Conv2d, …
    transposed  its weight is stored as (in, out): y = x W + b
    stacked     its weight is a stack of matrices (number, out, in), each of which is used on its own, as by experts
    weight, bias
                the names of its parameters; several weights are given as a tuple; a missing bias is none

It holds for optimizers built later. As for torch's hooks, the handle has `remove()` and is a context manager.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers.norm_act import GroupNormAct
from timm.models.nfnet import NfCfg, NormFreeNet
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.nn import Linear as GraphLinear
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.pytorch_utils import Conv1D

import bprong
from helpers import assert_close, snapshot
from tiny import (
    CLASSES,
    Reads,
    gpt2,
    inside,
    language_batches,
    linear,
    llama,
    mixtral,
    next_token_loss,
    optimizer_of,
    replaced,
    train,
    whitened_share,
)


def conv1d() -> Any:
    return bprong.register(Conv1D, like=nn.Linear, transposed=True)


def experts() -> Any:
    return bprong.register(MixtralExperts, like=nn.Linear, weight=("gate_up_proj", "down_proj"), stacked=True)


def router() -> Any:
    return bprong.register(MixtralTopKRouter, like=nn.Linear)


def graph_linear() -> Any:
    return bprong.register(GraphLinear, like=nn.Linear)


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Registers layers until the end of the test."""
    with ExitStack() as stack:
        yield lambda *kinds: [stack.enter_context(kind()) for kind in kinds]


# Models ---------------------------------------------------------------------------------------------------------------


def norm_free() -> NormFreeNet:
    """A ResNet without normalisation layers, as timm's nf_resnet26."""
    torch.manual_seed(1)
    return NormFreeNet(
        NfCfg(depths=(1, 1, 1, 1), channels=(16, 16, 24, 24), stem_type="3x3", stem_chs=8, num_features=0),
        num_classes=CLASSES,
    )


def big_transfer() -> ResNetV2:
    """A ResNet of BiT's kind, as timm's resnetv2_50x1_bit."""
    torch.manual_seed(1)
    norm = partial(GroupNormAct, num_groups=4)
    return ResNetV2([1, 1], channels=(16, 32), num_classes=CLASSES, stem_chs=8, norm_layer=norm)


class Graph(nn.Module):
    """Two graph convolutions on one ring of nodes, and a classifier of each node."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = GCNConv(5, 12)
        self.second = SAGEConv(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, edges).tanh(), edges).tanh())


def images(steps: int, batch: int = 6) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(batch, 3, 32, 32, generator=random), torch.randint(CLASSES, (batch,), generator=random))
        for _ in range(steps)
    ]


def ring(steps: int, nodes: int = 20) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Features, edges and classes of the nodes of a ring."""
    random = torch.Generator().manual_seed(3)
    at = torch.arange(nodes)
    edges = torch.stack((torch.cat((at, at)), torch.cat(((at + 1) % nodes, (at - 1) % nodes))))
    x = torch.randn(nodes, 5, generator=random, dtype=torch.float64)
    y = torch.randint(CLASSES, (nodes,), generator=random)
    return [(x, edges, y)] * steps


def classified(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss of a model that takes everything but the last element of its batch."""
    *arguments, y = batch
    return F.cross_entropy(model(*arguments), y)


def language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return next_token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


class WrittenOut(nn.Module):
    """Mixtral's experts with a linear layer for each of their matrices."""

    def __init__(self, experts: MixtralExperts) -> None:
        super().__init__()
        self.act_fn = experts.act_fn
        self.gate_up = nn.ModuleList(map(linear, experts.gate_up_proj))
        self.down = nn.ModuleList(map(linear, experts.down_proj))

    def forward(self, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(z)
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            at, token = torch.where((chosen == i).T)
            gate, up = gate_up(z[token]).chunk(2, dim=-1)
            a = down(self.act_fn(gate) * up) * weights[token, at, None]
            total.index_add_(0, token, a.to(total.dtype))
        return total


class LinearRouter(MixtralTopKRouter):
    """Mixtral's router with its weight in a linear layer."""

    def __init__(self, router: MixtralTopKRouter) -> None:
        nn.Module.__init__(self)
        self.top_k = router.top_k
        self.hidden_dim = router.hidden_dim
        self.linear = linear(router.weight)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(z.reshape(-1, self.hidden_dim))
        top, chosen = torch.topk(F.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
        return logits, top / top.sum(dim=-1, keepdim=True), chosen


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any, tuple[Callable[[], Any], ...]]] = {
    "gpt2": (gpt2, language_batches, language, (conv1d,)),
    "mixtral": (mixtral, language_batches, language, (experts, router)),
    "nf_resnet": (norm_free, images, classified, ()),  # its weights are computed from parameters, as those of the next
    "bit": (big_transfer, images, classified, ()),
    "graph": (lambda: Graph().double(), ring, classified, (graph_linear,)),
}
families = pytest.mark.parametrize("family", FAMILIES)


# Most parameters follow the fallback rule -----------------------------------------------------------------------------


@families
def test_the_first_step_warns_when_most_parameters_follow_the_fallback(family: str) -> None:
    """One warning says which share is whitened, names the type of the layers that are not, and mentions `register`."""
    make, data, loss_of, _ = FAMILIES[family]
    model = make()
    optimizer = optimizer_of(model)
    name = {"gpt2": "Conv1D", "mixtral": "MixtralExperts", "nf_resnet": "ScaledStdConv2d", "bit": "StdConv2d",
            "graph": "Linear"}[family]  # fmt: skip
    with pytest.warns(bprong.WhiteningWarning, match=f"(?s)%.*{name}.*bprong.register") as caught:
        train(model, optimizer, data(1), loss_of)
    assert sum(issubclass(w.category, bprong.WhiteningWarning) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", bprong.WhiteningWarning)
        train(model, optimizer, data(2), loss_of)


def test_no_warning_when_most_parameters_are_whitened() -> None:
    """Normalisation layers alone are no reason to warn."""
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("error", bprong.WhiteningWarning)
        train(model, optimizer_of(model), language_batches(2), language)


def test_a_model_without_any_known_layer_is_an_error_that_mentions_register() -> None:
    """Nothing could be whitened, which `register` may change."""
    with pytest.raises(ValueError, match="bprong.register"):
        optimizer_of(nn.Sequential(GraphLinear(4, 3)))


# Registered layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name, (*_, kinds) in FAMILIES.items() if kinds])
@pytest.mark.parametrize("lr", [0.02, "auto"])
def test_registered_families_are_whitened_and_learn(family: str, lr: Any, registered: Callable[..., None]) -> None:
    """Nine tenths of the numbers are whitened, without a warning, and the loss of a repeated batch falls."""
    make, data, loss_of, kinds = FAMILIES[family]
    registered(*kinds)
    model = make()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=2)
    losses = train(model, optimizer, data(1) * 8, loss_of)
    assert whitened_share(optimizer, model) > 0.9
    assert losses[-1] < 0.98 * losses[0]


def test_gpt2_takes_the_path_of_linear_layers(registered: Callable[..., None]) -> None:
    """A transposed weight is whitened as the linear layer that it is."""
    registered(conv1d)
    model = gpt2().double()
    plain = replaced(model, Conv1D, lambda layer: linear(layer.weight.T, layer.bias))
    train(model, optimizer_of(model, momentum=0.5), language_batches(5), language)
    train(plain, optimizer_of(plain, momentum=0.5), language_batches(5), language)
    for name, value in snapshot(plain).items():
        own = snapshot(model)[name]
        transposed = name.endswith("weight") and ".c_" in name
        assert_close(own.T if transposed else own, value, 1e-8, name)


def test_mixtral_takes_the_path_of_linear_layers(registered: Callable[..., None]) -> None:
    """Each expert has statistics of its own, from the tokens that it was given."""
    registered(experts, router)
    model = mixtral().double()
    plain = replaced(replaced(model, MixtralExperts, WrittenOut), MixtralTopKRouter, LinearRouter)
    ids = language_batches(1)[0]["input_ids"]
    assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, 1e-6)
    train(model, optimizer_of(model, momentum=0.5), language_batches(5), language)
    train(plain, optimizer_of(plain, momentum=0.5), language_batches(5), language)
    assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, 1e-5)


def test_a_graph_network_takes_the_path_of_linear_layers(registered: Callable[..., None]) -> None:
    """torch_geometric's Linear computes what torch's does."""
    registered(graph_linear)
    model = Graph().double()
    plain = replaced(model, GraphLinear, lambda layer: linear(layer.weight, layer.bias))
    train(model, optimizer_of(model, momentum=0.5), ring(5), classified)
    train(plain, optimizer_of(plain, momentum=0.5), ring(5), classified)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for name, value in snapshot(plain).items():
        assert_close(snapshot(model)[name], value, 1e-9, name)


def test_a_registration_can_be_removed() -> None:
    """After `remove()` new optimizers no longer know the layer; those built before keep it."""
    handle = conv1d()
    model = gpt2()
    optimizer = optimizer_of(model)
    handle.remove()
    train(model, optimizer, language_batches(1), language)
    assert whitened_share(optimizer, model) > 0.9
    assert "in Conv1D" in bprong.coverage(model).fallback.values()


def test_coverage_knows_registered_layers(registered: Callable[..., None]) -> None:
    """`coverage` shows a registered layer as it shows the layer that it computes the same as."""
    registered(conv1d)
    rows = {row.parameter: row for row in bprong.coverage(gpt2()).rows}
    row = rows["transformer.h.0.mlp.c_fc.weight"]
    assert (row.treatment, row.inputs, row.outputs) == ("two-sided", "8", "32")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "Conv1D", "like": nn.Linear}, "Conv1D"),
        ({"kind": Conv1D, "like": nn.LayerNorm}, "LayerNorm"),
        ({"kind": Conv1D, "like": nn.Conv2d, "transposed": True}, "transposed"),
    ],
    ids=["not a type", "not a whitened layer", "a transposed convolution"],
)
def test_wrong_registrations_are_errors(arguments: dict[str, Any], said: str) -> None:
    """What is registered is a type of module, and `like` a layer that can be whitened."""
    kind = arguments.pop("kind")
    with pytest.raises((TypeError, ValueError), match=said):
        bprong.register(kind, **arguments)


def test_a_layer_that_does_not_compute_what_was_registered_is_an_error() -> None:
    """A weight (in, out) that is not square cannot be registered as (out, in): the step names the layer."""
    with bprong.register(Conv1D, like=nn.Linear):
        model = gpt2()
        optimizer = optimizer_of(model)
        with pytest.raises((RuntimeError, ValueError), match="c_attn"):
            train(model, optimizer, language_batches(1), language)


# Tied weights ---------------------------------------------------------------------------------------------------------


def test_a_tied_embedding_is_whitened_or_named(registered: Callable[..., None]) -> None:
    """If the weight shared by embedding and head follows the fallback, the first step says that it is tied."""
    registered(conv1d)
    model = gpt2(tied=True)
    model.transformer.h = nn.ModuleList()  # so that most numbers are in the tied weight
    optimizer = optimizer_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", bprong.WhiteningWarning)
        train(model, optimizer, language_batches(2), language)
    reason = optimizer.report().fallback.get("transformer.wte.weight")
    said = " ".join(str(w.message) for w in caught)
    assert reason is None or ("tied" in said and "transformer.wte.weight" in said and "lm_head.weight" in said)


def test_tied_gpt2_learns(registered: Callable[..., None]) -> None:
    """GPT-2 as it comes, with its embedding tied to its head and its loss inside, learns a batch at lr="auto"."""
    registered(conv1d)
    model = gpt2(tied=True)
    optimizer = bprong.BPRONG(model, "cross_entropy", every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bprong.WhiteningWarning)  # about the tied weight, if it is not whitened
        losses = train(model, optimizer, language_batches(1) * 20, inside)
    assert losses[-1] < 0.5 * losses[0]


def test_the_same_module_read_twice_is_no_tie() -> None:
    """A model of transformers inside another module that also keeps its body is whitened as it is without that."""
    body = llama()
    model = Reads(body)
    alone = bprong.coverage(model).fallback
    model.backbone = body.model
    assert set(bprong.coverage(model).fallback) == set(alone)
