"""A convolution trains as a linear layer on patches of its input does; patches in chunks.

float64, exact Fisher matrix, momentum, several refreshes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bprong
from bprong.capture.convolution import Geometry, patch_rows
from helpers import assert_close
from layered import OnPatches, assert_one_path, stepped
from training import EXACT


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CONVOLUTIONS = {
    "1d": (nn.Conv1d, (4, 4, 3), {}, (7,)),
    "1d strided, dilated, padded": (nn.Conv1d, (4, 6, 3), {"stride": 2, "dilation": 2, "padding": 2}, (9,)),
    "2d": (nn.Conv2d, (2, 3, 2), {}, (4, 3)),
    "2d padded, strided": (nn.Conv2d, (2, 3, 3), {"padding": 1, "stride": (2, 1)}, (4, 3)),
    "2d same, dilated": (nn.Conv2d, (2, 3, 3), {"padding": "same", "dilation": (1, 2)}, (4, 5)),
    "2d same, even kernel": (nn.Conv2d, (2, 3, (2, 3)), {"padding": "same"}, (3, 3)),
    "2d reflected": (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "reflect"}, (4, 3)),
    "2d circular": (nn.Conv2d, (2, 3, 3), {"padding": (1, 2), "padding_mode": "circular"}, (4, 3)),
    "2d replicated": (nn.Conv2d, (2, 3, 3), {"padding": 1, "padding_mode": "replicate"}, (3, 3)),
    "2d in groups": (nn.Conv2d, (4, 6, 2), {"groups": 2}, (3, 3)),
    "2d depthwise": (nn.Conv2d, (4, 4, 3), {"groups": 4, "padding": 1}, (3, 4)),
    "2d depthwise, several each": (nn.Conv2d, (3, 6, 2), {"groups": 3}, (3, 3)),
    "2d pointwise": (nn.Conv2d, (3, 4, 1), {}, (3, 2)),
    "2d without bias": (nn.Conv2d, (2, 3, 2), {"bias": False}, (3, 3)),
    "2d in groups without bias": (nn.Conv2d, (4, 4, 2), {"bias": False, "groups": 2}, (3, 3)),
    "3d": (nn.Conv3d, (2, 3, 2), {"padding": (0, 1, 0)}, (2, 3, 2)),
    "3d in groups": (nn.Conv3d, (2, 4, (1, 2, 2)), {"groups": 2, "stride": (1, 2, 1)}, (2, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_is_a_linear_layer_on_patches(kind):
    make, args, options, size = CONVOLUTIONS[kind]
    conv = make(*args, **options)
    x = torch.randn(12, args[0], *size) + 0.5
    y = torch.randint(3, (12,))
    with torch.no_grad():
        width = conv(x).flatten(1).shape[1]
    head = nn.Linear(width, 3)

    def model(first):
        copy = nn.Linear(width, 3)
        copy.load_state_dict(head.state_dict())
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), copy)

    assert_one_path(model(conv), model(OnPatches(conv)), x, y)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_in_any_memory_format(format):
    x = torch.randn(12, 2, 4, 4)
    y = torch.randint(3, (12,))
    first = nn.Conv2d(2, 3, 2)
    head = nn.Linear(27, 3)
    plain = nn.Sequential(first, nn.Tanh(), nn.Flatten(), head)
    other = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    other.load_state_dict(plain.state_dict())
    other = other.to(memory_format=format)
    assert_one_path(other, plain, x.to(memory_format=format), y)


def test_one_image_without_a_batch_dimension():
    class One(nn.Module):
        def __init__(self, squeezed):
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(2, 3, 2)
            self.head = nn.Linear(27, 3)
            self.squeezed = squeezed

        def forward(self, x):
            a = torch.stack([self.conv(image) for image in x]) if self.squeezed else self.conv(x)
            return self.head(torch.tanh(a).flatten(1))

    x = torch.randn(12, 2, 4, 4)
    y = torch.randint(3, (12,))
    assert_one_path(One(squeezed=True), One(squeezed=False), x, y)


@pytest.mark.parametrize("most", [1, 5, 20, 10**6])
def test_patches_in_chunks_are_the_patches(most):
    z = torch.randn(3, 4, 7, 6)
    geometry = Geometry.of([3, 2], 2, 1, 1, 2)
    whole = F.unfold(z, (3, 2), stride=2, padding=1).unflatten(1, (2, -1)).permute(0, 3, 1, 2).flatten(0, 1)
    chunks = list(patch_rows(z, geometry, most))
    assert torch.equal(torch.cat(chunks), whole)
    assert most == 10**6 or len(chunks) > 1


def test_masks_are_split_into_chunks_as_rows_are(monkeypatch):
    monkeypatch.setattr("bprong.capture.calls.CHUNK", 40)
    monkeypatch.setattr("bprong.capture.calls.FEWEST_ROWS", 1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(7, 2, 5, dtype=torch.float64)
    y = torch.arange(7) % 3
    y[[1, 4]] = -100
    chunked = stepped(model, x, y)._whitening.layers["0"]
    monkeypatch.undo()
    whole = bprong.BPRONG(model, "cross_entropy", lr=0.01, options=EXACT)
    kept = y >= 0
    model_x = x[kept].unfold(2, 2, 1).permute(0, 2, 1, 3).reshape(-1, 4)
    assert_close(chunked.c, model_x.mean(0), 1e-12)
    assert chunked.forward.moments.weight == len(model_x)
    assert whole._whitening.layers["0"].c is None
