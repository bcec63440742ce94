"""From envelopes to private releases. Importing this package loads nothing; a name is loaded when first used."""

from importlib import import_module

_HOME = {
    "predict": "query",
    "Query": "query",
    "classify": "classification",
    "Labels": "classification",
    "release_parameters": "ags",
    "AgsPlan": "ags",
    "PrivateModel": "ags",
    "certify_on_demand": "on_demand",
    "predict_from_bounds": "agtr",
    "release_predictions": "agtr",
    "Release": "agtr",
    "Guarantee": "agtr",
    "PrivateDiagnostics": "agtr",
    "cross_ranges": "smooth",
    "smooth_bound": "smooth",
    "smooth_bound_indexed": "smooth",
    "dense_maximum": "dense",
    "dense_from_sparse": "dense",
    "needed_radii": "dense",
    "AdmissiblePair": "noise",
    "admissible_pairs": "noise",
    "make_family": "noise",
    "noise_scale": "noise",
    "SecureBits": "sampling",
    "release": "sampling",
    "Ledger": "ledger",
    "BudgetExhaustedError": "ledger",
    "predict_with_ledger": "ledgered",
    "predict_pate": "pate",
    "audit_pairs": "audit",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'privacy' has no attribute {name!r}")
    return getattr(import_module(f"privacy.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
