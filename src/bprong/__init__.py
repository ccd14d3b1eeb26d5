"""Natural-gradient training for PyTorch by bidirectional whitening (Fujimoto & Ohira: BWNN, PRONG, BPRONG)."""

from bprong.audit import audit
from bprong.capture.coverage import coverage
from bprong.capture.weights import register
from bprong.errors import WhiteningError, WhiteningWarning
from bprong.likelihood.families import Likelihood
from bprong.linalg.factors import Damping
from bprong.network.convert import fold, whiten_
from bprong.network.layers import WhitenedConv2d, WhitenedLinear
from bprong.network.rewhitening import Rewhitening
from bprong.optim.optimizer import BPRONG, PRONG

__all__ = [
    "BPRONG",
    "PRONG",
    "Damping",
    "Likelihood",
    "Rewhitening",
    "WhitenedConv2d",
    "WhitenedLinear",
    "WhiteningError",
    "WhiteningWarning",
    "audit",
    "coverage",
    "fold",
    "register",
    "whiten_",
]
__version__ = "0.1.0"
