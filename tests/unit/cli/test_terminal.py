"""A job on a terminal and in a log file."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from swiftkv_platform.client import JobEvent
from swiftkv_platform.local.terminal import JobDisplay, follow


def event(kind: str, message: str, *, level: str = "info", **data: Any) -> JobEvent:
    row = {"id": "evt_1", "created_at": 1, "level": level, "type": kind, "message": message, "data": data}
    return JobEvent.model_validate(row)


def metrics(step: int, total_steps: int = 100) -> JobEvent:
    point = {"step": step, "loss": 2.0 / step, "tokens_per_second": 3456.7}
    return event("metrics", f"step {step}", points=[point], total_steps=total_steps)


def shown(events: list[JobEvent], *, terminal: bool) -> str:
    file = io.StringIO()
    follow(events, Console(file=file, force_terminal=terminal, width=120, emoji=False))
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
    assert lines[0].strip() == "step 10/100  loss 0.2000  3,457 tokens/s  ETA 1 min"
    assert lines[-1].strip() == "step 100/100  loss 0.0200  3,457 tokens/s"


def test_metrics_that_lack_figures_are_no_obstacle() -> None:
    bare = event("metrics", "step 1", points=[{"step": 1, "loss": None}], total_steps=None)
    assert shown([bare], terminal=False) == ""


def test_plain_lines_say_how_long_the_rest_takes() -> None:
    """Two seconds a step since the first metrics, which themselves say nothing of the pace."""
    console, now = Console(file=io.StringIO(), force_terminal=False), [100.0]
    display = JobDisplay(console, clock=lambda: now[0])
    for step in range(10, 101, 10):
        display.show(metrics(step))
        now[0] += 20.0
    assert isinstance(console.file, io.StringIO)
    first, second, *_, before, last = console.file.getvalue().splitlines()
    assert "ETA" not in first
    assert second.endswith("ETA 3 min")  # 80 steps
    assert before.endswith("ETA 1 min")
    assert "ETA" not in last
