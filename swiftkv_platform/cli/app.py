"""The command tree of `swiftkv`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from swiftkv_platform import __version__
from swiftkv_platform.cli import access, convert, deployments, distill, local, plan
from swiftkv_platform.cli.distill import recipes_app
from swiftkv_platform.cli.doctor import doctor
from swiftkv_platform.cli.files import files_app
from swiftkv_platform.cli.jobs import jobs_app
from swiftkv_platform.cli.models import models_app
from swiftkv_platform.cli.output import ErrorReportingGroup
from swiftkv_platform.cli.serve import serve
from swiftkv_platform.logs import configure_logging


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distill and serve SwiftKV models: long prompts at half the prefill compute.",
)


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    configure_logging()


_COMMANDS_BY_PANEL: dict[str, tuple[Callable[..., None] | tuple[str, typer.Typer], ...]] = {
    "Local model commands": (
        distill.distill,
        distill.evaluate,
        serve,
        convert.convert,
        convert.export,
        plan.analyze,
        plan.plan,
        ("recipes", recipes_app),
    ),
    "Local platform commands": (local.up, local.down, local.status, local.demo, doctor),
    "Platform client commands": (
        ("jobs", jobs_app),
        ("files", files_app),
        ("models", models_app),
        ("deployments", deployments.deployments_app),
        deployments.deploy,
        deployments.generate,
    ),
    "Operator commands": (
        ("keys", access.keys_app),
        access.quota,
        access.audit,
        local.prune,
        local.backup,
        local.restore,
    ),
}
for panel, commands in _COMMANDS_BY_PANEL.items():
    for command in commands:
        if isinstance(command, tuple):
            app.add_typer(command[1], name=command[0], rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(command)
app.command(hidden=True)(local.sweep)
