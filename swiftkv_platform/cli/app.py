"""The command tree of `swiftkv`."""

from __future__ import annotations

from collections.abc import Callable

import typer

from swiftkv_platform.cli import access, analyze, convert, deployments, distill, local, plan
from swiftkv_platform.cli.doctor import doctor
from swiftkv_platform.cli.files import files_app
from swiftkv_platform.cli.jobs import jobs_app
from swiftkv_platform.cli.models import models_app
from swiftkv_platform.cli.output import ReportingGroup
from swiftkv_platform.cli.recipes import recipes_app
from swiftkv_platform.cli.serve import serve

app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distil and serve SwiftKV models: long prompts at half the prefill compute.",
)

_MACHINE: tuple[Callable[..., None], ...] = (local.up, local.down, local.status, local.demo, doctor)
_WORK: tuple[Callable[..., None], ...] = (
    distill.distill,
    distill.evaluate,
    serve,
    analyze.analyze,
    plan.plan,
    convert.convert,
    convert.export,
    deployments.deploy,
    deployments.generate,
    access.quota,
    access.audit,
    local.prune,
    local.backup,
    local.restore,
)
for command in _MACHINE:
    app.command()(command)
app.add_typer(jobs_app, name="jobs")
app.add_typer(recipes_app, name="recipes")
app.add_typer(files_app, name="files")
app.add_typer(models_app, name="models")
app.add_typer(deployments.deployments_app, name="deployments")
app.add_typer(access.keys_app, name="keys")
for command in _WORK:
    app.command()(command)
app.command(hidden=True)(local.sweep)
