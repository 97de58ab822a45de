"""Preparation of JSON schemas for grammars: annotations are dropped, and constraints that cannot be enforced are found
with their place. Compiles nothing.

In JSON Schema, unknown formats and keywords are annotations. The compiler, llguidance, ignores unknown keywords but
refuses unknown formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Formats that are enforced on an answer's strings; others are ignored."""
_ONE = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords whose value is a schema."""
_LIST = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_NAMED = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"))
_ANY: tuple[Any, ...] = ({}, True)
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": _ANY,
    "unevaluatedItems": _ANY,
    "unevaluatedProperties": _ANY,
    "if": (),
    "contains": (),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Constraining keywords that the compiler lacks, with the values that constrain nothing."""
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that have no effect without another one."""
_WORDS = {"pattern": "regex", "type": "Invalid type", "$ref": "Pointer"}
"""Words in compiler messages about a keyword, if they are not the keyword in quotes."""


def settled(schema: Schema) -> dict[str, Any]:
    """Return the schema without keywords that have no effect but would be refused. Names of properties and values stay
    as they are."""
    kept = {key: value for key, value in schema.items() if not _asks_for_nothing(schema, key, value)}
    for key, value in kept.items():
        if key in _ONE and isinstance(value, Mapping):
            kept[key] = settled(value)
        elif key in _LIST and isinstance(value, list | tuple):
            kept[key] = [settled(one) if isinstance(one, Mapping) else one for one in value]
        elif key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: settled(one) if isinstance(one, Mapping) else one for name, one in value.items()}
    return kept


def unfollowed(schema: Schema) -> tuple[str, str] | None:
    """Find the first constraint that cannot be enforced on an answer: (dotted place, keyword), or None. The place of
    the schema itself is empty."""
    return next(
        ((place, key) for place, one in subschemas(settled(schema)) for key in one if key in _WITHOUT_EFFECT), None
    )


def place_of(schema: Schema, error: str) -> str:
    """Find the dotted place that a compiler's message is about, if it quotes a value of the schema; otherwise empty."""
    for place, one in subschemas(schema):
        for key, value in one.items():
            named = _WORDS.get(key, f"'{key}'") in error
            if named and isinstance(value, str | int | float) and str(value).lstrip("#") in error:
                return f"{place}.{key}" if place else key
    return ""


def subschemas(schema: Schema, place: str = "") -> Iterator[tuple[str, Schema]]:
    """(dotted place, schema) of the schema and all within it."""
    yield place, schema
    for key, value in schema.items():
        inside: list[tuple[str, Any]] = []
        if key in _NAMED and isinstance(value, Mapping):
            inside = [(f"{key}.{name}", one) for name, one in value.items()]
        elif key in _LIST and isinstance(value, list | tuple):
            inside = [(f"{key}.{number}", one) for number, one in enumerate(value)]
        elif key in _ONE:
            inside = [(key, value)]
        for name, one in inside:
            if isinstance(one, Mapping):
                yield from subschemas(one, f"{place}.{name}" if place else name)


def _asks_for_nothing(schema: Schema, key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in _NEEDS:
        return _NEEDS[key] not in schema
    return any(type(value) is type(one) and value == one for one in _WITHOUT_EFFECT.get(key, ()))
