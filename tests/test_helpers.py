"""Every assertion helper fails where it should."""

import numpy as np
import pytest
import sklearn.linear_model
import torch
from threadpoolctl import threadpool_info

from helpers import Idle, Woken, assert_close, assert_unchanged, classification, quick_cases, spd
from training import assert_same_path


def test_no_library_uses_more_than_one_thread():
    sklearn.linear_model.LinearRegression().fit(np.eye(3), np.ones(3))
    pools = {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()}
    assert len(pools) > 1
    assert set(pools.values()) == {1}, pools


def test_assert_close_fails_for_small_differences_other_shapes_and_nan():
    assert_close([1.0, 2.0], [1.0, 2.0], rtol=0)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([1.0, 2.0 + 1e-6], [1.0, 2.0], rtol=1e-7)
    with pytest.raises(AssertionError, match="shape"):
        assert_close([[1.0]], [1.0], rtol=1)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([float("nan")], [1.0], rtol=1e9)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([1e-3], [0.0], rtol=1e-6)


def test_assert_unchanged_fails_for_a_change_of_one_bit_and_for_other_names():
    a = {"w": torch.ones(2)}
    assert_unchanged(a, {"w": torch.ones(2)})
    with pytest.raises(AssertionError, match="w changed"):
        assert_unchanged(a, {"w": torch.ones(2).nextafter(torch.full((2,), 2.0))})
    with pytest.raises(AssertionError):
        assert_unchanged(a, {"v": torch.ones(2)})


def test_cases_that_are_not_quick_are_marked():
    cases = quick_cases([1, (2, "b"), 3], (2, "b"))
    assert [case.values for case in cases] == [(1,), (2, "b"), (3,)]
    assert [[mark.name for mark in case.marks] for case in cases] == [["rest"], [], ["rest"]]
    with pytest.raises(AssertionError):
        quick_cases([1, 2], 3)


def test_the_problems_are_as_documented():
    x, y = classification(50, 4, 3)
    assert x.mean(0).abs().min() > 1e-3
    assert set(y.tolist()) <= {0, 1, 2}
    assert torch.linalg.cond(spd(5, condition=1e4)).item() == pytest.approx(1e4, rel=1e-6)


def test_assert_same_path_fails_for_one_parameter_that_differs():
    path = {"0.weight": torch.ones(2), "0.bias": torch.zeros(2)}
    assert_same_path(path, path)
    with pytest.raises(AssertionError, match="0.bias: off by"):
        assert_same_path(path | {"0.bias": torch.full((2,), 1e-6)}, path)


def test_the_module_helpers_use_the_layers_they_say():
    x = torch.randn(4, 5)
    for model, used in ((Idle(), "used"), (Woken(), "used"), (Woken(by_hand=True), "used")):
        model(x).sum().backward()
        assert model.get_submodule(used).weight.grad is not None
        assert model.idle.weight.grad is None
    woken = Woken(by_hand=True)
    woken.awake = True
    woken(x).sum().backward()
    assert woken.idle.weight.grad is not None
