"""Checks of user input: what they accept, what they return, and what their errors say."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.parallel import DataParallel

import bprong
from bprong.checks import integer, number, one_of, period, positive
from bprong.parallel.slices import unwrapped, wrapper_of
from helpers import mlp


def imports_of(module):
    """The modules that a module of the package imports, at any depth of its code."""
    tree = ast.parse((Path(bprong.__file__).parent / module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("module", ["checks.py", "errors.py"])
def test_the_modules_that_all_folders_use_import_nothing_of_the_package(module):
    found = list(imports_of(module))
    assert found
    assert not [name for name in found if name.startswith((".", "bprong"))]


def test_relative_and_absolute_imports_of_the_package_are_found():
    assert {"bprong.audit", "bprong.network.convert"} <= set(imports_of("__init__.py"))


def test_a_period_is_a_pair_of_integers_and_its_default_offset_is_half_of_it():
    assert period("forward", 7, None) == (7, 3)
    assert period("forward", 7, 6) == (7, 6)
    found = period("forward", np.int64(4), np.int64(1))
    assert found == (4, 1)
    assert all(type(value) is int for value in found)


@pytest.mark.parametrize(
    ("every", "offset", "message"),
    [
        (0, None, "forward_every must be a whole number of at least 1, not 0"),
        (2.5, None, "forward_every must be a whole number of at least 1, not 2.5"),
        ("10", None, "forward_every must be a whole number of at least 1, not '10'"),
        (5, -1, "forward_offset must be a whole number of at least 0 and less than 5, not -1"),
        (5, 1.5, "forward_offset must be a whole number of at least 0 and less than 5, not 1.5"),
        (5, 5, "forward_offset must be a whole number of at least 0 and less than 5, not 5"),
    ],
)
def test_an_impossible_period_is_refused(every, offset, message):
    with pytest.raises(ValueError, match=message):
        period("forward", every, offset)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, -1, torch.tensor(1.5)])
def test_an_integer_is_a_whole_number_of_at_least_a_bound(value):
    assert integer("max_dim", 1, 1) == 1
    with pytest.raises(ValueError, match="max_dim must be a whole number of at least 1, not "):
        integer("max_dim", value, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, "0.1", None, 1j])
def test_a_number_is_real_finite_and_at_least_a_bound(value):
    assert number("average", np.float32(0.5), 0) == 0.5
    with pytest.raises(ValueError, match="average must be a finite number of at least 0, not "):
        number("average", value, 0)


def test_a_number_may_have_an_upper_bound():
    assert number("average", 0.999, 0, 1) == 0.999
    with pytest.raises(ValueError, match="average must be a finite number of at least 0 and less than 1, not 1"):
        number("average", 1, 0, 1)


def test_a_positive_number_is_not_zero():
    assert positive("lr", 1e-300) == 1e-300
    with pytest.raises(ValueError, match="lr must be a finite number above 0, not 0"):
        positive("lr", 0)
    with pytest.raises(ValueError, match="lr must be a finite number of at least 0, not -1"):
        positive("lr", -1)


def test_a_choice_is_returned_or_refused_with_all_choices():
    assert one_of("fisher", "exact", ("sampled", "exact")) == "exact"
    with pytest.raises(ValueError, match=r"fisher must be one of \('sampled', 'exact'\), not 'true'"):
        one_of("fisher", "true", ("sampled", "exact"))


class FullyShardedLike(torch.nn.Module):
    """Named like FSDP's classes, which are recognised by name."""


def test_wrappers_that_are_not_supported_are_refused_by_name():
    model = mlp(3, 2)
    wrappers = {"DataParallel": DataParallel(model), "FullyShardedDataParallel": FullyShardedLike()}
    assert wrapper_of(model) is None
    assert unwrapped(model) is model
    for name, wrapper in wrappers.items():
        assert wrapper_of(wrapper) == name
        with pytest.raises(ValueError, match=f"'0' is wrapped for {name}, which is not supported"):
            unwrapped(torch.nn.Sequential(wrapper))
