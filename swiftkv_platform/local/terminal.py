"""Progress display of a running job (a live bar on a terminal, plain lines elsewhere), and human-readable numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from swiftkv_platform.contract.events import Pace

_STYLES = {"info": "dim", "warn": "yellow", "error": "bold red"}
_PLAIN_LINES = 10
"""Progress lines printed in a whole run if the output is not a terminal."""


class Event(Protocol):
    """A job's or an attempt's event."""

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


@dataclass
class JobView:
    """State of a job, derived from its events."""

    status: str = "queued"
    step: int = 0
    total_steps: int | None = None
    point: dict[str, Any] = field(default_factory=dict)
    """The last step's metrics."""
    pace: Pace | None = None

    def apply(self, event: Event) -> None:
        """Update the view from an event."""
        if event.type == "status":
            self.status = str(event.data.get("status", self.status))
        elif event.type == "metrics":
            self.total_steps = event.data.get("total_steps") or self.total_steps
            points = event.data.get("points", [])
            if points:
                self.point = points[-1]
                step = int(self.point["step"])
                self.pace = Pace.after(self.pace, step, event.time, last_step=self.step)
                self.step = step

    @property
    def steps(self) -> str:
        return f"{self.step}/{self.total_steps}" if self.total_steps else ""

    @property
    def numbers(self) -> str:
        """Loss and speed of the last step."""
        parts = []
        if self.point.get("loss") is not None:
            parts.append(f"loss {self.point['loss']:.4f}")
        if self.point.get("tokens_per_second") is not None:
            parts.append(f"{self.point['tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)

    @property
    def time_left(self) -> str:
        """Estimated time to the last step, as in the API; empty if no pace is known, in a sweep, and at the end."""
        if self.pace is None or "trial" in self.point:
            return ""
        left = self.pace.seconds_remaining(self.step, self.total_steps)
        return f"ETA {duration(left)}" if left else ""


class JobDisplay:
    """Shows events as they arrive, from any thread. Events other than metrics are printed, one line each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._view = JobView()
        self._lines_shown = 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[view].steps}"),
            TextColumn("[cyan]{task.fields[view].numbers}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[view].time_left}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._view.status, total=None, view=self._view)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        """Show an event."""
        self._view.apply(event)
        if event.type != "metrics":
            self._print(escape(event.message), style=_STYLES[event.level])
        elif not self._console.is_terminal:
            self._print_share()
        view = self._view
        self._bar.update(self._task, description=view.status, completed=view.step, total=view.total_steps)

    def _print_share(self) -> None:
        view = self._view
        lines = view.step * _PLAIN_LINES // view.total_steps if view.total_steps else 0
        if lines != self._lines_shown:
            self._lines_shown = lines
            self._print("  ".join(part for part in (f"step {view.steps}", view.numbers, view.time_left) if part))

    def _print(self, line: str, style: str | None = None) -> None:
        self._console.print(f"  {line}", style=style, highlight=False, soft_wrap=True)


def follow(events: Iterable[Event], console: Console) -> None:
    """Show a job's events until they end."""
    with JobDisplay(console) as display:
        for event in events:
            display.show(event)


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def size(num_bytes: float) -> str:
    """Format bytes as `124 MiB`: three digits, in powers of 1,024."""
    return _scaled(num_bytes, 1024, _BINARY)


def flops(number: float) -> str:
    """Format as `29.6 TFLOPs`: three digits, in powers of 1,000."""
    return f"{_scaled(number, 1000, _DECIMAL)}FLOPs"


def count(number: float) -> str:
    """Format as `5.99 million`, with three digits; numbers below a million in full."""
    for least, name in ((1e9, "billion"), (1e6, "million")):
        if number >= least:
            return f"{number / least:.3g} {name}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """Format as `4 min 10 s`, with the two largest units."""
    whole = round(seconds)
    parts = (
        (whole // _DAY_S, "d"),
        (whole % _DAY_S // _HOUR_S, "h"),
        (whole % _HOUR_S // _MINUTE_S, "min"),
        (whole % _MINUTE_S, "s"),
    )
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    shown = [(number, unit) for number, unit in parts[first : first + 2] if number]
    return " ".join(f"{number} {unit}" for number, unit in shown) or "0 s"


def plural(number: float, thing: str) -> str:
    """Format as `1 step`, `2 steps`."""
    return f"{number:,g} {thing}{'' if number == 1 else 's'}"


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # Three digits would round 999.5 and more to 1000: use the next unit.
    while power < len(units) - 1 and number >= 999.5 * base**power:
        power += 1
    value = number / base**power
    return f"{value:.3g} {units[power]}"
