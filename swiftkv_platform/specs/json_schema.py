"""JSON schemas as grammars can follow them: what only describes is left out, what constrains and cannot be followed is
found, with its place. Compiles nothing.

By JSON Schema a `format` that is not known is an annotation, as is a keyword that is not known; the compiler,
llguidance, passes over such keywords and refuses such formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Formats that an answer's strings follow; of others nothing is asked."""
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
"""Keywords that constrain and that the compiler lacks, and their values that ask for nothing."""
_NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that ask for nothing without another one."""
_WORDS = {"pattern": "regex", "type": "Invalid type", "$ref": "Pointer"}
"""Words of a message that is about a keyword, where that is not the keyword in quotes."""


def settled(schema: Schema) -> dict[str, Any]:
    """The schema without what asks for nothing, and would be refused. Names of properties and values are left as they
    are."""
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
    """(dotted place, keyword) of the first constraint that no answer could be held to; None if there is none. The place
    of the schema itself is empty."""
    return next(
        ((place, key) for place, one in subschemas(settled(schema)) for key in one if key in _WITHOUT_EFFECT), None
    )


def place_of(schema: Schema, error: str) -> str:
    """Dotted place that a compiler's message is about, as far as it repeats a value of the schema; else empty."""
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
