"""``certdp solvers``: placeholder while being written."""


def command() -> None:
    """Backends and solvers."""
