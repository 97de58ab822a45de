"""The command `swiftkv doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.doctor.disk import GIB
from swiftkv_platform.cli.doctor.findings import Finding, Status, Surroundings, one_line, run_checks
from swiftkv_platform.cli.output import err, out, print_json
from swiftkv_platform.errors import InvalidInputError

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a check may take.")] = 30.0,
    min_free_gib: Annotated[float, typer.Option(min=0.0, help="Free disk space to ask for, GiB.")] = 2.0,
    json: Json = False,
) -> None:
    """Look at everything the platform needs here, and say what to do; the exit code is not 0 where something failed."""
    from swiftkv_platform.cli.doctor.checks import CHECKS

    with err().status("Looking"):
        try:
            surroundings = Surroundings(settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # Without settings no other check knows what to look at.
            results = [("settings", Finding("failed", one_line(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, surroundings)
    counts: dict[str, int] = {status: sum(finding.status == status for _, finding in results) for status in _STYLES}
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        _print(results)
        out().print(", ".join(f"{count} {status}" for status, count in counts.items()) + ".", highlight=False)
    if counts["failed"]:
        raise typer.Exit(1)


def _print(results: list[tuple[str, Finding]]) -> None:
    width = max(len(name) for name, _ in results)
    for name, finding in results:
        status = f"[{_STYLES[finding.status]}]{finding.status:<7}[/]"
        line = f"{status}  [bold]{name:<{width}}[/]  {escape(finding.message)}"
        out().print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            out().print(f"{'':<9}{'':<{width}}  To do: {escape(finding.advice)}", highlight=False, soft_wrap=True)
