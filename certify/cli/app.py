"""The command's table of contents."""

from __future__ import annotations

import typer

from certify._siblings import require

require("models", "solvers", "privacy")

from certify.cli import account as account_command  # noqa: E402
from certify.cli import audit as audit_command  # noqa: E402
from certify.cli import budget as budget_command  # noqa: E402
from certify.cli import certify as certify_command  # noqa: E402
from certify.cli import compare as compare_command  # noqa: E402
from certify.cli import envelope as envelope_command  # noqa: E402
from certify.cli import feasible as feasible_command  # noqa: E402
from certify.cli import inspect as inspect_command  # noqa: E402
from certify.cli import models as models_command  # noqa: E402
from certify.cli import noise as noise_command  # noqa: E402
from certify.cli import predict as predict_command  # noqa: E402
from certify.cli import recipe as recipe_command  # noqa: E402
from certify.cli import release as release_command  # noqa: E402
from certify.cli import solvers as solvers_command  # noqa: E402

app = typer.Typer(
    name="certdp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Certified differentially private learning: ONNX model and recipe in, envelopes and private predictions out.",
)
app.command("models", help="Show a model: graph, operators, parameters, and what is not supported.")(
    models_command.command
)
app.command("certify", help="Bound training on every neighbouring data set and write an envelope (private).")(
    certify_command.command
)
app.command("compare", help="Compare backends on one run, with the best attack (private).")(compare_command.command)
app.command("inspect", help="Show an envelope: widths, certificates, plots (private).")(inspect_command.command)
app.command("predict", help="Release private predictions from an envelope.")(predict_command.command)
app.command("release", help="Release a private model: noisy parameters at public steps (AGS).")(release_command.command)
app.command("noise", help="Compare the noise that each family needs for a budget.")(noise_command.command)
app.command("feasible", help="When does smooth noise beat global noise?")(feasible_command.command)
app.command("audit", help="Retrain and recertify on neighbours and check the claims (private).")(audit_command.command)
app.add_typer(account_command.app, name="account", help="Account correlated-noise training (BandMF).")
app.add_typer(budget_command.app, name="budget", help="Privacy budgets: create, show, add, export.")
app.command("recipe", help="Check a recipe, or explain every field.")(recipe_command.command)
app.command("solvers", help="Show bounding backends and solvers, and try each solver.")(solvers_command.command)
app.add_typer(envelope_command.app, name="envelope", help="Check envelope files.")


def known_errors() -> tuple[type[BaseException], ...]:
    """Everything a user can provoke."""
    from certify.errors import CertdpError
    from models.errors import ModelError
    from solvers.errors import SolverError

    return CertdpError, ModelError, SolverError
