"""Progress display of a running job (a live bar on terminals, plain lines elsewhere), and number formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from swiftkv_platform.contract.events import Pace

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


_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def format_size(num_bytes: float) -> str:
    """Format bytes, e.g. `124 MiB`: 3 digits, powers of 1,024."""
    return _format_scaled(num_bytes, 1024, _BYTE_UNITS)


def format_flops(number: float) -> str:
    """Format FLOPs, e.g. `29.6 TFLOPs`: 3 digits, powers of 1,000."""
    return f"{_format_scaled(number, 1000, _DECIMAL_PREFIXES)}FLOPs"


def format_count(number: float) -> str:
    """Format a count, e.g. `5.99 million` with 3 digits, or `819,200` in full below a million."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units, e.g. `4 min 10 s`."""
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


def pluralize(number: float, noun: str) -> str:
    """Return e.g. `1 step` or `2 steps`."""
    return f"{number:,g} {noun}{'' if number == 1 else 's'}"


def _format_scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # 3 digits round 999.5 to 1000: use the next unit.
    while power < len(units) - 1 and number >= 999.5 * base**power:
        power += 1
    value = number / base**power
    return f"{value:.3g} {units[power]}"
