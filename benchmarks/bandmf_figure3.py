"""Error of BandMF with b-min-sep sampling against DP-SGD and against cyclic sampling, at equal privacy.

    python benchmarks/bandmf_figure3.py [--quick] [--output out/bandmf_figure3]

After figure 3 of Dong & Ganesh, "Privacy Amplification for BandMF via b-Min-Sep Subsampling": ratios of the mean
squared error of the prefix sums over the number of bands, the epoch length (examples per expected batch) and epsilon,
and also over the separation at a fixed number of bands. Every noise multiplier is calibrated rigorously
(`account.calibrate`): exact for DP-SGD and cyclic sampling, estimate-verify-release for b-min-sep. Writes results.json,
table.md and figure.svg; what results.json holds is not computed again, so an interrupted run goes on. `--quick`: fewer
settings and steps, in about a minute.

The seed is fixed so that the table can be repeated. Noise for a model should come from a run without one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from certify.cli.console import err, progress_bar
from certify.errors import CheckpointError
from privacy.bandmf import BMinSep, CyclicPoisson, Poisson, Strategy, calibrate, optimal_toeplitz
from privacy.bandmf.schemes import Scheme

DELTA, BATCH, SEED = 1e-3, 1024, 0
VERSIONS = ("certdp", "numpy", "scipy", "numba")


@dataclass(frozen=True)
class Setting:
    """`epoch`: examples over the expected batch size; `groups` of cyclic sampling are as many as the bands."""

    steps: int
    bands: int = 16
    separation: int = 16
    epoch: int = 128
    epsilon: float = 8.0

    @property
    def strategy(self) -> Strategy:
        return optimal_toeplitz(self.steps, self.bands)

    def schemes(self) -> dict[str, tuple[Scheme, Strategy]]:
        """Method to what it samples and how it correlates its noise."""
        facts = self.steps, self.epoch * BATCH, BATCH
        return {
            "DP-SGD": (Poisson(*facts), Strategy.identity(self.steps)),
            "cyclic": (CyclicPoisson(*facts, self.bands), self.strategy),
            "b-min-sep": (BMinSep(*facts, self.separation), self.strategy),
        }


def sweeps(quick: bool) -> dict[str, tuple[str, list[Setting]]]:
    """Name of what varies, as a field and in words, to the settings."""
    base = Setting(steps=256 if quick else 1024)
    bands = (2, 8, 32) if quick else (2, 4, 8, 16, 32, 64, 128)
    epochs = (16, 64, 256) if quick else (16, 32, 64, 128, 256, 512, 1024)
    epsilons = (2.0, 8.0) if quick else (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    separations = (16, 64, 128) if quick else (16, 32, 64, 96, 128)
    return {
        "bands": ("bands (= separation)", [replace(base, bands=b, separation=b) for b in bands]),
        "epoch": ("epoch length in steps", [replace(base, epoch=e) for e in epochs]),
        "epsilon": ("ε", [replace(base, epsilon=e) for e in epsilons]),
        "separation": ("separation, 16 bands", [replace(base, separation=s) for s in separations]),
    }


class Results:
    """Calibrations in a file; every one is written when it is found."""

    def __init__(self, path: Path):
        self.path = path
        self.facts = {
            "delta": DELTA,
            "batch": BATCH,
            "seed": SEED,
            "versions": {name: version(name) for name in VERSIONS},
        }
        self.found: dict[str, dict] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["facts"] != self.facts:
                raise CheckpointError(f"{path}: holds {kept['facts']}, not {self.facts}; name another folder")
            self.found = kept["found"]

    def noise(self, scheme: Scheme, strategy: Strategy, epsilon: float) -> dict:
        """The calibration for (epsilon, DELTA)."""
        key = f"{scheme!r}, {strategy.bands} bands, epsilon {epsilon:g}"
        if key not in self.found:
            err.print(key, soft_wrap=True)
            start = time.process_time()
            with progress_bar("sampling") as bar:
                found = calibrate(scheme, strategy, epsilon, DELTA, seed=SEED, progress=bar)
            self.found[key] = {**asdict(found), "cpu_seconds": time.process_time() - start}
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps({"facts": self.facts, "found": self.found}, indent=1))
            os.replace(partial, self.path)
        return self.found[key]


def measured(setting: Setting, results: Results) -> dict[str, float]:
    """Noise multiplier of every method, and mean squared errors of the prefix sums relative to DP-SGD's."""
    noise, error = {}, {}
    for method, (scheme, strategy) in setting.schemes().items():
        noise[method] = results.noise(scheme, strategy, setting.epsilon)["noise_multiplier"]
        error[method] = noise[method] ** 2 * strategy.squared_errors().mean()
    return {
        **{f"noise {method}": value for method, value in noise.items()},
        "cyclic / DP-SGD": error["cyclic"] / error["DP-SGD"],
        "b-min-sep / DP-SGD": error["b-min-sep"] / error["DP-SGD"],
        "b-min-sep / cyclic": error["b-min-sep"] / error["cyclic"],
    }


def as_table(settings: list[Setting], rows: dict[Setting, dict[str, float]]) -> str:
    """Markdown, one line per setting."""
    lines = [
        "| bands | separation | epoch | ε | σ DP-SGD | σ cyclic | σ b-min-sep "
        "| MSE cyclic / DP-SGD | MSE b-min-sep / DP-SGD | MSE b-min-sep / cyclic |",
        "| ---: " * 10 + "|",
    ]
    for s in settings:
        values = " | ".join(f"{value:.3f}" for value in rows[s].values())
        lines.append(f"| {s.bands} | {s.separation} | {s.epoch} | {s.epsilon:g} | {values} |")
    return "\n".join(lines) + "\n"


def plot(panels: dict[str, tuple[str, list[Setting]]], rows: dict[Setting, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    figure.suptitle(
        f"mean squared error of prefix sums at equal privacy: {next(iter(rows)).steps} steps, δ = {DELTA:g}\n"
        "unless varied: 16 bands, separation 16, epochs of 128 steps, ε = 8"
    )
    for axes, (field, (label, settings)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        at = [getattr(setting, field) for setting in settings]
        for ratio, style in (("cyclic / DP-SGD", "s--"), ("b-min-sep / DP-SGD", "o-"), ("b-min-sep / cyclic", "^:")):
            axes.plot(at, [rows[setting][ratio] for setting in settings], style, label=ratio)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{x:g}" for x in at])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(xlabel=label, ylabel="ratio (below 1: the first is better)", ylim=(0.0, None))
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings and steps")
    parser.add_argument("--output", type=Path, default=Path("out/bandmf_figure3"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output / "results.json")
    panels = sweeps(options.quick)
    settings = list(dict.fromkeys(chain.from_iterable(s for _, s in panels.values())))
    rows = {}
    for number, setting in enumerate(settings, 1):
        err.print(f"setting {number} of {len(settings)}", soft_wrap=True)
        rows[setting] = measured(setting, results)
    cpu = sum(found["cpu_seconds"] for found in results.found.values())
    table = "\n".join(f"By {label}:\n\n{as_table(varied, rows)}" for label, varied in panels.values())
    footer = f"{json.dumps(results.facts)}; {cpu:.0f} CPU seconds"
    (options.output / "table.md").write_text(f"{table}\n{footer}\n")
    plot(panels, rows, options.output / "figure.svg")
    print(table)
    print(footer)


if __name__ == "__main__":
    main()
