"""Identifiers are there to be copied: no width of a terminal or pipe breaks or cuts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swiftkv_platform.cli import output
from swiftkv_platform.cli.app import app
from tests.fakes.scripted_server import Script, json_answer, list_answer, serve

JOB, MODEL, DEPLOYMENT = (f"{kind}_01M81FFKAVT351GP1Y6VBZ512V" for kind in ("job", "mdl", "dep"))
ROW = {"id": JOB, "object": "distillation.job", "name": "tiny", "status": "queued", "created_at": 1, "attempt": 1}
COMMANDS = {
    "jobs submit -f {spec}": JOB,
    "jobs list": JOB,
    f"jobs get {JOB}": JOB,
    f"jobs cancel {JOB}": JOB,
    f"jobs pause {JOB}": JOB,
    f"jobs resume {JOB}": JOB,
    f"models promote {MODEL} --alias production --reason good": MODEL,
    f"deployments delete {DEPLOYMENT}": DEPLOYMENT,
    "deployments list": DEPLOYMENT,
    f"deployments get {DEPLOYMENT}": DEPLOYMENT,
    "models list": MODEL,
    f"models get {MODEL}": MODEL,
    f"models lineage {MODEL}": MODEL,
    "models aliases": MODEL,
    f"jobs checkpoints {JOB}": f"jobs/{JOB}/attempts/1/checkpoints/25",
}


@pytest.fixture
def script() -> Script:
    script = Script()
    script.on("POST", "/jobs", json_answer(ROW, 201))
    script.on("GET", "/jobs", list_answer([ROW]))
    script.on("GET", f"/jobs/{JOB}", json_answer(ROW))
    for action in ("cancel", "pause", "resume"):
        script.on("POST", f"/jobs/{JOB}/{action}", json_answer(ROW))
    promotion = {
        "id": "prm_1",
        "alias": "production",
        "model": MODEL,
        "reason": "good",
        "created_at": 1,
        "action": "promote",
    }
    script.on("POST", f"/models/{MODEL}/promote", json_answer({**promotion, "by": "ann"}))
    deployment = {"id": DEPLOYMENT, "model": MODEL, "status": "running", "url": "http://127.0.0.1:8001"}
    script.on("GET", "/deployments", list_answer([deployment]))
    script.on("GET", f"/deployments/{DEPLOYMENT}", json_answer(deployment))
    model = {"id": MODEL, "name": "tiny", "job_id": JOB}
    script.on("GET", "/models", list_answer([model]))
    script.on("GET", f"/models/{MODEL}", json_answer(model))
    script.on("GET", f"/models/{MODEL}/lineage", json_answer({"model": MODEL, "job_id": JOB}))
    aliased = {"id": "production", "model": MODEL, "history": [{**promotion, "by": "ann"}]}
    script.on("GET", "/aliases", list_answer([aliased]))
    key = f"jobs/{JOB}/attempts/1/checkpoints/25"
    checkpoint = {"id": "chk_1", "attempt": 1, "step": 25, "key": key, "size": 1, "sha256": "0"}
    script.on("GET", f"/jobs/{JOB}/checkpoints", list_answer([checkpoint]))
    script.on("DELETE", f"/deployments/{DEPLOYMENT}", json_answer({"id": DEPLOYMENT}))
    return script


@pytest.mark.parametrize("command", COMMANDS)
def test_a_narrow_terminal_breaks_no_id(script: Script, tmp_path: Path, command: str) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: tiny\n")
    with serve(script) as url:
        environment = {"SWIFTKV_HOME": str(tmp_path), "SWIFTKV_URL": url, "COLUMNS": "20"}
        arguments = [str(spec) if part == "{spec}" else part for part in command.split()]
        result = CliRunner(env=environment).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert COMMANDS[command] in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)


def test_what_is_printed_is_not_styled_by_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names come from servers and other users: brackets in them are text."""
    monkeypatch.setenv("COLUMNS", "20")
    output.say("[bold]job_1[/bold] of [/] a name longer than the terminal is wide :smile:")
    assert capsys.readouterr().out == "[bold]job_1[/bold] of [/] a name longer than the terminal is wide :smile:\n"
