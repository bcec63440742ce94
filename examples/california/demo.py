"""From an ONNX regressor to private predictions on the 1990 census of California, with the commands a user would type.

    python examples/california/demo.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import certify
import models
import privacy
from certify.plots import save
from certify.tables import write_predictions

HERE = Path(__file__).resolve().parent
SHA256 = "99b9bd3f2603ec150c6660b8dbd6073efc46b7ca9c25bf6e695a46fcbb8cc86e"
HOMES = 12
console = Console(highlight=False)


def split(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Four rows of five are private records; of the others, the first twelve are public questions.

    Returns features and values of the rows that are not trained on, and the positions of the questions among them.
    """
    source = HERE / "california_housing.parquet"
    if hashlib.sha256(source.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{source}: is not the table this demo was written for; fetch it again")
    table = certify.read_table(source, target="MedHouseVal")
    held = np.arange(len(table.features)) % 5 == 0
    chosen = np.linspace(0, held.sum() - 1, HOMES).astype(int)
    columns = dict(zip(table.feature_names, table.features[~held].T, strict=True))
    write_predictions(folder / "train.csv", {**columns, "MedHouseVal": table.targets[~held][:, 0]})
    questions = table.features[held][chosen]
    write_predictions(folder / "queries.csv", dict(zip(table.feature_names, questions.T, strict=True)))
    return table.features[held], table.targets[held][:, 0], chosen


def certdp(*words: object) -> None:
    """Run a certdp command and show it."""
    words = tuple(map(str, words))
    console.print(f"\n[bold green]$ certdp {' '.join(map(shlex.quote, words))}[/]", soft_wrap=True)
    subprocess.run([sys.executable, "-c", "from certify.cli import main; main()", *words], check=True)


def compare(folder: Path, features: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> None:
    """What the private predictions lose against the exact ones: seen by the owner of the data only."""
    envelope = certify.read_envelope(folder / "run.envelope.safetensors")
    graph = models.read(HERE / "model.onnx")
    query = privacy.Query.make(envelope, graph)
    theta = graph.join(envelope.nominal)
    exact = np.clip(query.restore(query.graph.evaluate(query.prepare(features), theta))[:, 0], 0.0, 5.0)
    released = np.loadtxt(folder / "released.csv", delimiter=",", skiprows=1)
    guarantee = json.loads((folder / "released.guarantee.json").read_text())

    table = Table(title=f"\n{HOMES} districts: median house value, in 100,000 dollars", title_justify="left")
    for name in ("district", "true value", "exact prediction", "private prediction", "changed by"):
        table.add_column(name, justify="right")
    for row, (at, private) in enumerate(zip(chosen, released, strict=True)):
        change = f"{private - exact[at]:+.3f}"
        table.add_row(str(row), f"{values[at]:.2f}", f"{exact[at]:.3f}", f"{private:.3f}", change)
    console.print(table)

    budgets = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    errors = [privacy.predict(envelope, query, features, e, per_query=True).values[:, 0] for e in budgets]
    cost = [float(np.median(np.abs(p - exact))) for p in errors]
    model_error = float(np.abs(exact - values).mean())
    private_error = float(np.abs(errors[3] - values).mean())
    constant = float(np.abs(2.5 - values).mean())
    ceiling = float(np.median(query.ceiling(query.prepare(features)))) * query.unit
    console.print(
        f"\nOn the {len(values)} districts that were not trained on, in dollars:\n"
        f"  always answering the middle of the range errs by          {1e5 * constant:>9,.0f}  (mean)\n"
        f"  the exact model errs by                                   {1e5 * model_error:>9,.0f}  (mean)\n"
        f"  the private model, epsilon = 1 a prediction, errs by      {1e5 * private_error:>9,.0f}  (mean)\n"
        f"  privacy moves a prediction by                             {1e5 * cost[3]:>9,.0f}  (median)\n"
        f"      (Cauchy noise: one prediction in sixteen moves by more than ten times that)\n"
        f"  noise for the worst case over all data sets would move it {1e5 * ceiling * np.log(2):>9,.0f}  (median)\n"
        f"Each released prediction costs epsilon = {guarantee['epsilon_per_release']:g}; the {HOMES} above cost "
        f"{guarantee['epsilon']:g} together ({guarantee['adjacency']}).\n"
        "The lines of this comparison use the exact model and are for the owner of the data only."
    )
    picture(folder / "comparison.png", exact, errors[3], budgets, cost, model_error)
    console.print(f"pictures in {folder}: comparison.png, run.widths.png, run.staircase.png")


def picture(path, exact, private, budgets, cost, model_error) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    left.plot([0, 5], [0, 5], color="grey", linewidth=1)
    left.scatter(exact, private, s=5, alpha=0.35, color="tab:blue", linewidths=0)
    left.set(
        xlabel="exact prediction (100,000 dollars)",
        ylabel="private prediction",
        title="private against exact, epsilon = 1 a prediction",
    )
    right.plot(budgets, 1e5 * np.array(cost), "o-", color="tab:orange", label="privacy moves a prediction by (median)")
    right.axhline(1e5 * model_error, linestyle="--", color="grey", label="the exact model errs by (mean)")
    right.set(xscale="log", yscale="log", xlabel="epsilon of one prediction", ylabel="dollars")
    right.set_title("what privacy costs")
    right.set_xticks(budgets, [f"{b:g}" for b in budgets])
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle("private: uses the exact model", x=0.995, ha="right", fontsize=8, color="firebrick")
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/california"), help="folder for what is made")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    features, values, chosen = split(folder)
    envelope, model = folder / "run.envelope.safetensors", HERE / "model.onnx"
    certdp("models", model)
    certdp(
        "certify", model, "--data", folder / "train.csv", "--target", "MedHouseVal",
        "--recipe", HERE / "recipe.toml", "--radii", "0..28", "--backend", "relational", "-o", envelope,
    )  # fmt: skip
    certdp("inspect", envelope, "--model", model, "--data", folder / "queries.csv")
    certdp(
        "predict", envelope, "--model", model, "--data", folder / "queries.csv",
        "--epsilon", 1, "--per-query", "-o", folder / "released.csv",
    )  # fmt: skip
    compare(folder, features, values, chosen)
    console.print(f"finished in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
