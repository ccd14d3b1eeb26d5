"""scikit-learn estimators: tables in, fitted multilayer perceptrons out, without a learning rate.

network.py has the network and its derivatives, training.py the whitened steps, estimators.py what users type.
"""

from bprong.errors import install_command

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(f"bprong.sklearn needs scikit-learn. Install it: {install_command('sklearn')}") from error

from bprong.sklearn.estimators import MLPClassifier, MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]
