"""Structured outputs: constraints on an answer by JSON schema, regular expression, choices or grammar. No compilation.

Field names are those of vLLM's `StructuredOutputsParams`. The compiler, llguidance, ignores unknown keywords of JSON
Schema but refuses unknown formats. So formats that are annotations are removed, and constraints that cannot be enforced
are reported with their path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Self

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens: enough for indented text, but bounded."""
_LINE_PREFIX = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
"""Prefix of compiler messages with the line of a schema in a grammar."""
_EXCERPT_START = re.compile(r"\n +\d+ \| ")
"""Start of the excerpt of the grammar in compiler messages."""
Schema = Mapping[str, Any]

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Enforced formats of strings; others are ignored."""
_SCHEMA_KEYWORDS = frozenset(
    (
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
"""Keywords whose value is a schema; below: a list of schemas, and a mapping of names to schemas."""
_SCHEMA_LIST_KEYWORDS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_SCHEMA_MAP_KEYWORDS = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
_ANYTHING: tuple[Any, ...] = ({}, True)
_UNSUPPORTED_KEYWORDS: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": _ANYTHING,
    "unevaluatedItems": _ANYTHING,
    "unevaluatedProperties": _ANYTHING,
    "if": (),
    "contains": (),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that the compiler does not support, with the values that have no effect."""
_DEPENDENT_KEYWORDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that have no effect without another keyword."""
_MESSAGE_WORDS = {"pattern": "regex", "type": "Invalid type", "$ref": "Pointer"}
"""Words in compiler messages about a keyword, if not the quoted keyword."""


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint. Raises `InvalidInputError` unless exactly one is set, and for an invalid one, or one that is too
    long or too deeply nested to compile (limits: `specs/base.py`)."""

    json: str | Mapping[str, Any] | None = None
    """JSON schema of the answer, as text or object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Regular expression for the whole answer; without look-around and back references."""
    choice: tuple[str, ...] | None = None
    """The answer is one of these strings."""
    grammar: str | None = None
    """Lark grammar (llguidance's dialect) with the start rule `start`."""
    disable_any_whitespace: bool = False
    """Allow no whitespace between JSON tokens."""
    source: str | None = field(default=None, compare=False)
    """Name of the constraint in errors; None: `structured_outputs.` and the field's name."""
    parts: Mapping[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict, compare=False, repr=False)
    """Schemas inside a grammar: (name in errors, schema) by line, counted from 1."""

    def __post_init__(self) -> None:
        given = self._list_constraints()
        if len(given) != 1:
            names = ", ".join(_CONSTRAINT_FIELDS)
            raise InvalidInputError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}; give exactly one of {names}",
                field=self.source or "structured_outputs",
                value=given,
            )
        self._check_flags()
        if self.choice is not None:
            object.__setattr__(self, "choice", self._validate_choice(self.choice))
        self._check_size(getattr(self, self.kind))
        self.text  # noqa: B018  # refuses values that are not text

    @classmethod
    def parse(cls, value: Mapping[str, Any] | Self | None) -> Self | None:
        """Parse a mapping of the fields; return a `StructuredOutputs` or None unchanged. Raises `InvalidInputError`."""
        if value is None or isinstance(value, cls):
            return value
        known = cls.keys()
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            wrong = sorted(map(str, set(value) - set(known))) if isinstance(value, Mapping) else [type(value).__name__]
            raise InvalidInputError(
                f"structured_outputs has {', '.join(wrong)}; it must be an object with {', '.join(known)}",
                field="structured_outputs",
                value=value,
            )
        return cls(**value)

    @classmethod
    def keys(cls) -> list[str]:
        """Field names that `parse` accepts."""
        return [one.name for one in fields(cls) if one.name not in ("source", "parts")]

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return self._list_constraints()[0]

    @cached_property
    def text(self) -> str:
        """Canonical text of the constraint; schemas and choices as JSON."""
        try:
            text = self._format_constraint(getattr(self, self.kind))
            text.encode()
        except (ValueError, TypeError, RecursionError) as error:  # includes JSONDecodeError and UnicodeEncodeError
            accepted = "a JSON schema, an object" if self.kind == "json" else "text"
            raise InvalidInputError(
                f"{self.name} must be {accepted}: {error}", field=self.name, value=getattr(self, self.kind)
            ) from error
        return text

    @property
    def name(self) -> str:
        """Name of the constraint in errors."""
        return self.source or f"structured_outputs.{self.kind}"

    def check_supported(self) -> None:
        """Raise `InvalidInputError` if the schema has a constraint that cannot be enforced."""
        if self.kind == "json":
            check_supported(json.loads(self.text), self.name)

    def make_error(self, why: str) -> InvalidInputError:
        """Return an error for the compiler's message `why`, with the path in the schema that it is about."""
        name, schema = self.name, json.loads(self.text) if self.kind == "json" else {}
        if at := _LINE_PREFIX.search(why):
            name, schema = self.parts.get(int(at[1]), (name, schema))
            why = _EXCERPT_START.split(why.replace(at[0], ""))[0]
        path = find_path_in_message(schema, why)
        where = f"{name}.{path}" if path else name
        return InvalidInputError(f"{where} {' '.join(why.split())}", field=name, value=self.text)

    def _check_flags(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                where = f"structured_outputs.{name}"
                raise InvalidInputError(f"{where} is {value!r}; it must be true or false", field=where, value=value)

    def _validate_choice(self, choice: Any) -> tuple[str, ...]:
        if isinstance(choice, list | tuple) and len(choice) > MAX_CHOICES:
            raise self._make_size_error(f"has {len(choice)} choices; at most {MAX_CHOICES} are accepted")
        strings = isinstance(choice, list | tuple) and all(isinstance(one, str) and one for one in choice)
        if not strings or not choice:
            raise InvalidInputError(
                f"{self.name} must be a list of at least one non-empty string", field=self.name, value=choice
            )
        return tuple(choice)

    def _check_size(self, value: Any) -> None:
        """Refuse a value that is too large before processing it."""
        if isinstance(value, str):
            # The text of a schema may contain whitespace, which does not count.
            longest = MAX_GRAMMAR_BYTES * (4 if self.kind == "json" else 1)
            if len(value) > longest:
                raise self._make_size_error(f"has {len(value)} characters; at most {longest} are accepted")
            value = _parse_json(value) if self.kind == "json" else None
        unvisited, size = [(value, 1)], 0
        while unvisited:
            one, depth = unvisited.pop()
            if depth > MAX_SCHEMA_DEPTH:
                raise self._make_size_error(f"is nested more than {MAX_SCHEMA_DEPTH} deep")
            size += 1 + (len(one) if isinstance(one, str) else 0)
            if isinstance(one, Mapping):
                unvisited += [(inner, depth + 1) for inner in one.values()]
                size += sum(len(key) + 1 for key in one if isinstance(key, str))
            elif isinstance(one, list | tuple):
                unvisited += [(inner, depth + 1) for inner in one]
            if size + len(unvisited) > MAX_GRAMMAR_BYTES:
                raise self._make_size_error(f"is longer than {MAX_GRAMMAR_BYTES} bytes")

    def _make_size_error(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"{self.name} {why}", field=self.name)

    def _list_constraints(self) -> list[str]:
        return [name for name in _CONSTRAINT_FIELDS if getattr(self, name) not in (None, False)]

    def _format_constraint(self, value: Any) -> str:
        """Raises `ValueError`, `TypeError`, `RecursionError`."""
        if self.kind == "json":
            return _format_schema(value)
        if self.kind == "json_object":
            return '{"type":"object"}'
        if self.kind == "choice":
            return json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str) or not value:
            raise TypeError("it is empty" if value == "" else f"it is a {type(value).__name__}")
        return value


def check_supported(schema: Mapping[str, Any], name: str) -> None:
    """Raise `InvalidInputError` if a schema has a constraint that cannot be enforced. `name`: of the schema in
    errors."""
    found = find_unsupported(schema)
    if found is not None:
        path, keyword = found
        where = f"{name}.{path}" if path else name
        message = (
            f"{where} has {keyword!r}, which cannot be compiled: Unimplemented; remove it, or express it differently"
        )
        raise InvalidInputError(message, field=name)


_CONSTRAINT_FIELDS = ("json", "json_object", "regex", "choice", "grammar")


def _parse_json(text: str) -> Any:
    """Parse JSON; None if it is invalid or too deep (`text` raises the error later)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _format_schema(schema: Any) -> str:
    """Return the canonical JSON of a schema. Raises `ValueError`, `TypeError`, `RecursionError`."""
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise TypeError(f"it is a {type(schema).__name__}")
    return json.dumps(normalize_schema(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def normalize_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema without keywords that have no effect but that the compiler would refuse."""
    kept = {key: value for key, value in schema.items() if not _has_no_effect(schema, key, value)}
    for key, value in kept.items():
        if key in _SCHEMA_KEYWORDS and isinstance(value, Mapping):
            kept[key] = normalize_schema(value)
        elif key in _SCHEMA_LIST_KEYWORDS and isinstance(value, list | tuple):
            kept[key] = [normalize_schema(one) if isinstance(one, Mapping) else one for one in value]
        elif key in _SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            kept[key] = {
                name: normalize_schema(one) if isinstance(one, Mapping) else one for name, one in value.items()
            }
    return kept


def find_unsupported(schema: Schema) -> tuple[str, str] | None:
    """Return (dotted path, keyword) of the first constraint that cannot be enforced, or None."""
    return next(
        (
            (path, key)
            for path, one in iterate_subschemas(normalize_schema(schema))
            for key in one
            if key in _UNSUPPORTED_KEYWORDS
        ),
        None,
    )


def find_path_in_message(schema: Schema, error: str) -> str:
    """Return the dotted path that a compiler's message is about, if the message quotes the value there; otherwise
    ''."""
    for path, one in iterate_subschemas(schema):
        for key, value in one.items():
            named = _MESSAGE_WORDS.get(key, f"'{key}'") in error
            if named and isinstance(value, str | int | float) and str(value).lstrip("#") in error:
                return f"{path}.{key}" if path else key
    return ""


def iterate_subschemas(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield (dotted path, schema) of the schema and all subschemas."""
    yield path, schema
    for key, value in schema.items():
        inside: list[tuple[str, Any]] = []
        if key in _SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            inside = [(f"{key}.{name}", one) for name, one in value.items()]
        elif key in _SCHEMA_LIST_KEYWORDS and isinstance(value, list | tuple):
            inside = [(f"{key}.{number}", one) for number, one in enumerate(value)]
        elif key in _SCHEMA_KEYWORDS:
            inside = [(key, value)]
        for name, one in inside:
            if isinstance(one, Mapping):
                yield from iterate_subschemas(one, f"{path}.{name}" if path else name)


def _has_no_effect(schema: Schema, key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in _DEPENDENT_KEYWORDS:
        return _DEPENDENT_KEYWORDS[key] not in schema
    return any(type(value) is type(one) and value == one for one in _UNSUPPORTED_KEYWORDS.get(key, ()))
