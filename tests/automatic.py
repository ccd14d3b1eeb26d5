"""What the tests of lr="auto" share."""

import torch
import torch.nn.functional as F

import bprong
from bprong.optim.auto.rule import SETTINGS
from helpers import classification

DATA = classification(60, 5, 3)


def auto(model, loss="cross_entropy", **arguments):
    return bprong.BPRONG(model, loss, lr="auto", **arguments)


def loss_of(model):
    with torch.no_grad():
        return float(F.cross_entropy(model(DATA[0]), DATA[1]))


def bound(loss, settings=SETTINGS):
    """The bound on ½dᵀFd at this averaged loss."""
    return max(settings.bound_share * loss, min(settings.bound_nats, settings.bound_late * loss))
