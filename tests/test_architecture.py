"""Who may import whom, what a light import loads, and what happens beside a foreign package of the same name."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["cli", "privacy", "certify", "solvers", "models"]
HEAVY = {"torch", "pyomo", "onnx", "onnxruntime", "numba", "scipy", "matplotlib", "pyarrow", "pydantic"}
HEAVY |= {"models", "solvers"}


def layer(module: str) -> str | None:
    """The architecture's name for a module of ours, None for anybody else's."""
    if module.startswith("certify.cli"):
        return "cli"
    top = module.split(".")[0]
    return top if top in ORDER else None


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources():
    for package in ("models", "solvers", "certify", "privacy"):
        yield from sorted((ROOT / package).rglob("*.py"))


def test_imports_go_to_the_right_only():
    wrong = []
    for path in sources():
        mine = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            other = layer(module)
            if other and ORDER.index(other) < ORDER.index(mine):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_the_envelope_module_needs_numpy_and_safetensors_alone():
    foreign = {
        module.split(".")[0]
        for module in imports(ROOT / "certify" / "envelope.py")
        if module.split(".")[0] not in sys.stdlib_module_names
    }
    assert foreign == {"numpy", "safetensors", "certify"}
    assert {m for m in imports(ROOT / "certify" / "envelope.py") if m.startswith("certify.")} <= {
        "certify.errors",
        "certify.errors.EnvelopeError",
        "certify.errors.RadiusError",
    }


def python(code: str, folder: Path) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.append({str(ROOT)!r})\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("statement", ["import certify", "import privacy", "import certify.envelope", "import models"])
def test_imports_load_nothing_heavy(statement, tmp_path):
    allowed = {"models"} if statement == "import models" else set()
    done = python(f"{statement}\nprint(' '.join(m for m in sys.modules if '.' not in m))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & (HEAVY - allowed)


def test_envelopes_work_beside_a_foreign_models_module(tmp_path):
    (tmp_path / "models.py").write_text("mine = True\n")
    done = python("import models, certify.envelope; assert models.mine; certify.read_envelope", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["models", "solvers"])
def test_a_module_that_hides_ours_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").write_text("mine = True\n")
    done = python("import certify; certify.run", tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "ShadowedPackageError" in last and f"{name}.py" in last and "rename" in last
