"""Pictures of an envelope: width against step and radius, and the certificate staircase.

Every picture shows quantities computed from the records: it is private data and says so in its footer.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np

from certify.envelope import Envelope, write_atomically
from certify.errors import CertdpError

_FOOTER = "private: computed from the records"


def _figure(columns: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(6.2 * columns, 4.3), layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes[0]


def _save(figure, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.suptitle(_FOOTER, x=0.995, ha="right", fontsize=8, color="firebrick")
    try:
        return save(figure, path)
    finally:
        plt.close(figure)


def save(figure, path: Path) -> Path:
    """Write a figure whole or not at all, readable by its owner alone; the suffix of ``path`` chooses the format.

    Raises CertdpError for an unknown suffix and for a path that cannot be written.
    """
    picture = BytesIO()
    try:
        figure.savefig(picture, format=path.suffix.removeprefix(".") or "png", dpi=130)
        write_atomically(path, picture.getvalue())
    except ValueError as error:
        raise CertdpError(f"{path}: {error}; choose another suffix") from error
    except OSError as error:
        raise CertdpError(
            f"{path}: the picture cannot be written ({error.strerror or error}); give a path in an existing folder"
        ) from error
    return path


def plot_widths(envelope: Envelope, path: str | Path) -> Path:
    """Mean width of the box against the step for some radii, and against the radius at the end."""
    radii = np.array(envelope.radii)
    lower, upper = envelope.stacked()
    final = (upper - lower).mean(axis=1)
    wide = np.flatnonzero(radii > 0)
    figure, axes = _figure(2 if envelope.history is not None else 1)
    right = axes[-1]
    if envelope.history is not None and len(wide):
        chosen = wide[np.unique(np.linspace(0, len(wide) - 1, min(6, len(wide))).astype(int))]
        import matplotlib

        colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.85, len(chosen)))
        for j, colour in zip(chosen, colours, strict=True):
            axes[0].plot(envelope.history[:, j], color=colour, label=f"k = {radii[j]}")
        axes[0].set_xlabel("training step")
        axes[0].set_ylabel("mean width of the parameter box")
        axes[0].set_title("how the envelope grows while training")
        axes[0].legend(frameon=False, title="radius (records replaced)", ncols=2)
    right.plot(radii, final, "o-", color="tab:blue", markersize=4)
    if len(wide):
        first = radii[wide[0]]
        right.plot(radii, final[wide[0]] * radii / first, "--", color="grey", label="proportional to the radius")
        right.legend(frameon=False)
    right.set_xlabel("radius k (records replaced)")
    right.set_ylabel("mean width of the parameter box")
    right.set_title(f"after {envelope.metadata.steps} steps ({envelope.metadata.adjacency})")
    right.set_ylim(bottom=0.0)
    return _save(figure, Path(path))


def plot_staircase(
    cross: np.ndarray, ceiling: float | None, beta: float, smooth: float, path: str | Path, what: str
) -> Path:
    """The certificate staircase: cross ranges ``A_k`` (``(K,)``), their discount and the smooth bound they give.

    ``what`` names the query.  ``ceiling`` is the public bound, or None where there is none to draw.
    """
    figure, (axis,) = _figure(1)
    capped = cross if ceiling is None else np.minimum(cross, ceiling)
    discounted = np.exp(-beta * np.arange(len(cross))) * capped
    # Distances whose discounted range is a small part of the largest decide nothing and would dwarf the rest.
    shown = int(np.flatnonzero(discounted >= 0.1 * discounted.max())[-1]) + 2
    cross, discounted = cross[:shown], discounted[:shown]
    k = np.arange(len(cross))
    label = rf"discounted, $e^{{-\beta k}}A_k$ with $\beta$ = {beta:.3g}"
    axis.bar(k, discounted, width=0.8, color="tab:orange", alpha=0.8, label=label)
    edges = np.append(k, len(k)) - 0.5
    axis.stairs(cross, edges, baseline=None, color="tab:blue", linewidth=1.8, label="cross range $A_k$")
    axis.axhline(smooth, color="firebrick", linewidth=1.4, label=f"smooth bound $S$ = {smooth:.4g}")
    if ceiling is not None and ceiling < 2 * max(cross.max(), smooth):
        axis.axhline(ceiling, color="black", linestyle=":", label=f"public bound $G$ = {ceiling:.4g}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("distance k from the data set (records)")
    axis.set_ylabel("how far one more record can move the output")
    axis.set_title(f"certificate staircase: {what}")
    axis.legend(frameon=False)
    axis.set_ylim(bottom=0.0)
    return _save(figure, Path(path))


def plot_comparison(result: dict, path: str | Path) -> Path:
    """Width at each radius with the attack as the floor, and smooth sensitivity against time, from `certdp compare`."""
    import matplotlib

    figure, (left, right) = _figure(2)
    done = [row for row in result["cells"] if "widths" in row]
    backends = list(dict.fromkeys(row["backend"] for row in done))
    radii = result["radii"]
    markers = dict(zip(backends, "osD^vP*X", strict=False))
    for i, backend in enumerate(backends):
        mine = [row for row in done if row["backend"] == backend]
        shades = np.linspace(0.35, 1.0, len(mine)) if len(mine) > 1 else [1.0]
        for row, shade in zip(mine, shades, strict=True):
            label = backend if row["F"] is None else f"{backend}, F = {row['F']}"
            left.plot(
                radii[1:], row["widths"][1:], color=f"C{i}", alpha=shade, marker=markers.get(backend, "o"),
                markersize=8 - i, fillstyle="none", label=label,
            )  # fmt: skip
        time = [max(row["seconds"], 1e-3) for row in mine]
        right.plot(
            time, [row["smooth_sensitivity"] for row in mine], color=f"C{i}", marker=markers.get(backend, "o"),
            linestyle=":", label=backend,
        )  # fmt: skip
        for x, row in zip(time, mine, strict=True):
            name = "" if row["F"] is None else f" {row['F']}"
            right.annotate(name, (x, row["smooth_sensitivity"]), fontsize=8, color=f"C{i}")
    if result["attack"]:
        left.plot(radii[1:], result["attack"]["widths"][1:], "k--", label="reached by an attack")
        floor = "floor of boxes (attack);\ncertificates may lie below"
        right.axhline(result["attack"]["smooth_sensitivity"], color="k", linestyle="--", label=floor)
    for axis in (left, right):
        axis.set_yscale("log")
        axis.legend(fontsize=7, ncols=2, framealpha=0.85, edgecolor="none")
    left.set_xlabel("radius k (records that differ)")
    left.set_ylabel("mean width of the parameter box")
    left.set_title("width")
    left.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    right.set_xscale("log")
    right.set_xlabel("time (seconds; numbers beside points: F)")
    right.set_ylabel(f"smooth sensitivity of all parameters (l1, β = {result['beta']:g})")
    right.set_title("what the time buys")
    return _save(figure, Path(path))
