"""JSON schemas: keywords that constrain nothing are removed, and no others."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_platform.specs.structured_outputs import find_unsupported_keyword, normalize_schema

VACUOUS: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "title": "key"}},
    {"propertyNames": {"anyOf": [{"type": "string"}, {"maxLength": 3}]}},
    {"propertyNames": {"items": {"type": "null"}, "minimum": 3}},
    {"type": "array", "propertyNames": {"maxLength": 3}},
    {"unevaluatedProperties": {"minItems": 0, "additionalProperties": True, "properties": {"a": {}}}},
    {"additionalProperties": {"type": "string"}, "unevaluatedProperties": False},
    {"items": {"type": "string"}, "unevaluatedItems": False},
    {"type": "string", "uniqueItems": True},
    {"type": ["integer", "null"], "contains": {"const": 1}, "minContains": 2},
    {"enum": ["a", "b"], "uniqueItems": True},
    {"maxItems": 1, "uniqueItems": True},
    {"contains": {"const": 1}, "minContains": 0},
    {"type": "object", "not": {"type": "null"}},
    {"type": "integer", "not": {"const": 0.5}},
    {"not": {"not": {"description": "anything"}}},
    {"not": {"enum": []}},
    {"if": {"const": 1}, "then": {"minLength": 0}, "else": True},
    {"if": False, "then": {"const": 1}},
    {"type": "string", "if": {"type": "string"}, "else": {"maxLength": 1}},
    {"dependentRequired": {"a": [], "b": ["c"]}, "required": ["c"]},
    {"dependentSchemas": {"a": {"type": "object"}, "b": {"minLength": 4}}},
    {"dependencies": {"a": [], "b": {"minProperties": 0}}},
    {"format": "color"},
    {"type": "object", "format": "date"},
]
CONSTRAINING: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string", "minLength": 1}},
    {"propertyNames": {"pattern": "a"}},
    {"propertyNames": {"type": "integer"}},
    {"propertyNames": {"enum": ["a"]}},
    {"propertyNames": False},
    {"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}},
    {"unevaluatedProperties": False, "properties": {"a": {}}},
    {"unevaluatedItems": {"type": "string"}, "prefixItems": [{}]},
    {"type": ["array", "string"], "uniqueItems": True},
    {"contains": {}},
    {"contains": {"const": 1}, "minContains": 0, "maxContains": 2},
    {"type": "number", "not": {"const": 0.5}},
    {"not": {}},
    {"not": {"const": 1}},
    {"if": {"type": "string"}, "else": {"maxLength": 1, "type": "string"}},
    {"if": True, "then": {"minLength": 1}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependentRequired": {"a": ["b"]}, "required": 3},
]


@pytest.mark.parametrize("schema", VACUOUS, ids=str)
def test_a_keyword_that_constrains_nothing_is_removed(schema: dict[str, Any]) -> None:
    assert find_unsupported_keyword(schema) is None
    assert find_unsupported_keyword({"properties": {"a": schema}}) is None


@pytest.mark.parametrize("schema", CONSTRAINING, ids=str)
def test_a_keyword_that_constrains_is_kept(schema: dict[str, Any]) -> None:
    assert normalize_schema(schema) == schema
    assert find_unsupported_keyword({"items": schema}) is not None


TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
SCALARS = st.sampled_from([None, True, 0, 1, 2.0, 0.5, "", "a", "bb"])
NAMES = st.sampled_from(["a", "bb"])
INSTANCES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2), max_leaves=4
)


def make_schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with any keywords. `required` has names only; the compiler refuses other values."""
    several, by_name = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, max_size=2)
    small, names = st.integers(0, 2), st.lists(NAMES, max_size=2, unique=True)
    names_of_one = "propertyNames unevaluatedProperties unevaluatedItems additionalProperties items contains not"
    one = dict.fromkeys((*names_of_one.split(), "if", "then", "else"), inner)
    bounds = dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "minContains", "maxContains"), small
    )
    return st.fixed_dictionaries(
        {},
        optional={
            **one,
            **bounds,
            **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
            **dict.fromkeys(("properties", "dependentSchemas"), by_name),
            "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True),
            "enum": st.lists(SCALARS, min_size=1, max_size=2),
            "const": SCALARS,
            "required": names,
            "dependentRequired": st.dictionaries(NAMES, names, max_size=2),
            "uniqueItems": st.booleans(),
            "minimum": small,
            "title": NAMES,
        },
    )


@given(st.recursive(st.booleans() | st.just({}), make_schemas, max_leaves=6), st.lists(INSTANCES, max_size=8))
def test_a_normalized_schema_accepts_the_same(schema: Any, instances: list[Any]) -> None:
    if isinstance(schema, bool):
        return
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, normalize_schema(schema)))
    for instance in instances:
        assert before.is_valid(instance) == after.is_valid(instance)
