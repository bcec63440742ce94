"""From a recipe to envelopes.  Importing this package loads nothing heavy: each name is loaded when first used.

``certify.envelope`` (reading and writing envelope files) needs numpy and safetensors only and works beside a
foreign ``models`` or ``solvers`` package.
"""

from importlib import import_module

_PUBLIC = {
    "Envelope": "certify.envelope",
    "read_envelope": "certify.envelope:read",
    "write_envelope": "certify.envelope:write",
    "check_envelope": "certify.envelope:check",
    "Recipe": "certify.recipe",
    "load_recipe": "certify.recipe:load",
    "Table": "certify.tables",
    "read_table": "certify.tables",
    "run": "certify.driver",
    "train": "certify.driver",
    "parse_radii": "certify.driver",
    "guided_attack": "certify.attack",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'certify' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__():
    return sorted(__all__)
