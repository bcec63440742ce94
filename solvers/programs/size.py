"""How large a window's programs get, and whether that is hopeless; from public facts alone."""

from __future__ import annotations

from dataclasses import dataclass

from models.losses import Logistic
from solvers.errors import ProgramSizeError
from solvers.programs.relu import Network, model_of
from solvers.window import Window

#: Vertices of a record whose gradient is not constant: what is typical, not the most there can be.
_VERTICES, _CURVED_VERTICES = 4, 24
#: Seconds of HiGHS on one core by rows and entries (simplex) or entries alone (interior point): docs/programs.md.
_SIMPLEX_SECONDS, _INTERIOR_SECONDS = 1e-8, 6e-5
#: Hopeless: more than this for the boxes of one radius after one step.
_MOST_SECONDS = 1800.0


@dataclass(frozen=True)
class Size:
    """Of the program of one radius and step: ``rows``, ``columns``, ``objectives``, and ``seconds`` an objective takes.

    As if no record's gradient were constant over its box; orders of magnitude.
    """

    rows: int
    columns: int
    objectives: int
    seconds: float

    @property
    def total(self) -> float:
        """Seconds for the boxes of one radius after one step."""
        return self.objectives * self.seconds


def estimate_size(window: Window, integer: bool = False) -> Size:
    """The size of the program of the whole window; raises UnsupportedWindowError for a model without a formulation."""
    model = model_of(window)
    size = model.plan.size
    vertices = _CURVED_VERTICES if isinstance(window.loss, Logistic) else _VERTICES
    if isinstance(model, Network):
        rows, columns, entries, margins = *_network_record(model, vertices), 0
    else:
        rows, columns, entries = 3, vertices + 1, vertices * (size + 3) + 3 * size
        margins = 2 * len(window.steps[-1].batch) if len(window.steps) > 1 else 0
    steps, records = len(window.steps), sum(len(s.batch) for s in window.steps)
    rows, columns = steps * (2 * size + 1) + records * rows, steps * (2 * size + 1) + records * columns
    entries *= records
    seconds = min(_SIMPLEX_SECONDS * rows, _INTERIOR_SECONDS) * entries
    if integer:
        seconds *= 10.0 * 2.0 ** min(steps, 60)
    return Size(rows, columns, 2 * size + margins, seconds)


def _network_record(model: Network, loss_vertices: int) -> tuple[int, int, int]:
    """Rows, columns and entries of one record's passes through a network in one step."""
    first, *behind = model.layers
    units = sum(layer.cols for layer in behind)  # hidden ones
    products = 3 * sum(layer.rows * layer.cols for layer in behind)  # forward, backward, gradients
    biases = sum(len(layer.biases) for layer in behind)
    arguments = first.rows + products // 3 + biases
    rows = 4 * products + 7 * units + 3 * arguments + 3
    columns = products + 3 * units + _VERTICES * arguments + loss_vertices + 1
    entries = 12 * products + 2 * first.weights.size + 16 * units + _VERTICES * (4 * arguments + first.weights.size)
    return rows, columns, entries


def check_size(window: Window, integer: bool, force: bool) -> None:
    """Raises ProgramSizeError for a window whose programs are hopeless, unless forced."""
    size = estimate_size(window, integer)
    if size.total > _MOST_SECONDS and not force:
        raise ProgramSizeError(
            f"F: a window of {len(window.steps)} steps is a program with about {size.rows} rows and {size.columns} "
            f"columns; {size.objectives} objectives of about {size.seconds:.0f} s make {size.total / 3600.0:.1f} hours "
            "for each step and radius; choose a smaller F or another backend (ibp, meanvalue, relational), or force it"
        )
