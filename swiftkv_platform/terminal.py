"""What a person sees of a running job: a live bar on a terminal, plain lines elsewhere. Knows rich and job events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from swiftkv_platform.client import JobEvent

_STYLES = {"info": "dim", "warn": "yellow", "error": "bold red"}
_PLAIN_LINES = 10
"""Progress lines over a whole run where the output is no terminal."""


@dataclass
class JobView:
    """A job as its events tell it."""

    status: str = "queued"
    step: int = 0
    total_steps: int | None = None
    point: dict[str, Any] = field(default_factory=dict)
    """The last step's metrics."""

    def apply(self, event: JobEvent) -> None:
        """Take an event in."""
        if event.type == "status":
            self.status = str(event.data.get("status", self.status))
        elif event.type == "metrics":
            self.total_steps = event.data.get("total_steps") or self.total_steps
            for point in event.data.get("points", []):
                self.point = point
                self.step = int(point["step"])

    @property
    def numbers(self) -> str:
        """Loss and speed of the last step."""
        parts = []
        if self.point.get("loss") is not None:
            parts.append(f"loss {self.point['loss']:.4f}")
        if self.point.get("tokens_per_second") is not None:
            parts.append(f"{self.point['tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)


def follow(events: Iterable[JobEvent], console: Console) -> JobView:
    """Show a job's events until they end; what is not a metric stays on the screen, one line an event."""
    return _follow_live(events, console) if console.is_terminal else _follow_plainly(events, console)


def _follow_live(events: Iterable[JobEvent], console: Console) -> JobView:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.fields[steps]}"),
        TextColumn("[cyan]{task.fields[numbers]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    view = JobView()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(view.status, total=None, steps="", numbers="")
        for event in _with_lines(events, console):
            view.apply(event)
            steps = f"{view.step}/{view.total_steps}" if view.total_steps else ""
            progress.update(
                task,
                description=view.status,
                completed=view.step,
                total=view.total_steps,
                steps=steps,
                numbers=view.numbers,
            )
    return view


def _follow_plainly(events: Iterable[JobEvent], console: Console) -> JobView:
    view = JobView()
    shown = 0
    for event in _with_lines(events, console):
        view.apply(event)
        if event.type != "metrics" or not view.total_steps:
            continue
        share = view.step * _PLAIN_LINES // view.total_steps
        if share != shown:
            shown = share
            console.print(f"  step {view.step}/{view.total_steps}  {view.numbers}", highlight=False)
    return view


def _with_lines(events: Iterable[JobEvent], console: Console) -> Iterator[JobEvent]:
    for event in events:
        if event.type != "metrics":
            console.print(f"[{_STYLES[event.level]}]{escape(event.message)}[/]", highlight=False)
        yield event
