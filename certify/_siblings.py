"""Makes sure that ``models`` and ``solvers`` are ours: training code often has modules of these names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from certify.errors import ShadowedPackageError

_HOME = Path(__file__).resolve().parent.parent


def require(*names: str) -> None:
    """Import the sibling packages ``names``; raises ShadowedPackageError naming the file that hides one."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ShadowedPackageError(f"package '{name}' of certdp is not installed; install certdp again") from error
        origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ["nothing"])))
        if Path(origin).resolve().parent not in (_HOME / name, _HOME):
            raise ShadowedPackageError(
                f"'{origin}' hides the package '{name}' of certdp; rename that file, or import certdp's packages "
                f"from a process whose sys.path (now starting with {sys.path[0]!r}) does not lead to it first"
            )
