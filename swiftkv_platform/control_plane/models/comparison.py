"""Comparison of two models: quality, prefill compute and cache size, and differences of their jobs. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from swiftkv_platform.control_plane.http.answers import Answer
from swiftkv_platform.control_plane.models.model import Model

_STUDENT = ".student"
"""Suffix of the name of a student's score on a task."""
_BETTER: Mapping[str, Literal["lower", "higher"]] = {
    "distilled.perplexity": "lower",
    "distilled.kl": "lower",
    "distilled.top1_agreement": "higher",
    "prefill_flops_ratio": "lower",
    "kv_bytes_ratio": "lower",
}
"""Figures of `evaluation.json` that two models are compared by."""
_SAME = ("teacher", "revision", "data_fingerprint")
"""Keys of the lineage that must agree for quality to be comparable."""


class FigureAnswer(Answer):
    name: str
    """Path in `evaluation.json`."""
    a: float | None
    b: float | None
    better: Literal["a", "b"] | None


class DifferenceAnswer(Answer):
    name: str
    a: Any
    b: Any


class ComparisonAnswer(Answer):
    """Two models side by side."""

    object: Literal["comparison"] = "comparison"
    a: str
    b: str
    figures: list[FigureAnswer]
    differences: list[DifferenceAnswer]
    """Differences of teacher, revision and data; if there are any, quality was not measured on equal terms."""
    spec_differences: list[DifferenceAnswer]
    """Differences by dotted path of the spec."""


def compare(a: Model, b: Model) -> ComparisonAnswer:
    """Compare quality, prefill compute and cache size of two models, and the lineage and specs they were made from."""
    return ComparisonAnswer(
        a=a.id,
        b=b.id,
        figures=[_figure(name, a, b) for name in [*_BETTER, *_task_scores(a, b)]],
        differences=_different(*({name: model.lineage.get(name) for name in _SAME} for model in (a, b))),
        spec_differences=_different(*(_flat(model.lineage.get("spec") or {}) for model in (a, b))),
    )


def _figure(name: str, a: Model, b: Model) -> FigureAnswer:
    figures = _flat(a.metrics)
    first, second = _number(figures.get(name)), _number(_flat(b.metrics).get(name))
    less_is_better = (
        _BETTER.get(name) == "lower" or figures.get(f"{name.removesuffix(_STUDENT)}.higher_is_better") is False
    )
    better: Literal["a", "b"] | None = None
    if first is not None and second is not None and first != second:
        better = "a" if (first < second) == less_is_better else "b"
    return FigureAnswer(name=name, a=first, b=second, better=better)


def _task_scores(a: Model, b: Model) -> list[str]:
    """Return the names of student scores on tasks that both models were evaluated on."""
    flat = [_flat(model.metrics) for model in (a, b)]
    return sorted(name for name in flat[0].keys() & flat[1].keys() if name.endswith(_STUDENT))


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        elif name == "tasks" and all(isinstance(each, Mapping) and "task" in each for each in value):
            flat.update(_flat({each["task"]: each for each in value}, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[DifferenceAnswer]:
    pairs = ((name, a.get(name), b.get(name)) for name in sorted({*a, *b}))
    return [DifferenceAnswer(name=name, a=ours, b=theirs) for name, ours, theirs in pairs if ours != theirs]
