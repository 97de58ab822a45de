"""Verdicts on a report's quality gates, and a summary in one sentence. Reports are `evaluation.json` as plain values,
from this version or an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

Verdict = Literal["passed", "undecided", "failed"]
NEEDLE = "needle_"
"""Prefix of the names of tasks that hide numbers in prompts; the prompts' length in tokens follows."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""All verdicts, the best first."""


def verdict_of(gate: Mapping[str, Any]) -> Verdict:
    """Return the verdict of one gate; gates in older reports have only `passed`."""
    outcome = gate.get("outcome")
    if outcome in VERDICTS:
        return VERDICTS[VERDICTS.index(outcome)]
    return "passed" if gate.get("passed") else "failed"


def verdict(report: Mapping[str, Any]) -> Verdict:
    """Return the worst verdict of a report's gates; `passed` if there are none."""
    worst = max((VERDICTS.index(verdict_of(gate)) for gate in report.get("gates") or ()), default=0)
    return VERDICTS[worst]


def undecided(report: Mapping[str, Any]) -> list[str]:
    """Describe each gate of a report that its samples could not decide, with its figures."""
    return [
        f"{gate['subject']} is {gate['value']:.4g}, and {gate['field']} is {gate['limit']:g}"
        for gate in report.get("gates") or ()
        if verdict_of(gate) == "undecided"
    ]


def verdict_sentence(report: Mapping[str, Any] | None) -> str | None:
    """Summarise a model's measured quality and speed in a sentence; None if nothing was measured."""
    said = "; ".join(_measured(report or {}))
    return f"{said[0].upper()}{said[1:]}." if said else None


def _measured(report: Mapping[str, Any]) -> Iterator[str]:
    times, length, ratio = report.get("ttft_ms"), report.get("prompt_length"), report.get("perplexity_ratio")
    if times and length and times["dense"] and times["swiftkv"]:
        yield f"reads prompts of {length:,} tokens {times['dense'] / times['swiftkv']:.2g}x as fast as its teacher"
    if ratio is not None:
        yield f"on the held-out text its perplexity is {ratio:.3g}x the teacher's"
    for task in report.get("tasks") or ():
        if task["task"].startswith(NEEDLE):
            number, tokens = task["num_samples"], int(task["task"].removeprefix(NEEDLE))
            found, theirs = (round(task[who] * number) for who in ("student", "teacher"))
            yield f"finds {found} of {number} numbers in {tokens:,} tokens, its teacher {theirs}"
