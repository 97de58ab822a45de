"""Findings, and how checks run: side by side, each within its time. Knows no check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from swiftkv_platform.local.stack import Stack
from swiftkv_platform.settings import Settings

Status = Literal["ok", "warning", "failed"]
_BY_WEIGHT: tuple[Status, ...] = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Finding:
    """Outcome of a check."""

    status: Status
    message: str
    """One sentence."""
    advice: str = ""
    """Remedy; empty where there is nothing to do."""


@dataclass(frozen=True)
class Surroundings:
    """Configuration that checks look at."""

    settings: Settings
    min_free_bytes: int
    """Free space below which a directory is too full."""
    timeout_s: float
    """Seconds that a check may take."""

    @property
    def stack(self) -> Stack:
        """The local stack, started or not."""
        return Stack(self.settings)


@dataclass(frozen=True)
class Check:
    """One thing to look at."""

    name: str
    examine: Callable[[Surroundings], Finding]
    remedy: str
    """Advice where the check itself ends neither in time nor in order."""


def run_checks(checks: Iterable[Check], surroundings: Surroundings) -> list[tuple[str, Finding]]:
    """Names and findings in the order of the checks, after `surroundings.timeout_s` seconds at the latest."""
    deadline = time.monotonic() + surroundings.timeout_s
    running = [(check, _start(check, surroundings)) for check in checks]
    return [(check.name, _finding(check, answer, deadline, surroundings.timeout_s)) for check, answer in running]


def worst(findings: Sequence[Finding]) -> Finding:
    """The findings of the gravest status as one."""
    status = max((each.status for each in findings), key=_BY_WEIGHT.index)
    gravest = [each for each in findings if each.status == status]
    advice = dict.fromkeys(each.advice for each in gravest if each.advice)
    message = "; ".join(each.message.removesuffix(".") for each in gravest)
    return Finding(status, f"{message}.", "; ".join(advice))


def one_line(error: object) -> str:
    """The text of an error without its line breaks."""
    return " ".join(str(error).split())


def _start(check: Check, surroundings: Surroundings) -> SimpleQueue[Finding]:
    answer: SimpleQueue[Finding] = SimpleQueue()
    # A daemon: what hangs in a driver's code is left behind when the process ends.
    threading.Thread(target=lambda: answer.put(_examined(check, surroundings)), daemon=True).start()
    return answer


def _examined(check: Check, surroundings: Surroundings) -> Finding:
    try:
        return check.examine(surroundings)
    except ModuleNotFoundError as error:
        advice = "pip install 'swiftkv-platform[train,serve]' where jobs or deployments are to run"
        return Finding("warning", f"Not looked at: {error.name} is not installed.", advice)
    except Exception as error:  # a defect of one check must not hide what the others have found
        return Finding("failed", f"The check broke: {type(error).__name__}: {one_line(error)}.", check.remedy)


def _finding(check: Check, answer: SimpleQueue[Finding], deadline: float, timeout_s: float) -> Finding:
    try:
        return answer.get(timeout=max(0.0, deadline - time.monotonic()))
    except Empty:
        return Finding("failed", f"No answer within {timeout_s:g} s.", check.remedy)
