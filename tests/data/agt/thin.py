"""Cuts the reference trajectories to what tests/test_reference.py needs.

    python thin.py SOURCE [TARGET]

SOURCE is a folder with ``manifest.json`` and the full ``.npz`` files made with the public AGT implementation (commit
in the manifest); TARGET defaults to the folder of this script.  Nothing is recomputed or rounded: arrays are copied
as they are (float64), whole rows at a time.

* trajectories: the rows after 1 step, after half of the steps and after the last, of the nominal run (``n``) and of
  both ends (``l_...``, ``u_...``) for the products ``rump`` and ``exact`` and every radius above 0;
* logits at the test points for the last row; features, targets and the initial point whole;
* unit_gradbounds: everything for the products ``rump`` and ``exact``;
* of the 32 radii of b_blobs_bce_full those in RADII;
* left out: radius 0 (there the reference's ends are its nominal run), the products ``nguyen``, test-only extras.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

TRAJECTORIES = (
    "a_lin_full", "a_lin_mini", "b_blobs_bce_full", "b_blobs_bce_full_exact", "b_blobs_bce_mini",
    "c_mlp_full", "c_mlp_mini", "c_mlp3_full",
)  # fmt: skip
RADII = {"b_blobs_bce_full": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)}
FACTS = ("ks", "matmuls", "shapes", "n", "batch", "batches_per_epoch", "steps", "order", "config", "note")


def thin(source: Path, target: Path) -> None:
    manifest = json.loads((source / "manifest.json").read_text())
    kept = {key: manifest[key] for key in ("agt_commit", "torch", "numpy", "python", "layout", "semantics")}
    kept["cases"] = {}
    for name in TRAJECTORIES:
        case = manifest["cases"][name]
        rows = [1, case["steps"] // 2, case["steps"]]
        radii = RADII.get(name, [k for k in case["ks"] if k > 0])
        wanted = {f"k{k}" for k in radii}
        arrays = {}
        with np.load(source / f"{name}.npz") as full:
            for key in full.files:
                bounds = "_rump_" in key or "_exact_" in key
                if "nguyen" in key or (bounds and key.rsplit("_", 1)[1] not in wanted):
                    continue
                arrays[key] = full[key][rows] if key == "n" or key[:2] in ("l_", "u_") else full[key]
        np.savez_compressed(target / f"{name}.npz", **arrays)
        kept["cases"][name] = {key: case[key] for key in FACTS} | {"ks": list(radii), "rows": rows}
    with np.load(source / "unit_gradbounds.npz") as full:
        arrays = {key: full[key] for key in full.files if "nguyen" not in key}
        np.savez_compressed(target / "unit_gradbounds.npz", **arrays)
    kept["cases"]["unit_gradbounds"] = manifest["cases"]["unit_gradbounds"]
    (target / "manifest.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    thin(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parent)
