"""scikit-learn estimators: tables in, fitted multilayer perceptrons out, without a learning rate.

network.py has the network and its derivatives, training.py the whitened steps, estimators.py what users type.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("bprong.sklearn needs scikit-learn. Install it: pip install 'scikit-learn>=1.6'") from error

from bprong.sklearn.estimators import MLPClassifier, MLPRegressor

__all__ = ["MLPClassifier", "MLPRegressor"]
