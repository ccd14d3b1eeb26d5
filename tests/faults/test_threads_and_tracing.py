"""Models in several threads, models that change their dtype, and models that are traced while they are trained."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bprong
from helpers import assert_close, assert_unchanged, classification, mlp, quick_cases, snapshot
from training import EXACT, train

RATES = pytest.mark.parametrize("lr", [0.1, "auto"])
Rate = float | str
X, Y = classification(60, 5, 3)


# 17. Another dtype in mid-training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_model_may_change_its_dtype_in_mid_training(
    momentum: float, every: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """It goes on as one that was built with the new dtype and has loaded the state of the old one."""
    before, after = dtypes

    def optimizer_of(model: nn.Module) -> bprong.BPRONG:
        return bprong.BPRONG(model, "cross_entropy", lr=0.05, momentum=momentum, every=every, options=EXACT)

    model = mlp(5, 4, 4, 4, 3, dtype=before)
    optimizer = optimizer_of(model)
    train(model, optimizer, [(X.to(before), Y)] * 3)
    other = mlp(5, 4, 4, 4, 3, dtype=after)
    other.load_state_dict(model.state_dict())
    loaded = optimizer_of(other)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.to(after)
    train(model, optimizer, [(X.to(after), Y)] * 4)
    train(other, loaded, [(X.to(after), Y)] * 4)
    for name, value in snapshot(other).items():
        assert snapshot(model)[name].dtype is after
        assert_close(snapshot(model)[name], value, 1e-5, name)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_model_may_change_its_dtype_under_auto(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    before, after = dtypes
    model = mlp(5, 4, 4, 4, 3, dtype=before)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr="auto")
    train(model, optimizer, [(X.to(before), Y)] * 4)
    model.to(after)
    start = float(F.cross_entropy(model(X.to(after)), Y).detach())
    train(model, optimizer, [(X.to(after), Y)] * 12)
    assert float(F.cross_entropy(model(X.to(after)), Y).detach()) < start


# 18. Tracing ----------------------------------------------------------------------------------------------------------


def ignore_deprecations() -> None:
    for kind in (DeprecationWarning, FutureWarning):  # which of them depends on the version of torch
        warnings.simplefilter("ignore", kind)


def by_jit(model: nn.Module) -> Tensor:
    with warnings.catch_warnings():
        ignore_deprecations()
        return torch.jit.trace(model, X)(X)


def by_jit_in_eval_mode(model: nn.Module) -> Tensor:
    model.eval()
    found = by_jit(model)
    model.train()
    return found


def by_fx(model: nn.Module) -> Tensor:
    return torch.fx.symbolic_trace(model)(X)


def by_make_fx(model: nn.Module) -> Tensor:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(X)(X)


def by_export(model: nn.Module) -> Tensor:
    return torch.export.export(model, (X,)).module()(X)


def by_functional_call(model: nn.Module) -> Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (X,))


def by_vmap(model: nn.Module) -> Tensor:
    """Gradients of single examples, as for differential privacy."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, X, Y)
    return model(X)


def by_jacobian(model: nn.Module) -> Tensor:
    with warnings.catch_warnings():
        ignore_deprecations()  # of torch at itself, at the first use
        torch.func.jacrev(model)(X[0])
        torch.func.jvp(model, (X,), (X,))
    return model(X)


WAYS: dict[str, Callable[[nn.Module], Tensor]] = {
    "torch.jit.trace": by_jit,
    "torch.jit.trace in eval mode": by_jit_in_eval_mode,
    "torch.fx.symbolic_trace": by_fx,
    "make_fx": by_make_fx,
    **({"torch.export": by_export} if hasattr(torch.compiler, "is_exporting") else {}),  # not with torch 2.6
    "functional_call": by_functional_call,
    "vmap of gradients": by_vmap,
    "Jacobians": by_jacobian,
}


MOMENTS = ["before the first step", "between two steps", "after the backward pass"]


@RATES
@pytest.mark.parametrize("moment", quick_cases(MOMENTS, "after the backward pass"))
@pytest.mark.parametrize("way", WAYS)
def test_a_model_may_be_traced_while_an_optimizer_is_attached(lr: Rate, moment: str, way: str) -> None:
    """The trace computes what the model does, and training goes on as if there had been none."""

    def run(traced: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = mlp(5, 4, 3)
        optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options=EXACT)

        def trace() -> None:
            if traced:
                assert_close(WAYS[way](model), model(X), 1e-12)

        if moment == "before the first step":
            trace()
        train(model, optimizer, [(X, Y)] * 2)
        if moment == "between two steps":
            trace()
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        if moment == "after the backward pass":
            trace()
        optimizer.step()
        train(model, optimizer, [(X, Y)])
        return snapshot(model)

    assert_unchanged(run(traced=False), run(traced=True))


@RATES
def test_a_traced_model_holds_nothing_of_the_optimizer(lr: Rate) -> None:
    """Its graph has the operations of the model and no others."""
    model = mlp(5, 4, 3)

    def operations() -> list[str]:
        with warnings.catch_warnings():
            ignore_deprecations()
            return [node.kind() for node in torch.jit.trace(model, X).inlined_graph.nodes()]

    expected = operations()
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1)
    assert operations() == expected
    train(model, optimizer, [(X, Y)])
    assert operations() == expected


def test_a_model_may_be_scripted_while_an_optimizer_is_attached() -> None:
    """torch.jit.script compiles hooks, of which there are none, and training goes on."""
    model = mlp(5, 4, 3)
    plain = copy.deepcopy(model)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=0.1)
    with warnings.catch_warnings():
        ignore_deprecations()
        scripted = torch.jit.script(model)
    assert_close(scripted(X), model(X), 1e-12)
    train(model, optimizer, [(X, Y)] * 3)
    train(plain, bprong.BPRONG(plain, "cross_entropy", lr=0.1), [(X, Y)] * 3)
    assert_unchanged(snapshot(plain), snapshot(model))


# 16. Threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Threads take turns so often that they meet in every part of a step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[], Any]) -> list[Any]:
    """The results of some functions, each run in a thread of its own; an error of one is raised here."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(i: int, work: Callable[[], Any]) -> None:
        try:
            start.wait()
            results[i] = work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i, work)) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def training(seed: int, lr: Rate, steps: int = 12) -> Callable[[], dict[str, Tensor]]:
    """Trains a perceptron of its own and returns its parameters."""
    torch.manual_seed(seed)
    model = mlp(5, 4, 3)
    optimizer = bprong.BPRONG(model, "cross_entropy", lr=lr, every=1, options=EXACT)
    x = X * (1 + seed)

    def run() -> dict[str, Tensor]:
        train(model, optimizer, [(x, Y)] * steps)
        return snapshot(model)

    return run


@RATES
@pytest.mark.parametrize("threads", quick_cases([2, 4], 2))
@pytest.mark.usefixtures("_frequent_switches")
def test_models_trained_in_several_threads_take_the_paths_that_they_take_alone(lr: Rate, threads: int) -> None:
    expected = [training(seed, lr)() for seed in range(threads)]
    for ours, theirs in zip(together(*(training(seed, lr) for seed in range(threads))), expected, strict=True):
        assert_unchanged(theirs, ours)


@RATES
@pytest.mark.usefixtures("_frequent_switches")
def test_a_model_that_another_thread_only_calls_is_not_disturbed_and_does_not_count(lr: Rate) -> None:
    """A server answers from the same weights, copied now and then, while they are trained."""
    expected = training(0, lr)()
    other = mlp(5, 4, 3)
    with torch.no_grad():
        answer = other(X)
    functions = F.linear, F.cross_entropy

    def serve() -> None:
        for _ in range(200):
            assert torch.equal(other(X), answer)

    _, ours = together(serve, training(0, lr))
    assert_unchanged(expected, ours)
    assert functions == (F.linear, F.cross_entropy)


@pytest.mark.usefixtures("_frequent_switches")
def test_random_numbers_of_one_thread_are_not_reset_by_a_step_in_another() -> None:
    """Targets are drawn from a generator of their own; the global one is never set back to an earlier state."""

    def draw() -> list[float]:
        return [float(torch.rand((), dtype=torch.float64)) for _ in range(3000)]

    run = training(0, lr=0.1)
    torch.manual_seed(5)
    drawn, _ = together(draw, run)
    torch.manual_seed(5)
    assert drawn == draw()
