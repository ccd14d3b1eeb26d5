"""The loss read off a part of a batch is that of the whole batch, if the gradient determines it."""

import pytest
import torch
import torch.nn.functional as F

from bprong.likelihood.families import Bernoulli, Categorical, Gaussian
from bprong.likelihood.loss import loss_behind
from helpers import assert_close


def random(shape, seed):
    torch.manual_seed(seed)
    return 2 * torch.randn(shape, dtype=torch.float64)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=torch.float64)
KINDS = {
    "hard": (Categorical(), F.cross_entropy),
    "smoothed": (Categorical(), lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1)),
    "weighted": (Categorical(), lambda f, y: F.cross_entropy(f, y, weight=WEIGHTS)),
    "ignored": (Categorical(), lambda f, y: F.cross_entropy(f, y.masked_fill(torch.arange(len(y)) % 3 == 0, -100))),
    "soft": (Categorical(), lambda f, y: F.cross_entropy(f, random(f.shape, 1).softmax(dim=-1))),
    "bits": (Bernoulli(), lambda f, y: F.binary_cross_entropy_with_logits(f, F.one_hot(y, 4).double())),
    "numbers": (Gaussian(), lambda f, y: F.mse_loss(f, F.one_hot(y, 4).double())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_batch_has_the_same_loss_if_its_gradient_determines_it(kind):
    likelihood, loss_of = KINDS[kind]
    f = random((100, 4), 0).requires_grad_()
    value = loss_of(f, torch.arange(100) % 4)
    (G,) = torch.autograd.grad(value, f)
    chosen = torch.arange(30) * 100 // 30
    whole = loss_behind(likelihood, f, G, value=value.detach()).select(lambda tensor: tensor[chosen])
    part = loss_behind(likelihood, f[chosen], G[chosen], value=value.detach())
    if kind in ("soft", "numbers"):  # the value is that of the whole batch
        assert part is None or not part.certain
        return
    assert part.certain
    if kind == "weighted":  # weights are one on average over the examples seen
        assert (part.weights > 1).any()
        assert_close(part.scale * part.weights, whole.scale * whole.weights, 1e-9)
        return
    assert part.scale == pytest.approx(whole.scale, rel=1e-9)
    assert torch.equal(part.weights, whole.weights)
    assert_close(part.y.double(), whole.y.double(), 1e-9)
