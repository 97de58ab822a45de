"""Every number that a caller gives has a finite range, which refusals name; stored specs are read within it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from math import inf, nan
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from ray.serve.autoscaling_policy import _apply_autoscaling_config, replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from swiftkv_platform.contract.autoscaling import (
    KV_CACHE_USAGE,
    WAITING_STEPS,
    make_autoscaling_config,
    replicas_by_load,
)
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import MAX_REPLICAS, STORED_CONTEXT, Range
from swiftkv_platform.specs.deployment import DeploymentSpec, ScalingSpec
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.job import CheckpointSpec
from swiftkv_platform.specs.training import ResourcesSpec

_ENDS = ({"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"})
_BOUNDS = {"integer": _ENDS, "number": _ENDS, "string": ({"maxLength", "pattern", "format"},), "array": ({"maxItems"},)}
_ENUMERATED = {"WebhookSpec.on"}
"""A tuple of enumerated words, each of which makes sense once."""


def unbounded(schema: Any, place: str, kinds: tuple[str, ...] = tuple(_BOUNDS)) -> Iterator[str]:
    if isinstance(schema, dict):
        kind = str(schema.get("type"))
        fixed = {"const", "enum"} & schema.keys()
        if kind in kinds and not fixed and not all(ends & schema.keys() for ends in _BOUNDS[kind]):
            yield place
        for key, value in schema.items():
            inner = place if key in ("properties", "$defs", "items", "anyOf") else f"{place}.{key}"
            yield from unbounded(value, inner, kinds)
    elif isinstance(schema, list):
        for item in schema:
            yield from unbounded(item, place, kinds)


def requests(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and schema of each parameter and body that callers send to the control plane."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                yield f"{method} {path} {parameter['name']}", parameter["schema"]
    pending = [part for methods in document["paths"].values() for part in methods.values()]
    pending = [part["requestBody"] for part in pending if "requestBody" in part]
    seen: set[str] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name and name not in seen:
                seen.add(name)
                pending.append(document["components"]["schemas"][name])
                yield name, document["components"]["schemas"][name]


def test_nothing_in_a_spec_is_unbounded() -> None:
    """No absurd number or length gets as far as a database or a cluster."""
    found = {place.removeprefix(".") for place in unbounded(JobSpec.model_json_schema(), "")}
    assert found - _ENUMERATED == set()
    for spec in (DeploymentSpec, EngineConfig):
        assert list(unbounded(spec.model_json_schema(), "", ("integer", "number"))) == []


def test_no_number_of_a_request_is_unbounded() -> None:
    document = create_app(Settings(_env_file=None)).openapi()
    found = [where for name, schema in requests(document) for where in unbounded(schema, name, ("integer", "number"))]
    assert found == []


@pytest.mark.parametrize(
    ("spec", "field", "value", "accepted"),
    [
        (DeploymentSpec, "target_ongoing_requests", 1e-320, "0.01 to 1e+06"),
        (DeploymentSpec, "target_ongoing_requests", 1e300, "0.01 to 1e+06"),
        (DeploymentSpec, "upscale_delay_s", 1e308, "0 to 1e+09"),
        (DeploymentSpec, "max_replicas", 1 << 40, "1 to 10,000"),
        (EngineConfig, "num_threads", 1 << 62, "1 to 1,024"),
        (EngineConfig, "max_num_seqs", 1 << 40, "1 to 1,048,576"),
        (EngineConfig, "grammar_timeout_s", 1e300, "1e-06 to 600"),
        (ResourcesSpec, "cpus_per_worker", 1e-4, "0.1 to 10000"),
        (ResourcesSpec, "gpus_per_worker", 1e-9, "0, a share of one GPU from 0.01 to 1, or a whole number"),
        (ResourcesSpec, "gpus_per_worker", 1.5, "0, a share of one GPU from 0.01 to 1, or a whole number"),
        (ResourcesSpec, "peak_flops_per_second", 1e-320, "1e+06 to 1e+24"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_range(spec: Any, field: str, value: Any, accepted: str) -> None:
    needed = {"model": "mdl_1"} if spec is DeploymentSpec else {}
    with pytest.raises(ValidationError) as caught:
        spec.model_validate({**needed, field: value})
    [error] = caught.value.errors()
    assert (error["loc"], error["msg"]) == ((field,), f"is {value!r}; {accepted} is accepted")


@pytest.mark.parametrize(
    ("spec", "field", "before", "now"),
    [
        (ScalingSpec, "target_ongoing_requests", 1e-320, 0.01),
        (ScalingSpec, "downscale_delay_s", 1e300, 1e9),
        (ResourcesSpec, "cpus_per_worker", 1e-4, 0.1),
        (ResourcesSpec, "gpus_per_worker", 1e-9, 0.01),
        (ResourcesSpec, "gpus_per_worker", 1.5, 2),
        (ResourcesSpec, "num_workers", 1 << 40, 100_000),
        (CheckpointSpec, "keep", 1 << 24, 100),
    ],
)
def test_what_was_stored_before_there_was_a_range_is_read_within_it(
    spec: Any, field: str, before: float, now: float
) -> None:
    assert getattr(spec.model_validate({field: before}, context=STORED_CONTEXT), field) == now


@pytest.mark.parametrize("field", ["target_ongoing_requests", "upscale_delay_s", "downscale_delay_s"])
@pytest.mark.parametrize("end", ["minimum", "maximum"])
def test_serves_controller_scales_by_every_number_that_is_accepted(field: str, end: str) -> None:
    """The controller's loop covers all applications, so an error in it stops them all."""
    schema = ScalingSpec.model_json_schema()["properties"][field]
    value = next(part[end] for part in schema.get("anyOf", [schema]) if end in part)
    spec = ScalingSpec.model_validate({"max_replicas": MAX_REPLICAS, "target_ongoing_requests": 1, field: value})
    config = AutoscalingConfig(**make_autoscaling_config(spec))
    nothing: dict[str, Any] = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    running = {"current_num_replicas": MAX_REPLICAS, "target_num_replicas": MAX_REPLICAS, "policy_state": {}}
    bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": MAX_REPLICAS}
    context = AutoscalingContext(**{**nothing, **running, **bounds, "config": config, "total_num_requests": 1e9})
    wanted, _ = _apply_autoscaling_config(replica_queue_length_autoscaling_policy)(context)
    assert 1 <= wanted <= 1e12


@pytest.mark.parametrize("reported", [inf, nan, 1e308, -1.0])
def test_no_report_of_a_replica_stops_the_controllers_loop(reported: float) -> None:
    class Context:
        aggregated_metrics = {WAITING_STEPS: {"a": reported}, KV_CACHE_USAGE: {"a": reported}}
        total_num_requests = 1.0
        current_num_replicas = 3

    number, _ = replicas_by_load(Context())
    assert 1 <= number <= MAX_REPLICAS


def test_a_range_accepts_its_ends_and_keeps_other_refusals() -> None:
    number = TypeAdapter(Annotated[int, Range(1, 3)])
    assert [number.validate_python(value) for value in (1, 3)] == [1, 3]
    with pytest.raises(ValidationError, match="valid integer"):
        number.validate_python("x")
