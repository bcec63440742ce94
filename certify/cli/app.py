"""The command's table of contents."""

from __future__ import annotations

import typer

from certify._siblings import require

require("models", "solvers", "privacy")

from certify.cli import certify as certify_command  # noqa: E402
from certify.cli import envelope as envelope_command  # noqa: E402
from certify.cli import inspect as inspect_command  # noqa: E402
from certify.cli import models as models_command  # noqa: E402
from certify.cli import predict as predict_command  # noqa: E402
from certify.cli import recipe as recipe_command  # noqa: E402

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
app.command("inspect", help="Show an envelope: widths, certificates, plots (private).")(inspect_command.command)
app.command("predict", help="Release private predictions from an envelope.")(predict_command.command)
app.command("recipe", help="Check a recipe, or explain every field.")(recipe_command.command)
app.add_typer(envelope_command.app, name="envelope", help="Check envelope files.")


def known_errors() -> tuple[type[BaseException], ...]:
    """Everything a user can provoke."""
    from certify.errors import CertdpError
    from models.errors import ModelError

    return CertdpError, ModelError
