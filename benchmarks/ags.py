"""Private learning on California Housing: test error of released models by budget. Run: python benchmarks/ags.py

The last 4,128 rows are held out. Prints the root mean squared error (100,000 dollars) of the untrained, the trained
and the released models, the median of `RUNS` releases each. Looking at several releases would cost all of them.
"""

import time
from pathlib import Path

import numpy as np

import certify
import models
from certify.driver import train
from certify.recipe import from_dict
from privacy.ags import AgsPlan, release_parameters

HERE = Path(__file__).resolve().parent.parent / "examples" / "california"
RUNS = 3


def main() -> None:
    recipe = certify.load_recipe(HERE / "recipe.toml").to_dict()
    recipe["training"] |= {"steps": 30, "learning_rate": recipe["training"]["learning_rate"] | {"value": 0.05}}
    facts = from_dict(recipe)
    table = certify.read_table(HERE / "california_housing.parquet", target="MedHouseVal", features=facts.features.names)
    graph = models.read(HERE / "model.onnx")
    slots = facts.batches.slots
    x, y = table.features[:slots], table.targets[:slots]
    held, truth = table.features[slots:], table.targets[slots:]

    def error(theta) -> float:
        found = facts.restore_predictions(graph.evaluate(facts.prepare_features(held), theta))
        return float(np.sqrt(np.mean((np.clip(found, 0.0, 5.0) - truth) ** 2)))

    steps = facts.total_steps(slots)
    print(f"{slots} slots, {steps} steps, {graph.initial().size} parameters")
    print(f"untrained {error(graph.initial()):.3f}, trained without privacy {error(train(graph, facts, x, y)):.3f}")
    cases = [(10.0, 0.0, 1, 24), (10.0, 1e-5, 1, 24), (10.0, 0.0, 3, 24), (1.0, 0.0, 1, 24)]
    for epsilon, delta, releases, radius in cases:
        plan = AgsPlan.make([steps * (j + 1) // releases for j in range(releases)], epsilon, delta, radius)
        started = time.perf_counter()
        errors = [error(release_parameters(graph, facts, x, y, plan, backend="relational").theta) for _ in range(RUNS)]
        seconds = (time.perf_counter() - started) / RUNS
        noise = plan.mechanisms(graph.initial().size)[0].family.name
        case = f"epsilon {epsilon:g}, delta {delta:g}, {releases} release(s), radii 0..{radius}, {noise}"
        print(f"{case}: {np.median(errors):.3f} ({seconds:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
