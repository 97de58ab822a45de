"""Progress display of a running job: a live bar on terminals, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from swiftkv_platform.contract.events import Pace
from swiftkv_platform.local.formats import format_duration

_STYLE_BY_LEVEL = {"info": "dim", "warn": "yellow", "error": "bold red"}
_MAX_PROGRESS_LINES = 10
"""Max progress lines of a job if the output is not a terminal."""


class Event(Protocol):
    """An event of a job or attempt."""

    @property
    def level(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def message(self) -> str: ...

    @property
    def data(self) -> Mapping[str, Any]: ...

    @property
    def time(self) -> float:
        """Unix seconds, by the clock of the machine that wrote the event."""
        ...


class JobDisplay:
    """Progress bar for training metrics; other events are printed, one line each. Thread-safe."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0
        self._total_steps: int | None = None
        self._last_metrics: dict[str, Any] = {}
        """The last step's metrics."""
        self._pace: Pace | None = None
        self._num_progress_lines = 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[steps]}"),
            TextColumn("[cyan]{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[time_left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("queued", total=None, **self._format_progress())

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show_event(self, event: Event) -> None:
        if event.type == "metrics":
            self._record_metrics(event)
            if not self._console.is_terminal:
                self._print_progress()
        else:
            self._print_line(escape(event.message), style=_STYLE_BY_LEVEL[event.level])
        status = event.data.get("status") if event.type == "status" else None
        self._bar.update(
            self._task, description=status, completed=self._step, total=self._total_steps, **self._format_progress()
        )

    def _record_metrics(self, event: Event) -> None:
        self._total_steps = event.data.get("total_steps") or self._total_steps
        if points := event.data.get("points"):
            self._last_metrics = points[-1]
            step = int(self._last_metrics["step"])
            self._pace = Pace.extend(self._pace, step, event.time, last_step=self._step)
            self._step = step

    def _format_progress(self) -> dict[str, Any]:
        """Return step, loss, speed and ETA. The ETA is empty without a known pace, in sweeps, and at the end."""
        numbers, left = [], None
        if self._last_metrics.get("loss") is not None:
            numbers.append(f"loss {self._last_metrics['loss']:.4f}")
        if self._last_metrics.get("tokens_per_second") is not None:
            numbers.append(f"{self._last_metrics['tokens_per_second']:,.0f} tokens/s")
        if self._pace is not None and "trial" not in self._last_metrics:
            left = self._pace.estimate_seconds_remaining(self._step, self._total_steps)
        return {
            "steps": f"{self._step}/{self._total_steps}" if self._total_steps else "",
            "numbers": "  ".join(numbers),
            "time_left": f"ETA {format_duration(left)}" if left else "",
        }

    def _print_progress(self) -> None:
        """Print a progress line after every tenth of the steps."""
        lines = self._step * _MAX_PROGRESS_LINES // self._total_steps if self._total_steps else 0
        if lines != self._num_progress_lines:
            self._num_progress_lines = lines
            figures = self._format_progress()
            self._print_line("  ".join(filter(None, (f"step {figures.pop('steps')}", *figures.values()))))

    def _print_line(self, line: str, style: str | None = None) -> None:
        self._console.print(f"  {line}", style=style, highlight=False, soft_wrap=True)


def show_events(events: Iterable[Event], console: Console) -> None:
    """Show events on the console until the stream ends."""
    with JobDisplay(console) as display:
        for event in events:
            display.show_event(event)
