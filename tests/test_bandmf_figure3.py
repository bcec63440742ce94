"""benchmarks/bandmf_figure3.py: the arithmetic of its ratios, and that it goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from certify.errors import CheckpointError
from privacy.bandmf import CyclicPoisson, Poisson
from privacy.bandmf.account import Calibration
from privacy.bandmf.result import DeltaBound

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bandmf_figure3.py"
NOISE = {"Poisson": 0.5, "CyclicPoisson": 0.8, "BMinSep": 0.6}


@pytest.fixture
def script(monkeypatch):
    """The module, with a calibration that costs nothing; `script.calls` are the schemes it was asked for."""
    spec = importlib.util.spec_from_file_location("bandmf_figure3", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.calls = []

    def calibrate(scheme, strategy, epsilon, delta, *, seed, progress):
        module.calls.append(scheme)
        bound = DeltaBound(epsilon, delta, 0.0, delta, 0.0, "both", "exact")
        return Calibration(NOISE[type(scheme).__name__], epsilon, delta, 0.0, bound, 0, False, 0.0)

    monkeypatch.setattr(module, "calibrate", calibrate)
    return module


def test_ratios_are_those_of_mean_squared_errors(script, tmp_path):
    setting = script.Setting(steps=64, bands=4, separation=8, epoch=16)
    found = script.measured(setting, script.Results(tmp_path / "results.json"))
    c = setting.strategy
    banded, independent = c.squared_errors().mean(), (64 + 1) / 2
    assert found["b-min-sep / cyclic"] == pytest.approx(0.6**2 / 0.8**2)
    assert found["b-min-sep / DP-SGD"] == pytest.approx(0.6**2 * banded / (0.5**2 * independent))
    assert found["cyclic / DP-SGD"] == pytest.approx(0.8**2 * banded / (0.5**2 * independent))
    poisson, cyclic, ours = script.calls
    assert (poisson, cyclic) == (Poisson(64, 16 * 1024, 1024), CyclicPoisson(64, 16 * 1024, 1024, 4))
    assert (ours.separation, ours.warm, ours.rate) == (8, True, 1 / 16)


def test_finished_calibrations_are_not_repeated(script, tmp_path):
    path = tmp_path / "results.json"
    setting = script.Setting(steps=32, bands=2, separation=2)
    first = script.measured(setting, script.Results(path))
    assert script.measured(setting, script.Results(path)) == first and len(script.calls) == 3
    script.measured(script.Setting(steps=32, bands=2, separation=2, epsilon=4.0), script.Results(path))
    assert len(script.calls) == 6


def test_results_of_another_version_are_refused(script, tmp_path):
    path = tmp_path / "results.json"
    script.measured(script.Setting(steps=32, bands=2, separation=2), script.Results(path))
    kept = json.loads(path.read_text())
    kept["facts"]["versions"]["certdp"] = "0.0.0"
    path.write_text(json.dumps(kept))
    with pytest.raises(CheckpointError, match="name another folder"):
        script.Results(path)


def test_all_settings_of_the_sweeps_can_be_sampled(script):
    for quick in (False, True):
        for field, (_, settings) in script.sweeps(quick).items():
            assert len({getattr(setting, field) for setting in settings}) == len(settings) > 1
            for setting in settings:
                assert set(setting.schemes()) == {"DP-SGD", "cyclic", "b-min-sep"}
