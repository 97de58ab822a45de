"""Choice of the score of a task that counts, by what its configuration promises or the harness has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.evaluation.harness.tasks import FIELD
from swiftkv_platform.specs import TaskSpec


def declared_metrics(config: Mapping[str, Any]) -> dict[str, bool | None] | None:
    """Whether more is better, by the keys of the scores that a configuration promises, a key without a filter for any;
    None where only a run can tell."""
    import lm_eval.api.metrics  # noqa: F401 (registers the metrics)
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, METRIC_REGISTRY, is_higher_better

    if "group" in config:
        listed = config.get("aggregate_metric_list") or []
        listed = [listed] if isinstance(listed, Mapping) else listed
        keys: dict[str, bool | None] = {}
        for item in listed:
            filters = item.get("filter_list") or []
            filters = [filters] if isinstance(filters, str) else filters
            keys |= dict.fromkeys([f"{item['metric']},{name}" for name in filters] or [item["metric"]], True)
        return keys
    if "class" in config or config.get("process_results"):
        return None
    names = DEFAULT_METRIC_REGISTRY[config.get("output_type", "generate_until")]
    metrics = config.get("metric_list") or [{"metric": name} for name in names]
    if any(item.get("hf_evaluate") or item["metric"] not in METRIC_REGISTRY for item in metrics):
        return None
    return {
        f"{item['metric']},{name}": item.get("higher_is_better", is_higher_better(item["metric"]))
        for item in metrics
        for name in [chain["name"] for chain in config.get("filter_list") or ()] or ["none"]
    }


def measured_metrics(name: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether more is better, by the keys of a row's scores; None where the harness does not say."""
    better: dict[str, bool | None] = {}
    for leaf in (name, *leaves(name, answers)):
        better |= answers["higher_is_better"].get(leaf, {})
    return {
        key: better.get(key.partition(",")[0])
        for key, value in row.items()
        if "," in key and "_stderr" not in key and number(value) is not None
    }


def choose_metric(spec: TaskSpec, name: str, metrics: Mapping[str, bool | None]) -> str:
    """The key of `spec.metric`, or of the first metric of which more is better."""
    for key, more_is_better in metrics.items():
        if more_is_better if spec.metric is None else _means(spec.metric, key):
            return key
    if not metrics:
        raise InvalidInputError(f"{FIELD}: {name} has no score of its own; name its tasks", field=FIELD, value=name)
    known = ", ".join(key.removesuffix(",none") for key in metrics)
    raise InvalidInputError(
        f"{FIELD}: {name} has no metric {spec.metric!r}; it has {known}"
        if spec.metric
        else f"{FIELD}: {name} has no metric of which more is better; name one of {known}",
        field=FIELD,
        value=spec.metric,
    )


def _means(wanted: str, key: str) -> bool:
    """Whether two names of a metric are one, where only one has a filter too."""
    both_filtered = "," in wanted and "," in key
    return wanted == key if both_filtered else wanted.partition(",")[0] == key.partition(",")[0]


def leaves(name: str, answers: Mapping[str, Any]) -> Iterator[str]:
    """The tasks below a group, groups in groups included."""
    for child in answers["group_subtasks"].get(name, ()):
        yield child
        yield from leaves(child, answers)


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
