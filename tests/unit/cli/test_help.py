"""Help, version and completion: what they import, and the examples."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from swiftkv_platform.cli.app import EXAMPLES, app, load_commands

SLOW_MODULES = {"httpx", "obstore", "ray", "sqlalchemy", "structlog", "torch", "transformers", "yaml"}
"""Modules whose import takes most of a second together."""


def find_commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from find_commands(each, f"{path} {name}".strip())
    else:
        yield path, command


def list_imports(*words: str, **variables: str) -> set[str]:
    """Return the modules that `swiftkv` has imported when it ends."""
    program = (
        f"import atexit, os, sys; os.environ.update({variables!r}); sys.argv = ['swiftkv', *{words!r}];"
        "atexit.register(lambda: print('MODULES', *sys.modules, file=sys.stderr));"
        "from swiftkv_platform.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return set(result.stderr.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_import_no_slow_module(option: str) -> None:
    imported = list_imports(option)
    assert "swiftkv_platform.cli.app" in imported
    assert imported & {*SLOW_MODULES, "pydantic", "swiftkv_platform.specs"} == set()


@pytest.mark.slow("a process per group")
@pytest.mark.parametrize("typed", ["swiftkv jo", "swiftkv jobs pau", "swiftkv jobs submit --fol", "swiftkv plan --"])
def test_completion_of_names_imports_no_slow_module(typed: str) -> None:
    imported = list_imports(_SWIFTKV_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(typed.count(" ")))
    assert "swiftkv_platform.cli.app" in imported
    assert imported & SLOW_MODULES == set()


@pytest.mark.slow("a process per group")
@pytest.mark.parametrize(
    "group",
    ["deployments", "distill", "doctor", "files", "generate", "jobs", "keys", "models", "plan", "recipes", "up"],
)
def test_help_of_a_command_imports_no_slow_module(group: str) -> None:
    assert list_imports(group, "--help") & {*SLOW_MODULES, "swiftkv_platform.specs"} == set()


@pytest.mark.parametrize("group", ["jobs", "keys", "recipes"])
def test_only_the_program_installs_completion(group: str) -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output
    assert "--install-completion" not in CliRunner().invoke(app, [group, "--help"], env={"COLUMNS": "300"}).output


def test_summaries_are_the_first_lines_of_the_help() -> None:
    summaries = {name: command.help for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]
    loaded = {name: command.help.partition("\n\n")[0] for name, command in load_commands().commands.items()}
    assert {name: " ".join(text.split()) for name, text in loaded.items()} == summaries


def test_every_command_has_an_example_that_it_accepts() -> None:
    commands = dict(find_commands(load_commands()))
    assert commands.keys() == EXAMPLES.keys()
    for path, command in commands.items():
        shown = CliRunner().invoke(app, [*path.split(), "--help"], env={"COLUMNS": "300"}).output
        assert EXAMPLES[path] in shown
        assert not re.search(r"Undefined|\[None\]|<function|object at 0x", shown)
        words = shlex.split(EXAMPLES[path].partition(" > ")[0])
        named = "prune" if path == "sweep" else path
        assert words[: 1 + len(named.split())] == ["swiftkv", *named.split()]
        refused = ""
        try:
            command.make_context(command.name, words[1 + len(named.split()) :])
        except typer.BadParameter as error:  # the example's file
            refused = error.message
        assert refused == "" or "does not exist" in refused
