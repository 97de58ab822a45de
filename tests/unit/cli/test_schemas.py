"""Schema files for editors, completion for shells, and the commands that the documentation shows."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import typer.main
import yaml
from typer._completion_classes import BashComplete
from typer.core import TyperGroup
from typer.testing import CliRunner

from swiftkv_platform.cli import context
from swiftkv_platform.cli.app import app, load_commands
from swiftkv_platform.specs.deployment import DeploymentSpec
from tests.support.documented import blocks
from tests.support.fakes.scripted_server import Script, list_answer, serve

RECIPES = sorted(Path("jobs/recipes").glob("*.yaml"))

JOB, DEPLOYMENT = Path("jobs/schemas/job.json"), Path("jobs/schemas/deployment.json")


@pytest.mark.parametrize(("file", "command"), [(JOB, "jobs"), (DEPLOYMENT, "deployments")])
def test_the_schema_files_are_what_the_command_prints(file: Path, command: str) -> None:
    printed = CliRunner().invoke(app, [command, "schema"]).output
    assert file.read_text() == printed, f"write it again: swiftkv {command} schema > {file}"


@pytest.fixture
def script() -> Script:
    script = Script()
    row = {"object": "distillation.job", "name": "tiny", "status": "running", "created_at": 1}
    script.on("GET", "/jobs", list_answer([{**row, "id": "job_2"}, {**row, "id": "job_1"}]))
    script.on("GET", "/models", list_answer([{"id": "mdl_1", "name": "tiny"}]))
    script.on("GET", "/deployments", list_answer([{"id": "dep_1", "model": "mdl_1", "status": "running"}]))
    return script


def test_completion_does_not_wait_for_a_control_plane_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "COMPLETION_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ctx = typer.Context(COMMAND)
        ctx.params["url"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert context.complete_job(ctx, "") == []  # without a timeout of its own, the client would wait a minute


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_the_schema_and_fit_it(recipe: Path) -> None:
    first = recipe.read_text().partition("\n")[0]
    prefix, _, target = first.partition("$schema=")
    assert prefix == "# yaml-language-server: "
    assert (recipe.parent / target).resolve() == JOB.resolve()
    jsonschema.validate(yaml.safe_load(recipe.read_text()), json.loads(JOB.read_text()))


def test_an_editor_sees_what_a_job_would_be_refused_for() -> None:
    for change, named in (
        ({"training": {"batch_sise": 4}}, "batch_sise"),
        ({"sharding": {"strategy": "zero"}}, "zero"),
        ({"swiftkv": {"num_key_value_layers": 0}}, "0"),
    ):
        with pytest.raises(jsonschema.ValidationError, match=named):
            jsonschema.validate({"name": "x", **change}, json.loads(JOB.read_text()))


COMMAND: Any = load_commands()


def completed(typed: str, monkeypatch: pytest.MonkeyPatch, url: str) -> list[str]:
    """Words that bash offers to complete the last word of a line."""
    monkeypatch.setenv("SWIFTKV_URL", url)
    _, *words, last = typed.split(" ")
    completion = BashComplete(COMMAND, {}, "swiftkv", "_SWIFTKV_COMPLETE")
    return [item.value for item in completion.get_completions(words, last)]


def test_shells_complete_commands_options_and_ids(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "COMPLETION_TIMEOUT_S", 60.0)  # the machine may be busy
    with serve(script) as url:
        for typed, offered in (
            ("swiftkv jo", ["jobs"]),
            ("swiftkv jobs pau", ["pause"]),
            ("swiftkv jobs submit --fol", ["--follow"]),
            ("swiftkv jobs get ", ["job_2", "job_1"]),
            ("swiftkv jobs logs --follow job_1", ["job_1"]),
            ("swiftkv jobs get mdl", []),
            ("swiftkv compare mdl_1 m", ["mdl_1"]),
            ("swiftkv deploy m", ["mdl_1"]),
            ("swiftkv deploy mdl_1 --replace d", ["dep_1"]),
            ("swiftkv deployments delete ", ["dep_1"]),
        ):
            assert completed(typed, monkeypatch, url) == offered, typed
        script.on("GET", "/jobs")
        assert completed("swiftkv jobs get ", monkeypatch, url) == [], "refused"
    assert completed("swiftkv jobs get ", monkeypatch, url) == [], "away"


def test_bash_prints_completions_and_nothing_else(script: Script) -> None:
    with serve(script) as url:
        typed = {"COMP_WORDS": "swiftkv jobs get ", "COMP_CWORD": "3", "SWIFTKV_URL": url}
        environment = {**os.environ, "_SWIFTKV_COMPLETE": "complete_bash", **typed}
        command = [sys.executable, "-m", "swiftkv_platform.cli"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout.split(), result.stderr) == (["job_2", "job_1"], "")


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
    assert [DeploymentSpec.model_validate(json.loads(body)).model for body in bodies] == ["mdl_one"] * 3


def test_documented_commands_are_accepted_and_name_files_of_the_repository() -> None:
    assert len(COMMANDS) > 40
    for place, command in COMMANDS:
        check_accepted(place, command)
        words = shlex.split(command, comments=True)
        named = [word for word in words if re.match(r"(jobs|benchmarks|infra|docs)/", word)]
        assert [path for path in named if not Path(path).exists()] == [], place


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` name, and the words after it. `a|b` names either of two commands."""
    command, rest = COMMAND, list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        alternatives = [command.commands[name] for name in rest.pop(0).split("|")]
        command = alternatives[0]
    return command, rest


def check_accepted(place: str, command: str) -> None:
    parsed, arguments = command_of(shlex.split(command.replace("\\\n", ""), comments=True)[1:])
    assert not isinstance(parsed, TyperGroup), f"{place}: {command} is a group, not a command"
    try:
        parsed.make_context(parsed.name, arguments)
    except typer.BadParameter as refused:
        if _STANDS_FOR_A_FILE.search(refused.message) is None:
            raise AssertionError(f"{place}: {command}: {refused.format_message()}") from refused


def unknown_options(span: str) -> list[str]:
    """Options of a command line that its command does not have."""
    command, words = command_of(shlex.split(span))
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    return [word for word in words if re.match(r"-{1,2}[a-z]", word) and word not in known]


def test_sentences_name_commands_options_and_targets_that_exist() -> None:
    """Commands in sentences may lack arguments, so only their names, options and targets are checked."""
    pages = [*PAGES, Path("CONTRIBUTING.md"), Path("SECURITY.md"), Path("CHANGELOG.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    made = [line for text in texts.values() for line in re.findall(r"(?:`|^|\n)make ([a-z -]+)", text)]
    assert len(made) > 10
    assert [name for line in made for name in line.split() if name not in targets] == []
    inline = [(page, span) for page, text in texts.items() for span in re.findall(r"(?<!`)`swiftkv ([^`]+)`", text)]
    assert len(inline) > 40
    assert [f"{page}: swiftkv {span}: {word}" for page, span in inline for word in unknown_options(span)] == []
