"""Output of a job on a terminal and in a log file; identifiers are neither broken nor cut at any width."""

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from swiftkv_platform.cli import output
from swiftkv_platform.cli.app import app
from swiftkv_platform.client import JobEvent
from swiftkv_platform.local.terminal import show_events
from tests.support.fakes.scripted_server import Script, json_answer, list_answer, serve
from tests.unit.cli.conftest import job_row


def event(kind: str, message: str, *, level: str = "info", at: int = 1, **data: Any) -> JobEvent:
    row = {"id": "evt_1", "created_at": at, "level": level, "type": kind, "message": message, "data": data}
    return JobEvent.model_validate(row)


def metrics(step: int, total_steps: int = 100) -> JobEvent:
    """A metrics event of a run with two seconds a step."""
    point = {"step": step, "loss": 2.0 / step, "tokens_per_second": 3456.7}
    return event("metrics", f"step {step}", at=1000 + 2 * step, points=[point], total_steps=total_steps)


def shown(events: list[JobEvent], *, terminal: bool) -> str:
    file = io.StringIO()
    show_events(events, Console(file=file, force_terminal=terminal, width=120, emoji=False))
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_statuses_and_warnings_stay_on_the_screen(terminal: bool) -> None:
    events = [event("status", "running, attempt 1", status="running"), event("message", "slow [disk]", level="warn")]
    text = shown(events, terminal=terminal)
    assert "running, attempt 1" in text
    assert "slow [disk]" in text


def test_a_terminal_gets_one_bar_with_step_loss_and_speed() -> None:
    text = shown([event("status", "running", status="running"), *(metrics(n) for n in range(1, 101))], terminal=True)
    last = text[text.rindex("running") :]
    assert "100/100" in last
    assert "loss 0.0200" in last
    assert "3,457 tokens/s" in last


def test_a_log_file_gets_a_line_every_tenth_of_the_way() -> None:
    text = shown([metrics(n) for n in range(1, 101)], terminal=False)
    lines = text.splitlines()
    assert len(lines) == 10
    assert lines[0].strip() == "step 10/100  loss 0.2000  3,457 tokens/s  ETA 3 min"
    assert lines[-1].strip() == "step 100/100  loss 0.0200  3,457 tokens/s"


def test_metrics_that_lack_figures_are_no_obstacle() -> None:
    bare = event("metrics", "step 1", points=[{"step": 1, "loss": None}], total_steps=None)
    assert shown([bare], terminal=False) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_time_left_goes_by_when_steps_were_done_not_by_when_they_are_shown(terminal: bool) -> None:
    """A watcher that connects late gets all steps at once, so the time left goes by the times of the steps."""
    text = shown([metrics(step) for step in range(10, 90, 10)], terminal=terminal)
    assert "ETA 40 s" in text[text.rindex("80/100") :]  # 20 steps of 2 s
    assert "ETA" not in shown([metrics(1)], terminal=terminal)
    trials = [metrics(step) for step in range(10, 90, 10)]
    for each in trials:
        each.data["points"][0]["trial"] = 0
    assert "ETA" not in shown(trials, terminal=terminal), "between two trials there is other work"


JOB, MODEL = (f"{kind}_01M81FFKAVT351GP1Y6VBZ512V" for kind in ("job", "mdl"))

COMMANDS = {
    "jobs submit -f {spec}": JOB,
    "jobs list": JOB,
    f"jobs get {JOB}": JOB,
    f"models lineage {MODEL}": MODEL,
}
"""A command for each form of output (a line, a table, fields, nested fields), with an identifier that it prints."""


@pytest.fixture
def script() -> Script:
    script = Script()
    script.on("POST", "/jobs", json_answer(job_row(id=JOB), 201))
    script.on("GET", "/jobs", list_answer([job_row(id=JOB)]))
    script.on("GET", f"/jobs/{JOB}", json_answer(job_row(id=JOB)))
    lineage = {"model": "m", "job_id": JOB, "ancestors": [{"name": MODEL, "job_id": JOB}]}
    script.on("GET", f"/models/{MODEL}/lineage", json_answer(lineage))
    return script


def test_a_narrow_terminal_breaks_no_id(script: Script, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: tiny\n")
    with serve(script) as url:
        environment = {"SWIFTKV_HOME": str(tmp_path), "SWIFTKV_URL": url, "COLUMNS": "20"}
        for command, identifier in COMMANDS.items():
            arguments = [str(spec) if part == "{spec}" else part for part in command.split()]
            result = CliRunner(env=environment).invoke(app, arguments)
            assert result.exit_code == 0, result.output
            assert identifier in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout), command


def test_what_is_printed_is_not_styled_by_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names come from servers and other users, so brackets in them are text and not markup."""
    monkeypatch.setenv("COLUMNS", "20")
    output.print_line("[bold]job_1[/bold] of [/] a name longer than the terminal is wide :smile:")
    assert capsys.readouterr().out == "[bold]job_1[/bold] of [/] a name longer than the terminal is wide :smile:\n"


def test_control_characters_of_other_people_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Captured requests and answers of models may have any."""
    text = "a\x1b]0;title\x07\x9b2J\x7f\r"
    shown = r"a\x1b]0;title\x07\x9b2J\x7f\x0d"
    output.print_table(("asked",), [(text,)], empty="")
    output.print_fields({"asked": text})
    output.print_line(text)
    table_text, field_text, line = capsys.readouterr().out.splitlines()[1:]
    assert (table_text, field_text, line) == (shown, f"asked  {shown}", shown)


def table(rows: list[tuple[str, str]], width: int, *, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, emoji=False)
    monkeypatch.setattr(output, "get_console", lambda: console)
    output.print_table(("id", "message"), rows, empty="")
    return file.getvalue().splitlines()


def test_a_table_fits_a_terminal_and_breaks_at_spaces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(JOB, "ein [bold] 日本 sentence of many words"), (MODEL, "a\nb")]
    lines = table(rows, 50, terminal=True, monkeypatch=monkeypatch)
    assert [line.split()[0] for line in lines[:2]] == ["id", JOB]
    assert (max(map(cell_len, lines)), len(lines)) == (50, 6)
    assert "[bold]" in " ".join(lines)
    narrow = table(rows, 10, terminal=True, monkeypatch=monkeypatch)
    assert [line.split()[0] for line in narrow if line[0] != " "] == ["id", JOB, MODEL], "ids are never cut"
    assert len(table(rows, 50, terminal=False, monkeypatch=monkeypatch)) == 4, "one line for each row in a pipe"


def test_long_steps_are_shown_without_a_terminal_and_short_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.show_activity("short"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "_STEP_INTERVAL_S", 0.05)
    with output.show_activity("Loading [x]") as show:
        time.sleep(0.3)
        show("Measuring kl: 1 of 2")
        time.sleep(0.3)
    assert capsys.readouterr().err.splitlines() == ["Loading [x]", "Measuring kl: 1 of 2"]
