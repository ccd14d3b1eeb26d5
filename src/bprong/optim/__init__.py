"""The drop-in optimizer.

In: the user's model and loop, unmodified. Out: steps of natural-gradient descent, by a fixed learning rate or by
lr="auto", and a report about them.
"""

from bprong.optim.optimizer import BPRONG, PRONG
from bprong.optim.options import Options
from bprong.whitening.schedule import Periods

__all__ = ["BPRONG", "PRONG", "Options", "Periods"]
