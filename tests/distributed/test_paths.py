"""Several processes take the path that one process takes on their batches together."""

import warnings

import cases
import launch
import pytest
import torch

from helpers import assert_close


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def trained(request):
    (found,) = launch.run(request.param, "cases:paths")
    return request.param, found


def test_all_ranks_have_the_same_parameters_bit_for_bit(trained):
    _, found = trained
    for name, expected in found[0].items():
        assert all(torch.equal(own[name], expected) for own in found), name


def test_the_path_is_that_of_one_process(trained):
    size, found = trained
    for name in cases.named(size):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = cases.parameters(cases.train(cases.CASES[name], size)[0])
        assert_close(found[0][name], alone, 1e-9, name)
