"""``certdp inspect``: an envelope as tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table as RichTable

from certify.cli.certify import statements, widths_table
from certify.cli.console import PRIVATE, out, seconds
from certify.envelope import SUFFIX, Envelope, read
from certify.errors import CertdpError


def command(
    path: Annotated[Path, typer.Argument(help="Envelope file (private).")],
    plots: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; default beside the envelope.")
    ] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Tables only.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="ONNX file, to show certificates of predictions; needs --data.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Public inputs to show certificates for.")] = None,
    beta: Annotated[float, typer.Option(help="Smoothing for the certificate staircase.")] = 0.5,
) -> None:
    """Show what an envelope certifies, how wide it is, and what a release from it would cost in noise."""
    envelope = read(path)
    if (model is None) != (data is None):
        raise CertdpError("inspect: certificates of predictions need both --model and --data")
    grid = RichTable.grid(padding=(0, 2))
    for key, value in [
        *statements(envelope),
        ("made by", ", ".join(f"{k} {v}" for k, v in envelope.metadata.versions.items()) or "unknown"),
        ("time", seconds(envelope.metadata.wall_time_s) if envelope.metadata.wall_time_s is not None else "unknown"),
        ("file", f"{path}  {PRIVATE}"),
    ]:
        grid.add_row(f"[bold]{key}[/]", value)
    out.print(grid, "", widths_table(envelope, 16), "", _by_parameter(envelope))
    what, cross, ceiling = _certificate(envelope, model, data)
    if cross is not None:
        _show_certificate(cross, ceiling, beta, what)
    if not no_plots:
        from certify.plots import plot_staircase, plot_widths

        folder = plots or path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CertdpError(f"plots: {folder} is not a folder; give one for the pictures") from error
        stem = path.name.removesuffix(SUFFIX)
        made = [plot_widths(envelope, folder / f"{stem}.widths.png")]
        if cross is not None:
            middle, bound = _middle(cross, ceiling, beta)
            top = None if ceiling is None else float(ceiling[middle])
            picture = folder / f"{stem}.staircase.png"
            made.append(plot_staircase(cross[:, middle], top, beta, float(bound[middle]), picture, what))
        for picture in made:
            out.print(f"picture  {picture}  {PRIVATE}")


def _by_parameter(envelope: Envelope) -> RichTable:
    radii = envelope.radii
    chosen = sorted({radii[min(1, len(radii) - 1)], radii[len(radii) // 2], radii[-1]})
    table = RichTable(title="mean width by parameter", title_justify="left")
    table.add_column("parameter")
    table.add_column("shape")
    table.add_column("largest |value|", justify="right")
    for k in chosen:
        table.add_column(f"k = {k}", justify="right")
    widths = {k: envelope.width(k) for k in chosen}
    for name, shape in envelope.parameters:
        largest = f"{np.abs(envelope.nominal[name]).max():.4g}"
        table.add_row(name, "x".join(map(str, shape)), largest, *(f"{widths[k][name].mean():.4g}" for k in chosen))
    return table


def _certificate(envelope: Envelope, model: Path | None, data: Path | None):
    """(what, sensitivities (K, Q), public ceiling (Q,) or None), or None where the radii are not contiguous."""
    if list(envelope.radii) != list(range(len(envelope.radii))) or len(envelope.radii) < 2:
        out.print("certificates are shown for contiguous radii from 0 only")
        return "", None, None
    if model is None:
        sums = sensitivities(*envelope.stacked(), envelope.stacked_difference()).sum(axis=2).max(axis=1)
        return "all parameters (sum of coordinates)", sums[:, None], None
    from certify.tables import read_table
    from models import read as read_model
    from privacy.query import Query

    query = Query.make(envelope, read_model(model))
    rows = query.prepare(read_table(data, None, query.feature_names).features)
    lower, upper = (np.clip(side, *query.output_range) for side in query.bounds(rows))
    apart = query.differences(rows)
    cross = sensitivities(lower[..., 0], upper[..., 0], None if apart is None else apart[..., 0]).max(axis=1)
    return "prediction with the median bound", cross * query.unit, query.ceiling(rows)[:, 0] * query.unit


def sensitivities(lower: np.ndarray, upper: np.ndarray, difference: np.ndarray | None) -> np.ndarray:
    """Cross ranges ``(K, C, Q)`` of bounds ``(K + 1, Q)``, or what a certificate ``(K + 1, C, Q)`` has lower."""
    from privacy.smooth import cross_ranges

    cross = cross_ranges(lower, upper)[:, None]
    return cross if difference is None else np.minimum(cross, difference[1:])


def _bounds(cross: np.ndarray, ceiling: np.ndarray | None, beta: float) -> np.ndarray:
    from privacy.smooth import smooth_bound

    unlimited = np.full(cross.shape[1], cross[-1].max() * np.exp(beta * len(cross)))
    return smooth_bound(cross, unlimited if ceiling is None else ceiling, beta)


def _middle(cross, ceiling, beta) -> tuple[int, np.ndarray]:
    bound = _bounds(cross, ceiling, beta)
    return int(np.argsort(bound)[len(bound) // 2]), bound


def _show_certificate(cross: np.ndarray, ceiling: np.ndarray | None, beta: float, what: str) -> None:
    middle, bound = _middle(cross, ceiling, beta)
    attained = int(np.argmax(np.exp(-beta * np.arange(len(cross))) * cross[:, middle]))
    limit = "" if ceiling is None else f", public bound {ceiling[middle]:.4g}"
    out.print(
        f"[bold]certificate[/] of {what}: one record moves it by at most {cross[0, middle]:.4g}{limit}; "
        f"smooth bound at beta = {beta:g}: {bound[middle]:.4g} (from k = {attained})"
    )
