"""What the subcommands share: consoles, the progress bar, reading inputs, the notice on private files."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

PRIVATE = "[bold red]PRIVATE[/] computed from the records; keep it where the records are"


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[..., None]]:
    """Progress on stderr with the time left: a bar in a terminal, a line every ten seconds elsewhere.

    Yields a function of (steps done, steps in all, note).
    """
    if not err.is_terminal:
        yield _Lines(description)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(description, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield update


class _Lines:
    """Progress as lines, for logs."""

    def __init__(self, description: str):
        self.description = description
        self.first: tuple[float, int] | None = None
        self.said = -math.inf

    def __call__(self, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if self.first is None or done < self.first[1]:
            self.first = (now, done)
        start, first = self.first
        if now - self.said > 10.0:
            self.said = now
            left = f", about {seconds((now - start) / (done - first) * (total - done))} left" if done > first else ""
            err.print(f"{self.description}: {done} of {total} steps{left}", soft_wrap=True)


def seconds(value: float) -> str:
    """A duration for people."""
    minutes, rest = divmod(int(round(value)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{value:.1f} s"
