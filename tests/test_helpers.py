"""Every assertion helper is shown to fail once."""

import pytest
import torch

from helpers import assert_close, assert_unchanged, classification, spd


def test_assert_close_fails_on_a_small_difference_a_shape_and_nan():
    assert_close([1.0, 2.0], [1.0, 2.0], rtol=0)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([1.0, 2.0 + 1e-6], [1.0, 2.0], rtol=1e-7)
    with pytest.raises(AssertionError, match="shape"):
        assert_close([[1.0]], [1.0], rtol=1)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([float("nan")], [1.0], rtol=1e9)
    with pytest.raises(AssertionError, match="off by"):
        assert_close([1e-3], [0.0], rtol=1e-6)


def test_assert_unchanged_fails_on_one_bit_and_on_a_name():
    a = {"w": torch.ones(2)}
    assert_unchanged(a, {"w": torch.ones(2)})
    with pytest.raises(AssertionError, match="w changed"):
        assert_unchanged(a, {"w": torch.ones(2).nextafter(torch.full((2,), 2.0))})
    with pytest.raises(AssertionError):
        assert_unchanged(a, {"v": torch.ones(2)})


def test_the_problems_are_what_they_say():
    x, y = classification(50, 4, 3)
    assert x.mean(0).abs().min() > 1e-3
    assert set(y.tolist()) <= {0, 1, 2}
    assert torch.linalg.cond(spd(5, condition=1e4)).item() == pytest.approx(1e4, rel=1e-6)
