"""Every command of `swiftkv` that a page shows is one that the command line accepts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import typer.main

from swiftkv_platform.cli.app import app
from swiftkv_platform.specs.deployment import DeploymentSpec
from tests.documented import blocks

PAGES = [Path("README.md"), Path("infra/README.md"), *sorted(Path("docs").glob("*.md"))]

COMMANDS = [
    (block.place, command)
    for page in PAGES
    for block in blocks(page)
    if block.language in ("bash", "console")
    for command in block.commands()
    if shlex.split(command, comments=True)[0] == "swiftkv"
]

_STANDS_FOR_A_FILE = re.compile(r"does not exist|no such file", re.IGNORECASE)


def test_documented_deployments_are_accepted() -> None:
    bodies = [block.text for block in blocks(Path("docs/serving.md")) if block.language == "json"]
    assert [DeploymentSpec.model_validate(json.loads(body)).model for body in bodies] == ["mdl_one", "mdl_one"]


def test_documented_commands_are_accepted_and_name_files_of_the_repository() -> None:
    assert len(COMMANDS) > 40
    for place, command in COMMANDS:
        check_accepted(place, command)
        words = shlex.split(command, comments=True)
        named = [word for word in words if re.match(r"(jobs|benchmarks|infra|docs)/", word)]
        assert [path for path in named if not Path(path).exists()] == [], place


APP: click.Command = typer.main.get_command(app)


def check_accepted(place: str, command: str) -> None:
    arguments, parsed = shlex.split(command, comments=True)[1:], APP
    context = None
    try:
        while isinstance(parsed, click.Group):
            context = parsed.make_context(parsed.name, arguments, parent=context)
            _, subcommand, arguments = parsed.resolve_command(context, [*context._protected_args, *context.args])
            assert subcommand is not None, f"{place}: {command}"
            parsed = subcommand
        parsed.make_context(parsed.name, arguments, parent=context)
    except click.BadParameter as refused:
        if _STANDS_FOR_A_FILE.search(refused.message) is None:
            raise AssertionError(f"{place}: {command}: {refused.format_message()}") from refused
