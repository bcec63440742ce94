"""The command ``certdp``: one file per subcommand, thin; nothing imports it."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: errors a user can provoke become one sentence on stderr and exit code 2."""
    try:
        from certify.cli.app import app, known_errors
    except ImportError as error:
        from certify.errors import ShadowedPackageError

        if isinstance(error, ShadowedPackageError):
            _fail(str(error))
        raise
    try:
        app()
    except known_errors() as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("certdp: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:  # a full disk, a folder that is gone, no permission
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; make room, or give a path that can be read and written")


def _fail(sentence: str) -> None:
    print(f"certdp: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)
