"""Verdicts of quality gates in a report, `evaluation.json` as plain values, of this version or an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Verdict = Literal["passed", "undecided", "failed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""The best first."""


def verdict_of(gate: Mapping[str, Any]) -> Verdict:
    """The verdict of one gate; reports of before `outcome` know `passed` alone."""
    outcome = gate.get("outcome")
    if outcome in VERDICTS:
        return VERDICTS[VERDICTS.index(outcome)]
    return "passed" if gate.get("passed") else "failed"


def verdict(report: Mapping[str, Any]) -> Verdict:
    """The worst verdict of a report's gates; `passed` where there are none."""
    worst = max((VERDICTS.index(verdict_of(gate)) for gate in report.get("gates") or ()), default=0)
    return VERDICTS[worst]


def undecided(report: Mapping[str, Any]) -> list[str]:
    """The gates of a report that its samples could not decide, one a text with its figures."""
    return [
        f"{gate['subject']} is {gate['value']:.4g}, {gate['field']} asks for {gate['limit']:g}"
        for gate in report.get("gates") or ()
        if verdict_of(gate) == "undecided"
    ]
