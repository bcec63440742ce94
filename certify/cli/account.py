"""``certdp account``: what BandMF training costs, and the noise it needs.  Public arithmetic; reads no data."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from certify.cli.console import err, out, progress_bar, seconds
from certify.errors import CertdpError, PrivacyError

app = typer.Typer(no_args_is_help=True)


class Sampler(StrEnum):
    """Names of the sampling schemes."""

    B_MIN_SEP = "b-min-sep"
    POISSON = "poisson"
    CYCLIC = "cyclic"
    BALLS_IN_BINS = "balls-in-bins"
    MULTI_ATTRIBUTION = "multi-attribution"


class Workers(StrEnum):
    """Where the samples are drawn."""

    THREADS = "threads"
    PROCESSES = "processes"
    DASK = "dask"


@app.command("bandmf")
def bandmf(
    steps: Annotated[int, typer.Option(help="Training steps.")],
    examples: Annotated[int | None, typer.Option(help="Size of the data set (public).")] = None,
    batch: Annotated[float | None, typer.Option(help="Expected batch size; the probability follows from it.")] = None,
    sampler: Annotated[Sampler, typer.Option(help="Sampling scheme.")] = Sampler.B_MIN_SEP,
    bands: Annotated[int | None, typer.Option(help="Bands of the strategy; default: the separation.")] = None,
    separation: Annotated[
        int | None, typer.Option(help="Least distance of two uses of an example, or number of groups; default: bands.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="b-min-sep without the stationary start.")] = False,
    truncate: Annotated[int | None, typer.Option(help="Cut larger batches to this size.")] = None,
    probability: Annotated[float | None, typer.Option(help="Multi-attribution: joining probability.")] = None,
    per_user: Annotated[int | None, typer.Option(help="Multi-attribution: most examples of a user.")] = None,
    column_normalised: Annotated[
        bool, typer.Option("--column-normalised", help="Divide the columns of the strategy by their norms.")
    ] = False,
    noise_multiplier: Annotated[float | None, typer.Option(help="Standard deviation of Z for clip norm 1.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="With a noise multiplier: find delta.")] = None,
    delta: Annotated[float | None, typer.Option(help="With a noise multiplier: find epsilon; else the noise.")] = None,
    failure_probability: Annotated[float, typer.Option(help="Of a sampled interval; 0: a certain bound.")] = 1e-6,
    precision: Annotated[float, typer.Option(help="Relative half-width of delta that sampling aims at.")] = 0.1,
    workers: Annotated[int | None, typer.Option(help="How many; default: all cores.")] = None,
    executor: Annotated[Workers, typer.Option(help="Where samples are drawn.")] = Workers.THREADS,
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder that keeps finished work; go on there.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Noise for epsilon and delta under all samplers.")] = False,
    plot: Annotated[Path | None, typer.Option(help="With --compare: write a picture.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Account BandMF: delta or epsilon of a noise multiplier, or the noise multiplier for (epsilon, delta)."""
    from privacy.bandmf import account

    if sampler is Sampler.POISSON and not compare:
        bands, separation = 1 if bands is None else bands, 1
    width = separation if bands is None else bands
    if width is None:
        raise PrivacyError("bands: found neither --bands nor --separation; give one of them")
    separation = width if separation is None else separation
    training = {"steps": steps, "examples": examples, "batch": batch, "truncate": truncate}
    user = {"probability": probability, "per_user": per_user}
    with ExitStack() as stack:
        options = {
            "failure_probability": failure_probability,
            "precision": precision,
            "executor": _executor(executor, workers, scheduler, stack),
            "results": resume,
        }
        if compare:
            _check_compare(noise_multiplier, epsilon, delta, resume, plot)
            rows = _compare(training, separation, width, cold, user, column_normalised, epsilon, delta, options)
            _show_comparison(rows, epsilon, delta, plot, json_output)
            return
        if plot is not None:
            raise CertdpError("plot: is a picture of a comparison; add --compare, or leave --plot out")
        scheme = _scheme(sampler, training, separation, cold, user)
        strategy = _strategy(steps, width, column_normalised)
        bar = stack.enter_context(progress_bar("sampling"))
        options["progress"] = bar
        given = noise_multiplier is not None, epsilon is not None, delta is not None
        try:
            if given == (True, True, False):
                found = account.delta(scheme, strategy, noise_multiplier, epsilon, **options)
            elif given == (True, False, True):
                found = account.epsilon(scheme, strategy, noise_multiplier, delta, **options)
            elif given == (False, True, True):
                found = account.calibrate(scheme, strategy, epsilon, delta, **options)
            else:
                raise PrivacyError(
                    "noise_multiplier, epsilon, delta: give exactly two of the three; the third one is computed"
                )
        except KeyboardInterrupt:
            left = f"{resume} keeps what is done, the same command goes on" if resume else "--resume FOLDER keeps work"
            err.print(f"certdp: interrupted; {left}", soft_wrap=True)
            raise typer.Exit(130) from None
    if json_output:
        facts = {"sampler": sampler, "scheme": asdict(scheme), "bands": width}
        typer.echo(json.dumps({**facts, **asdict(found)}, indent=2))
        return
    _show(found, scheme, strategy, noise_multiplier)


def _executor(kind: Workers, workers: int | None, scheduler: str | None, stack: ExitStack):
    """An executor, or what makes one; None for threads on all cores."""
    if (kind is Workers.DASK) != (scheduler is not None):
        raise CertdpError("scheduler: is the address of a Dask scheduler; give it together with --executor dask")
    if kind is Workers.DASK:
        try:
            from distributed import Client
        except ImportError as missing:
            raise CertdpError("executor: dask needs the package distributed; pip install distributed") from missing
        try:
            return stack.enter_context(Client(scheduler)).get_executor()
        except (OSError, ValueError) as error:
            raise CertdpError(f"scheduler: {scheduler} cannot be reached ({error}); start it, or check it") from None
    if workers is not None and workers < 1:
        raise CertdpError(f"workers: found {workers}; give at least 1")
    if kind is Workers.PROCESSES:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        from privacy.bandmf.execute import KeptPool

        kept = KeptPool(partial(ProcessPoolExecutor, workers, get_context("spawn")))
        stack.callback(kept.close)
        return kept
    if workers is None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    return partial(ThreadPoolExecutor, workers)


def _scheme(sampler: Sampler, training: dict, separation: int, cold: bool, user: dict):
    from privacy.bandmf import schemes

    steps, truncate = training["steps"], training["truncate"]
    if sampler is Sampler.MULTI_ATTRIBUTION:
        if None in user.values() or truncate is not None:
            raise PrivacyError(
                "probability, per_user: multi-attribution needs both (the probability depends on who owns what, see "
                "privacy.bandmf.users), and takes no --truncate"
            )
        return schemes.MultiAttribution(steps, user["probability"], separation, user["per_user"])
    if any(value is not None for value in user.values()):
        raise PrivacyError(f"probability, per_user: are for multi-attribution; {sampler} derives it from --batch")
    examples, batch = training["examples"], training["batch"]
    if examples is None or (batch is None and sampler is not Sampler.BALLS_IN_BINS):
        raise PrivacyError(f"examples, batch: {sampler} needs the size of the data set and the expected batch size")
    if sampler is Sampler.BALLS_IN_BINS:
        if truncate is not None or (batch is not None and not math.isclose(batch, examples / separation)):
            raise PrivacyError(
                f"batch: balls-in-bins with {separation} bins of {examples} examples has batches of "
                f"{examples / separation:g} and no --truncate; leave --batch out or change --separation"
            )
        return schemes.BallsInBins(steps, examples, separation)
    if sampler is Sampler.POISSON:
        return schemes.Poisson(steps, examples, batch, truncate)
    if sampler is Sampler.CYCLIC:
        return schemes.CyclicPoisson(steps, examples, batch, separation, truncate)
    return schemes.BMinSep(steps, examples, batch, separation, not cold, truncate)


def _strategy(steps: int, bands: int, column_normalised: bool):
    from privacy.bandmf.optimize import optimal_toeplitz

    strategy = optimal_toeplitz(steps, bands)
    return strategy.column_normalised() if column_normalised else strategy


def _total_error(strategy, noise_multiplier: float) -> float:
    """Root of the summed variances of the noise in all prefix sums, for clip norm 1."""
    return noise_multiplier * math.sqrt(float(strategy.squared_errors().sum()))


def _show(found, scheme, strategy, noise_multiplier: float | None) -> None:
    from privacy.bandmf.account import Calibration

    if isinstance(found, Calibration):
        method = found.bound.method + (", none passed: noise without amplification" if found.fell_back else "")
        out.print(
            f"[bold]noise multiplier[/]  {found.noise_multiplier:.5g} gives epsilon = {found.epsilon:g}, "
            f"delta = {found.delta:g} in all\n"
            f"[bold]total error[/]       {_total_error(strategy, found.noise_multiplier):.5g} (clip norm 1)\n"
            f"[bold]method[/]            {method}; {found.bound.samples} samples in the last of {found.tests} tests, "
            f"{seconds(found.seconds)}",
            soft_wrap=True,
        )
        if found.failure_probability:
            out.print(
                f"delta includes {found.failure_probability:.1g} for a test that passed by chance.", soft_wrap=True
            )
    else:
        name = "delta" if hasattr(found, "epsilon") else "epsilon"
        except_for = f" except with probability {found.failure_probability:.1g}" if found.failure_probability else ""
        out.print(
            f"[bold]{name}[/]        in [{found.lower:.5g}, {found.upper:.5g}]{except_for}\n"
            f"[bold]estimate[/]     {found.estimate:.5g} (no guarantee)\n"
            f"[bold]total error[/]  {_total_error(strategy, noise_multiplier):.5g} (clip norm 1)\n"
            f"[bold]method[/]       {found.method}, {found.samples} samples, {seconds(found.seconds)}",
            soft_wrap=True,
        )
    unit = "all examples of one user" if hasattr(scheme, "per_user") else "one example"
    out.print(f"Neighbours: {unit} with gradients set to zero (zero-out); both directions.", soft_wrap=True)


# --- comparison ---


def _check_compare(noise_multiplier, epsilon, delta, resume, plot: Path | None) -> None:
    if noise_multiplier is not None or epsilon is None or delta is None:
        raise PrivacyError("compare: computes noise multipliers; give --epsilon and --delta, no --noise-multiplier")
    if resume is not None:
        raise CertdpError("resume: keeps one computation; leave it out with --compare")
    if plot is not None and not plot.parent.is_dir():
        raise CertdpError(f"{plot}: the folder {plot.parent} does not exist; create it or give another path")


def _compare(training, separation, bands, cold, user, column_normalised, epsilon, delta, options) -> list[dict]:
    """One row per sampler that can train with this batch size."""
    from privacy.bandmf import account

    rows = []
    for sampler in Sampler:
        if sampler is Sampler.MULTI_ATTRIBUTION and None in user.values():
            continue
        facts, groups, width = training, separation, bands
        if sampler is Sampler.POISSON:
            groups = width = 1
        if sampler is Sampler.BALLS_IN_BINS and training["examples"] and training["batch"]:
            groups = round(training["examples"] / training["batch"])
            facts = {**training, "truncate": None}
        if sampler is Sampler.MULTI_ATTRIBUTION:
            facts = {**training, "truncate": None}
        row = {"sampler": str(sampler), "bands": width, "separation": groups}
        try:
            mine = user if sampler is Sampler.MULTI_ATTRIBUTION else dict.fromkeys(user)
            scheme = _scheme(sampler, facts, groups, cold, mine)
            strategy = _strategy(training["steps"], width, column_normalised)
            with progress_bar(str(sampler)) as bar:
                found = account.calibrate(scheme, strategy, epsilon, delta, progress=bar, **options)
        except PrivacyError as error:
            rows.append({**row, "refused": str(error)})
            continue
        facts = {"noise_multiplier": found.noise_multiplier, "method": found.bound.method, "seconds": found.seconds}
        rows.append({**row, **facts, "total_error": _total_error(strategy, found.noise_multiplier)})
    return rows


def _show_comparison(rows: list[dict], epsilon: float, delta: float, plot: Path | None, json_output: bool) -> None:
    done = [row for row in rows if "refused" not in row]
    if plot is not None:
        _draw(done, epsilon, delta, plot)
    if json_output:
        typer.echo(json.dumps({"epsilon": epsilon, "delta": delta, "samplers": rows}, indent=2))
        return
    title = f"noise for epsilon = {epsilon:g}, delta = {delta:g}"
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for name in ("sampler", "method"):
        table.add_column(name, no_wrap=name == "sampler")
    for name in ("bands", "separation", "noise", "error", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in sorted(done, key=lambda row: row["total_error"]):
        numbers = f"{row['noise_multiplier']:.4g}", f"{row['total_error']:.4g}", f"{row['seconds']:.1f}"
        table.add_row(row["sampler"], row["method"], str(row["bands"]), str(row["separation"]), *numbers)
    out.print(table)
    out.print("Noise: the multiplier; error: noise in all prefix sums, clip norm 1; poisson is DP-SGD.", soft_wrap=True)
    for row in rows:
        if "refused" in row:
            err.print(f"{row['sampler']}: {row['refused']}", soft_wrap=True)
    if plot is not None:
        out.print(f"[bold]written[/]    {plot}")


def _draw(rows: list[dict], epsilon: float, delta: float, path: Path) -> None:
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["total_error"])
    figure = Figure(figsize=(7.0, 0.7 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names = ["poisson (DP-SGD)" if row["sampler"] == "poisson" else row["sampler"] for row in rows]
    bars = axes.barh(names, [row["total_error"] for row in rows], color="tab:blue")
    axes.bar_label(bars, [f"noise multiplier {row['noise_multiplier']:.3g}" for row in rows], padding=3)
    axes.set_xlim(0.0, 1.5 * max(row["total_error"] for row in rows))
    axes.set_xlabel(f"total error at epsilon = {epsilon:g}, delta = {delta:g}")
    axes.invert_yaxis()
    figure.savefig(path)
