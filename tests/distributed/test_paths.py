"""Several processes take the path that one process takes on their batches together."""

import warnings

import cases
import launch
import pytest
import torch

from helpers import assert_close

LAUNCHES = [
    pytest.param((2, None), id="two ranks"),
    pytest.param((2, "paths"), id="two ranks, all cases", marks=pytest.mark.rest),
    pytest.param((4, "some_paths"), id="four ranks", marks=pytest.mark.rest),
]


@pytest.fixture(scope="module", params=LAUNCHES)
def trained(request):
    size, function = request.param
    if function is None:
        return size, request.getfixturevalue("two_ranks")["cases:some_paths"]
    (found,) = launch.run(size, f"cases:{function}")
    return size, found


def test_all_ranks_have_the_same_parameters_bit_for_bit(trained):
    _, found = trained
    for name, expected in found[0].items():
        assert all(torch.equal(own[name], expected) for own in found), name


def test_the_path_is_that_of_one_process(trained):
    size, found = trained
    assert len(found[0]) >= 5
    for name in found[0]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = cases.parameters(cases.train(cases.CASES[name], size)[0])
        assert_close(found[0][name], alone, 1e-9, name)
