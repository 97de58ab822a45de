"""`swiftkv doctor`, with its checks in the order in which they are reported. A check removes whatever it creates."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.doctor import exposure, installation, machine, services
from swiftkv_platform.cli.doctor.findings import (
    GIB,
    Surroundings,
    count,
    failed,
    one_line,
    print_findings,
    run_checks,
)
from swiftkv_platform.cli.output import err, print_json
from swiftkv_platform.errors import InvalidInputError

CHECKS = (
    installation.python,
    installation.packages,
    installation.variables,
    installation.operator_files,
    machine.disk,
    machine.ports,
    machine.limits,
    services.database,
    services.object_store,
    services.clock,
    services.ray,
    services.control_plane,
    exposure.exposure,
    machine.compiler,
    machine.gpu,
    installation.vllm,
    services.wandb,
)


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Time limit of a check, seconds.")] = 30.0,
    min_free_gib: Annotated[float, typer.Option(min=0.0, help="Free disk space to require, GiB.")] = 2.0,
    json: Json = False,
) -> None:
    """Check everything the platform needs here, and say what to do. The exit code is 1 if a check failed."""
    with err().status("Looking"):
        try:
            surroundings = Surroundings(settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # No other check can run without settings.
            results = [("settings", failed(one_line(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, surroundings)
    counts = count(results)
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        print_findings(results)
    if counts["failed"]:
        raise typer.Exit(1)
