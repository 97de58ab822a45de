"""Verdicts of a report's quality gates, and a one-sentence summary. A report is the content of `evaluation.json`, of
this version or an earlier one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from swiftkv_platform.specs.evaluation import NEEDLE_PREFIX

Verdict = Literal["passed", "undecided", "failed"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""All verdicts, best first."""


def read_gate_verdict(gate: Mapping[str, Any]) -> Verdict:
    """Return the verdict of one gate; older reports have only `passed`."""
    outcome = gate.get("outcome")
    if outcome in VERDICTS:
        return VERDICTS[VERDICTS.index(outcome)]
    return "passed" if gate.get("passed") else "failed"


def find_worst_verdict(report: Mapping[str, Any]) -> Verdict:
    """Return the worst verdict of a report's gates; `passed` without gates."""
    worst = max((VERDICTS.index(read_gate_verdict(gate)) for gate in report.get("gates") or ()), default=0)
    return VERDICTS[worst]


def describe_undecided_gates(report: Mapping[str, Any]) -> list[str]:
    """Return value and limit of each undecided gate, in words."""
    return [
        f"{gate['subject']} is {gate['value']:.4g} (limit {gate['field']}: {gate['limit']:g})"
        for gate in report.get("gates") or ()
        if read_gate_verdict(gate) == "undecided"
    ]


def summarize_quality(report: Mapping[str, Any] | None) -> str | None:
    """Summarize a model's measured quality and speed in a sentence; None if nothing was measured."""
    sentence = "; ".join(_describe_measurements(report or {}))
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else None


def _describe_measurements(report: Mapping[str, Any]) -> Iterator[str]:
    times, length, ratio = report.get("ttft_ms"), report.get("prompt_length"), report.get("perplexity_ratio")
    if times and length and times["dense"] and times["swiftkv"]:
        yield f"prefills prompts of {length:,} tokens {times['dense'] / times['swiftkv']:.2g}x as fast as its teacher"
    if ratio is not None:
        yield f"perplexity on held-out text is {ratio:.3g}x the teacher's"
    for task in report.get("tasks") or ():
        if task["task"].startswith(NEEDLE_PREFIX):
            number, tokens = task["num_samples"], int(task["task"].removeprefix(NEEDLE_PREFIX))
            found, theirs = (round(task[model] * number) for model in ("student", "teacher"))
            yield f"finds {found} of {number} numbers hidden in prompts of {tokens:,} tokens (teacher: {theirs})"
