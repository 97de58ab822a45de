"""Input of editors and shells: the schema files beside the recipes, and completion."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from swiftkv_platform.cli import context
from swiftkv_platform.cli.app import app
from tests.fakes.scripted_server import Script, list_answer, serve

RECIPES = sorted(Path("jobs/recipes").glob("*.yaml"))
JOB, DEPLOYMENT = Path("jobs/schemas/job.json"), Path("jobs/schemas/deployment.json")


@pytest.mark.parametrize(("file", "command"), [(JOB, "jobs"), (DEPLOYMENT, "deployments")])
def test_the_schema_files_are_what_the_command_prints(file: Path, command: str) -> None:
    printed = CliRunner().invoke(app, [command, "schema"]).output
    assert file.read_text() == printed, f"write it again: swiftkv {command} schema > {file}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_the_schema_and_fit_it(recipe: Path) -> None:
    first = recipe.read_text().partition("\n")[0]
    prefix, _, target = first.partition("$schema=")
    assert prefix == "# yaml-language-server: "
    assert (recipe.parent / target).resolve() == JOB.resolve()
    jsonschema.validate(yaml.safe_load(recipe.read_text()), json.loads(JOB.read_text()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training": {"batch_sise": 4}}, "batch_sise"),
        ({"sharding": {"strategy": "zero"}}, "zero"),
        ({"swiftkv": {"num_key_value_layers": 0}}, "0"),
    ],
)
def test_an_editor_sees_what_a_job_would_be_refused_for(change: dict[str, Any], named: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=named):
        jsonschema.validate({"name": "x", **change}, json.loads(JOB.read_text()))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("swiftkv jo", "jobs"), ("swiftkv jobs pau", "pause"), ("swiftkv jobs submit --fol", "--follow")],
)
def test_bash_completes_commands_and_options(typed: str, offered: str) -> None:
    words = typed.split()
    environment = {"_SWIFTKV_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-m", "swiftkv_platform.cli"]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert offered in result.stdout.split(), result.stderr


def completed(typed: str, url: str) -> subprocess.CompletedProcess[str]:
    """Ask for what bash would offer for the last word of a line."""
    environment = {
        "_SWIFTKV_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
        "SWIFTKV_URL": url,
    }
    command = [sys.executable, "-m", "swiftkv_platform.cli"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.fixture
def script() -> Script:
    script = Script()
    row = {"object": "distillation.job", "name": "tiny", "status": "running", "created_at": 1}
    script.on("GET", "/jobs", list_answer([{**row, "id": "job_2"}, {**row, "id": "job_1"}]))
    script.on("GET", "/models", list_answer([{"id": "mdl_1", "name": "tiny"}]))
    script.on("GET", "/deployments", list_answer([{"id": "dep_1", "model": "mdl_1", "status": "running"}]))
    return script


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("swiftkv jobs get ", ["job_2", "job_1"]),
        ("swiftkv jobs logs --follow job_1", ["job_1"]),
        ("swiftkv jobs get mdl", []),
        ("swiftkv models compare mdl_1 m", ["mdl_1"]),
        ("swiftkv deploy m", ["mdl_1"]),
        ("swiftkv deploy mdl_1 --replace d", ["dep_1"]),
        ("swiftkv deployments delete ", ["dep_1"]),
    ],
)
def test_bash_completes_ids(script: Script, typed: str, offered: list[str]) -> None:
    with serve(script) as url:
        result = completed(typed, url)
    assert result.stdout.split() == offered
    assert result.stderr == ""


def test_completion_says_nothing_where_the_control_plane_is_away_or_refuses() -> None:
    script = Script()
    with serve(script) as url:
        refused = completed("swiftkv jobs get ", url)
    away = completed("swiftkv jobs get ", url)
    assert [each.stdout.strip() + each.stderr for each in (refused, away)] == ["", ""]


def test_completion_does_not_wait_for_a_control_plane_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ctx = typer.Context(typer.main.get_command(app))
        ctx.params["url"] = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert context.complete_job(ctx, "") == []  # the client itself would wait for a minute
