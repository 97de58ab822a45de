"""Every number and text of a job spec has a bound, so that nothing absurd gets as far as a database or a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.specs import JobSpec

_BOUNDS = {
    "integer": {"maximum", "exclusiveMaximum", "const", "enum"},
    "string": {"maxLength", "pattern", "format", "const", "enum"},
    "array": {"maxItems", "const"},
}
_ENUMERATED = {"WebhookSpec.on"}
"""A tuple of a few words, each of which makes sense once."""


def unbounded(schema: Any, place: str) -> Iterator[str]:
    if isinstance(schema, dict):
        bounds = _BOUNDS.get(str(schema.get("type")))
        if bounds is not None and not bounds & schema.keys():
            yield place
        for key, value in schema.items():
            yield from unbounded(value, place if key in ("properties", "$defs", "items", "anyOf") else f"{place}.{key}")
    elif isinstance(schema, list):
        for item in schema:
            yield from unbounded(item, place)


def test_nothing_in_a_spec_is_unbounded() -> None:
    found = {place.removeprefix(".") for place in unbounded(JobSpec.model_json_schema(), "")}
    assert found - _ENUMERATED == set()


def test_an_adapter_of_every_tensor_is_refused() -> None:
    document = {"name": "test", "publish": {"adapter": True}}
    for trainable in ("qkv", "tail"):
        assert JobSpec.model_validate({**document, "distillation": {"trainable": trainable}}).publish.adapter
    with pytest.raises(ValidationError, match=r"publish\.adapter is true, .* as large as the whole model") as caught:
        JobSpec.model_validate({**document, "distillation": {"trainable": "all"}})
    assert caught.value.errors()[0]["ctx"]["field"] == "publish.adapter"


@pytest.mark.parametrize("text", ["\ud800", "a\0b"])
@pytest.mark.parametrize(
    "fields",
    [
        lambda text: {"metadata": {"a": text}},
        lambda text: {"metadata": {text: "a"}},
        lambda text: {"tracking": {"wandb": {"tags": ["a", text]}}},
        lambda text: {"model": {"revision": text}},
        lambda text: {"evaluation": {"tasks": [text]}},
    ],
)
def test_a_spec_from_a_file_is_held_to_the_same(fields: Any, text: str) -> None:
    with pytest.raises(ValidationError):
        JobSpec.model_validate({"name": "test", **fields(text)})


def test_a_refitted_start_is_of_output_projections_of_the_students_own() -> None:
    section = {"initialization": "refitted"}
    spec = JobSpec.model_validate({"name": "test", "swiftkv": {**section, "own_output_projection": True}})
    assert (spec.swiftkv.is_calibrated, spec.swiftkv.is_refitted) == (True, True)
    with pytest.raises(ValidationError, match="own_output_projection true") as refused:
        JobSpec.model_validate({"name": "test", "swiftkv": section})
    assert refused.value.errors()[0]["ctx"]["field"] == "swiftkv.initialization"
