"""A picture of a graph.

Records flow from top to bottom; parameters and constants stand to the right of the node that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from models.errors import ModelError
from models.ir import Graph, Node
from models.ops import Affine, Constant, Input, Parameter

_COLOURS = {
    "input": ("#dbeafe", "#1d4ed8"),
    "affine": ("#e0e7ff", "#3730a3"),
    "operator": ("#f3f4f6", "#4b5563"),
    "output": ("#dcfce7", "#15803d"),
    "trained": ("#ffedd5", "#c2410c"),
    "frozen": ("#fefce8", "#a16207"),
    "constant": ("#ffffff", "#9ca3af"),
}
_LEGEND = {
    "input": "features of a record",
    "affine": "affine layer",
    "operator": "other operator",
    "output": "output",
    "trained": "trained parameter",
    "frozen": "frozen parameter",
    "constant": "public constant",
}
_WIDTH, _HEIGHT, _COLUMN, _ROW = 2.5, 0.62, 2.85, 1.0
_LEGEND_STEP = 1.75
#: Pictures of longer graphs are not readable.
LARGEST = 400


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    kind: str
    title: str
    label: str


def draw(graph: Graph, path: str | Path) -> Path:
    """Writes a picture; the suffix of ``path`` chooses the format (png, svg, pdf).

    Raises ModelError for a graph with more than 400 nodes, an unknown suffix, and a path that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    path = Path(path)
    if len(graph.needed) > LARGEST:
        raise ModelError(f"a graph of {len(graph.needed)} nodes is too large to draw; {LARGEST} is the most")
    boxes = _layout(graph)
    left = min(b.x for b in boxes.values()) - _WIDTH / 2 - 0.3
    right = max(max(b.x for b in boxes.values()) + _WIDTH / 2 + 0.3, left + 6.6)
    bottom = min(b.y for b in boxes.values()) - _HEIGHT / 2 - 0.3
    kinds = [k for k in _LEGEND if k in {b.kind for b in boxes.values()}]
    columns = int((right - left - 0.6) // _LEGEND_STEP)
    top = max(b.y for b in boxes.values()) + _HEIGHT / 2 + 0.5 + 0.24 * -(-len(kinds) // columns)
    figure = Figure(figsize=(right - left, top - bottom))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.axis("off")
    for position, box in boxes.items():
        face, edge = _COLOURS[box.kind]
        corner = (box.x - _WIDTH / 2, box.y - _HEIGHT / 2)
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "linewidth": 2.0 if box.kind == "trained" else 1.2}
        axes.add_patch(FancyBboxPatch(corner, _WIDTH, _HEIGHT, facecolor=face, edgecolor=edge, zorder=2, **style))
        axes.text(box.x, box.y + 0.13, box.title, ha="center", va="center", fontsize=9, weight="bold", zorder=3)
        axes.text(box.x, box.y - 0.14, box.label, ha="center", va="center", fontsize=7, color="#374151", zorder=3)
        for source in graph.nodes[position].inputs:
            _arrow(axes, boxes[source], box, graph.per_record[source])
    _legend(axes, kinds, left + 0.3, top - 0.25, columns)
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise ModelError(f"cannot write {path}: {error}") from error
    return path


def _layout(graph: Graph) -> dict[int, _Box]:
    """Boxes by node position.

    A per-record node's row is below all its per-record operands; shared operands stand to the right of the first
    reader, one row of the picture each when there are several.
    """
    needed = sorted(graph.needed)
    reads = graph.networkx().subgraph(needed)
    main = [i for i in needed if graph.per_record[i]]
    depth: dict[int, int] = {}
    for i in nx.topological_sort(reads):
        before = [depth[j] for j in reads.predecessors(i) if j in depth]
        if graph.per_record[i]:
            depth[i] = 1 + max(before, default=-1)
    owner = {}
    for i in reversed(list(nx.topological_sort(reads))):
        if not graph.per_record[i]:
            readers = [owner.get(j, j) for j in reads.successors(i)]
            owner[i] = min(readers, key=lambda j: (depth[j], j))
    lanes = _lanes(graph, main, depth)
    # Shared nodes of one reader: chains go outward, different chains stack downward.
    offset: dict[int, tuple[int, int]] = {}
    height: dict[int, int] = {}
    for reader in main:
        row = height.get(depth[reader], 0)
        for source in dict.fromkeys(graph.nodes[reader].inputs):
            row = _place_shared(graph, source, reader, owner, 0, row, offset)
        height[depth[reader]] = row
    tops, y = {}, 0.0
    for level in range(max(depth.values()) + 1):
        tops[level] = y
        y -= _ROW * 0.78 * max(1, height.get(level, 1)) + (_ROW - 0.78)
    widest = max(lanes.values()) + 1
    boxes = {}
    for i in main:
        boxes[i] = _box(graph, i, lanes[i] * _COLUMN, tops[depth[i]])
    for i, (out, row) in offset.items():
        x = (widest + out + 0.25) * _COLUMN
        boxes[i] = _box(graph, i, x, tops[depth[owner[i]]] - row * _ROW * 0.78)
    return boxes


def _place_shared(graph, node, reader, owner, out, row, offset) -> int:
    """Puts a shared operand and what it is computed from; returns the next free row."""
    if graph.per_record[node] or owner.get(node) != reader or node in offset:
        return row
    offset[node] = (out, row)
    used = row
    for source in dict.fromkeys(graph.nodes[node].inputs):
        used = _place_shared(graph, source, reader, owner, out + 1, used, offset)
    return max(used, row + 1)


def _lanes(graph: Graph, main: list[int], depth: dict[int, int]) -> dict[int, int]:
    """Columns of the per-record nodes: stay in the column of the first operand where it is free.

    A value that skips rows keeps its column for itself, so that long arrows do not run through boxes.
    """
    lanes: dict[int, int] = {}
    last_read = {i: depth[i] for i in main}
    for i in main:
        for j in graph.nodes[i].inputs:
            if j in last_read:
                last_read[j] = max(last_read[j], depth[i])
    for i in sorted(main, key=lambda k: (depth[k], k)):
        operands = [j for j in graph.nodes[i].inputs if j in lanes]
        taken = {lanes[j] for j in lanes if depth[j] == depth[i] or depth[j] < depth[i] < last_read[j]}
        choices = [lanes[j] for j in operands] + list(range(len(main) + 1))
        lanes[i] = next(c for c in choices if c not in taken)
    return lanes


def _box(graph: Graph, position: int, x: float, y: float) -> _Box:
    node = graph.nodes[position]
    shape = "×".join(map(str, node.shape)) or "1"
    if position == graph.output:
        kind = "output"
    elif isinstance(node.op, Input):
        kind = "input"
    elif isinstance(node.op, Parameter):
        trained = {p.name for p in graph.trainable}
        kind = "trained" if node.op.name in trained else "frozen"
    elif isinstance(node.op, Constant):
        kind = "constant"
    else:
        kind = "affine" if isinstance(node.op, Affine) else "operator"
    return _Box(x, y, kind, f"{_title(node)}  {shape}", _short(node.name))


def _title(node: Node) -> str:
    return {"SegmentSum": "Sum"}.get(node.op.title, node.op.title)


def _short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _arrow(axes, source: _Box, target: _Box, record: bool) -> None:
    """An arrow with a corner where a straight one would run through boxes."""
    colour = "#1f2937" if record else "#d97706" if source.kind == "trained" else "#9ca3af"
    width = 1.5 if record else 1.0
    if record:
        side = 0.3 * _WIDTH * ((source.x > target.x) - (source.x < target.x))
        start, end = (source.x, source.y - _HEIGHT / 2), (target.x + side, target.y + _HEIGHT / 2)
        corners = [(source.x, end[1] + 0.3)] if side and start[1] - end[1] > 0.5 else []
    else:
        drop = max(-0.22, min(0.22, (source.y - target.y) * 0.12))
        start, end = (source.x - _WIDTH / 2, source.y), (target.x + _WIDTH / 2, target.y + drop)
        gutter = start[0] - 0.15
        corners = [(gutter, start[1]), (gutter, end[1])] if abs(source.y - target.y) > 4 * _ROW else []
    points = [start, *corners, end]
    axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=width, zorder=1)
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=points[-2], arrowprops=style, zorder=1)


def _legend(axes, kinds: list[str], x: float, y: float, columns: int) -> None:
    from matplotlib.patches import Rectangle

    for i, kind in enumerate(kinds):
        left, line = x + (i % columns) * _LEGEND_STEP, y - (i // columns) * 0.24
        face, edge = _COLOURS[kind]
        axes.add_patch(Rectangle((left, line - 0.07), 0.2, 0.14, facecolor=face, edgecolor=edge, linewidth=1.2))
        axes.text(left + 0.27, line, _LEGEND[kind], va="center", fontsize=7)
