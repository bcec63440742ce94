"""BandMF: correlated noise with amplification by sampling, accounted nearly exactly (THEORY section 7).

Importing this package loads nothing; a name is loaded when first used.
"""

from importlib import import_module

_HOME = {
    "Poisson": "schemes",
    "CyclicPoisson": "schemes",
    "BallsInBins": "schemes",
    "BMinSep": "schemes",
    "MultiAttribution": "schemes",
    "Strategy": "strategy",
    "optimal_toeplitz": "optimize",
    "delta": "account",
    "epsilon": "account",
    "curve": "account",
    "calibrate": "account",
    "unamplified_noise": "account",
    "Calibration": "account",
    "EpsilonBound": "account",
    "DeltaBound": "result",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'privacy.bandmf' has no attribute {name!r}")
    return getattr(import_module(f"privacy.bandmf.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
