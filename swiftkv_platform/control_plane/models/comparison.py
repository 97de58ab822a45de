"""Comparison of two models: quality, prefill compute and cache size, and differences of their jobs. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class Figure:
    """One figure of two models."""

    name: str
    a: float | None
    b: float | None
    better: Literal["a", "b"] | None
    """Side with the better value; None if they are equal or one is missing."""


@dataclass(frozen=True)
class ModelComparison:
    a: Model
    b: Model
    figures: Sequence[Figure]
    differences: Mapping[str, tuple[Any, Any]]
    """Differences of lineage; if teacher, revision or data differ, quality was not measured on equal terms."""
    spec_differences: Mapping[str, tuple[Any, Any]]
    """Differences of the specs, by dotted path."""


def compare(a: Model, b: Model) -> ModelComparison:
    """Compare quality, prefill compute and cache size of two models, and the lineage and specs they were made from."""
    specs = [_flat(model.lineage.get("spec") or {}) for model in (a, b)]
    return ModelComparison(
        a,
        b,
        [_figure(name, a, b) for name in [*_BETTER, *_task_scores(a, b)]],
        _different({name: a.lineage.get(name) for name in _SAME}, {name: b.lineage.get(name) for name in _SAME}),
        _different(*specs),
    )


def _figure(name: str, a: Model, b: Model) -> Figure:
    figures = _flat(a.metrics)
    first, second = _number(figures.get(name)), _number(_flat(b.metrics).get(name))
    less_is_better = (
        _BETTER.get(name) == "lower" or figures.get(f"{name.removesuffix(_STUDENT)}.higher_is_better") is False
    )
    better: Literal["a", "b"] | None = None
    if first is not None and second is not None and first != second:
        better = "a" if (first < second) == less_is_better else "b"
    return Figure(name, first, second, better)


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


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}
