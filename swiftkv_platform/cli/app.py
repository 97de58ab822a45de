"""The command tree of `swiftkv`."""

from __future__ import annotations

import typer

from swiftkv_platform.cli import (
    analyze,
    audit,
    convert,
    distill,
    evaluate,
    local,
    maintenance,
    plan,
    quota,
    registry,
    serving,
)
from swiftkv_platform.cli.deployments import deployments_app
from swiftkv_platform.cli.doctor import doctor
from swiftkv_platform.cli.files import files_app
from swiftkv_platform.cli.jobs import jobs_app
from swiftkv_platform.cli.keys import keys_app
from swiftkv_platform.cli.output import ReportingGroup

app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Distil and serve SwiftKV models: long prompts at half the prefill compute.",
)

app.command()(local.up)
app.command()(local.down)
app.command()(local.status)
app.command()(local.demo)
app.command()(doctor)
app.add_typer(jobs_app, name="jobs")
app.add_typer(files_app, name="files")
app.add_typer(registry.models_app, name="models")
app.add_typer(deployments_app, name="deployments")
app.add_typer(keys_app, name="keys")
app.command()(distill.distill)
app.command()(evaluate.evaluate)
app.command()(analyze.analyze)
app.command()(plan.plan)
app.command()(convert.convert)
app.command()(convert.export)
app.command()(serving.deploy)
app.command()(serving.generate)
app.command()(quota.quota)
app.command()(audit.audit)
app.command()(maintenance.sweep)
app.command()(maintenance.backup)
app.command()(maintenance.restore)
