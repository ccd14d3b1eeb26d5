"""Natural-gradient training for PyTorch by bidirectional whitening (Fujimoto & Ohira: BWNN, PRONG, BPRONG)."""

from bprong.convert import fold, whiten_
from bprong.coverage import coverage
from bprong.fisher import audit
from bprong.layers import WhitenedLinear
from bprong.likelihood import Likelihood
from bprong.optimizer import BPRONG, PRONG
from bprong.rewhitening import Rewhitening
from bprong.whitening import Damping

__all__ = [
    "BPRONG",
    "PRONG",
    "Damping",
    "Likelihood",
    "Rewhitening",
    "WhitenedLinear",
    "audit",
    "coverage",
    "fold",
    "whiten_",
]
__version__ = "0.1.0"
