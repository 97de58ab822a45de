"""Findings of `swiftkv doctor`, and running of checks in parallel with a time limit. Knows no check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from queue import Empty, SimpleQueue
from typing import Literal

from rich.markup import escape

from swiftkv_platform.cli.output import out
from swiftkv_platform.installing import install_command
from swiftkv_platform.local.stack import Stack
from swiftkv_platform.settings import Settings

GIB = 1 << 30
Status = Literal["ok", "warning", "failed"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
"""Styles by status, from the mildest to the worst."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check: one sentence, and advice if there is something to do."""

    status: Status
    message: str
    advice: str = ""


@dataclass(frozen=True)
class Surroundings:
    """Configuration for checks."""

    settings: Settings
    min_free_bytes: int
    """Least free space of a directory's disk."""
    timeout_s: float
    """Most seconds for a check."""

    @property
    def stack(self) -> Stack:
        """Local stack, started or not."""
        return Stack(self.settings)


@dataclass(frozen=True)
class Check:
    """One check. `remedy`: advice if the check itself fails or does not end in time."""

    name: str
    examine: Callable[[Surroundings], Finding]
    remedy: str


def check(name: str, remedy: str) -> Callable[[Callable[[Surroundings], Finding]], Check]:
    """Decorator that turns a function into a check."""
    return lambda examine: Check(name, examine, remedy)


def ok(message: str) -> Finding:
    return Finding("ok", message)


def warning(message: str, advice: str) -> Finding:
    return Finding("warning", message, advice)


def failed(message: str, advice: str) -> Finding:
    return Finding("failed", message, advice)


def print_findings(results: list[tuple[str, Finding]]) -> None:
    """Print a line for each check with its advice below, and the number of findings by status."""
    width = max(len(name) for name, _ in results)
    for name, finding in results:
        status = f"[{_STYLES[finding.status]}]{finding.status:<7}[/]"
        line = f"{status}  [bold]{name:<{width}}[/]  {escape(finding.message)}"
        out().print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            out().print(f"{'':<9}{'':<{width}}  To do: {escape(finding.advice)}", highlight=False, soft_wrap=True)
    out().print(", ".join(f"{number} {status}" for status, number in count(results).items()) + ".", highlight=False)


def count(results: list[tuple[str, Finding]]) -> dict[str, int]:
    """Return the number of findings by status."""
    return {status: sum(finding.status == status for _, finding in results) for status in _STYLES}


def run_checks(checks: Iterable[Check], surroundings: Surroundings) -> list[tuple[str, Finding]]:
    """Return names and findings in the order of the checks, within `surroundings.timeout_s` seconds."""
    deadline = time.monotonic() + surroundings.timeout_s
    running = [(one, _start(one, surroundings)) for one in checks]
    return [(one.name, _finding(one, answer, deadline, surroundings.timeout_s)) for one, answer in running]


def worst(findings: Sequence[Finding]) -> Finding:
    """Join the findings of the worst status into one."""
    status = max((each.status for each in findings), key=list(_STYLES).index)
    gravest = [each for each in findings if each.status == status]
    advice = dict.fromkeys(each.advice for each in gravest if each.advice)
    message = "; ".join(each.message.removesuffix(".") for each in gravest)
    return Finding(status, f"{message}.", "; ".join(advice))


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def one_line(error: object) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


def _start(one: Check, surroundings: Surroundings) -> SimpleQueue[Finding]:
    answer: SimpleQueue[Finding] = SimpleQueue()
    # A daemon thread, so that a check that hangs in a driver does not keep the process from ending.
    threading.Thread(target=lambda: answer.put(_examined(one, surroundings)), daemon=True).start()
    return answer


def _examined(one: Check, surroundings: Surroundings) -> Finding:
    try:
        return one.examine(surroundings)
    except ModuleNotFoundError as error:
        advice = f"{install_command('train', 'serve')} where jobs or deployments are to run"
        return warning(f"Not checked: {error.name} is not installed.", advice)
    except Exception as error:  # a bug in one check must not hide the others' findings
        return failed(f"The check broke: {type(error).__name__}: {one_line(error)}.", one.remedy)


def _finding(one: Check, answer: SimpleQueue[Finding], deadline: float, timeout_s: float) -> Finding:
    try:
        return answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except Empty:
        return failed(f"No answer within {timeout_s:g} s.", one.remedy)
