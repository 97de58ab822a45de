"""Input of editors and shells: the schema files beside the recipes, and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app

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
