"""Constraint on the text of an answer: JSON, a regular expression, one of some choices, a grammar. Compiles nothing.

Field names are those of vLLM's `StructuredOutputsParams`. In JSON Schema, unknown formats and keywords are annotations.
The compiler, llguidance, ignores unknown keywords but refuses unknown formats, so annotations are dropped from schemas,
and constraints that cannot be enforced are found with their place.
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
"""Whitespace between two tokens of JSON: enough for indented text, but bounded."""
_LINE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
"""Prefix of compiler messages that names the line of a schema in a grammar."""
_EXCERPT = re.compile(r"\n +\d+ \| ")
"""Start of the grammar's excerpt in compiler messages."""
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


@dataclass(frozen=True)
class StructuredOutputs:
    """One constraint. Raises `InvalidInputError` unless exactly one is given, and for text that is not Unicode, a
    schema that is not a JSON object, or a constraint too long or too deep to compile (limits: `specs/base.py`)."""

    json: str | Mapping[str, Any] | None = None
    """JSON schema that the answer validates against: its text, or the object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Regular expression that the whole answer matches; no look-around, no back references."""
    choice: tuple[str, ...] | None = None
    """Strings, one of which is the answer."""
    grammar: str | None = None
    """Lark grammar for the answer (llguidance's dialect); its start rule is `start`."""
    disable_any_whitespace: bool = False
    """Allow no whitespace between the tokens of JSON."""
    source: str | None = field(default=None, compare=False)
    """Name of the constraint in errors; None: `structured_outputs.` and the field's name."""
    parts: Mapping[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict, compare=False, repr=False)
    """Schemas inside a grammar, as (name in errors, schema) by their line, counted from 1."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = ", ".join(_CONSTRAINTS)
            raise InvalidInputError(
                f"structured_outputs has {' and '.join(given) or 'no constraint'}; give exactly one of {names}",
                field=self.source or "structured_outputs",
                value=given,
            )
        self._check_flags()
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice(self.choice))
        self._check_size(getattr(self, self.kind))
        self.text  # noqa: B018  # what is no text is refused here

    @classmethod
    def parse(cls, value: Mapping[str, Any] | Self | None) -> Self | None:
        """Parse the fields by name, or return the constraint itself or None. Raises `InvalidInputError`, which names
        the field and what it accepts."""
        if value is None or isinstance(value, cls):
            return value
        known = cls.keys()
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            wrong = sorted(map(str, set(value) - set(known))) if isinstance(value, Mapping) else [type(value).__name__]
            raise InvalidInputError(
                f"structured_outputs has {', '.join(wrong)}; it must be some of {', '.join(known)} by name",
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
        return self._given()[0]

    @cached_property
    def text(self) -> str:
        """Constraint as text: a schema and choices as JSON. Equal constraints have equal texts."""
        try:
            text = self._as_text(getattr(self, self.kind))
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

    def check_followed(self) -> None:
        """Raise `InvalidInputError` if the schema has a constraint that cannot be enforced, naming its place."""
        if self.kind == "json":
            check_followed(json.loads(self.text), self.name)

    def refusal(self, why: str) -> InvalidInputError:
        """Return an error that names the constraint, and the place in it that the compiler's message `why` is about."""
        name, schema = self.name, json.loads(self.text) if self.kind == "json" else {}
        if at := _LINE.search(why):
            name, schema = self.parts.get(int(at[1]), (name, schema))
            why = _EXCERPT.split(why.replace(at[0], ""))[0]
        place = place_of(schema, why)
        where = f"{name}.{place}" if place else name
        return InvalidInputError(f"{where} {' '.join(why.split())}", field=name, value=self.text)

    def _check_flags(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                where = f"structured_outputs.{name}"
                raise InvalidInputError(f"{where} is {value!r}; it must be true or false", field=where, value=value)

    def _checked_choice(self, choice: Any) -> tuple[str, ...]:
        if isinstance(choice, list | tuple) and len(choice) > MAX_CHOICES:
            raise self._too_large(f"has {len(choice)} choices; at most {MAX_CHOICES} are accepted")
        strings = isinstance(choice, list | tuple) and all(isinstance(one, str) and one for one in choice)
        if not strings or not choice:
            raise InvalidInputError(
                f"{self.name} must be a list of at least one non-empty string", field=self.name, value=choice
            )
        return tuple(choice)

    def _check_size(self, value: Any) -> None:
        """Refuse a value that is too large before processing it: it may be as long as the body of a request."""
        if isinstance(value, str):
            # A schema's text may contain spaces, which are not compiled.
            longest = MAX_GRAMMAR_BYTES * (4 if self.kind == "json" else 1)
            if len(value) > longest:
                raise self._too_large(f"has {len(value)} characters; at most {longest} are accepted")
            value = _parsed(value) if self.kind == "json" else None
        unvisited, size = [(value, 1)], 0
        while unvisited:
            one, depth = unvisited.pop()
            if depth > MAX_SCHEMA_DEPTH:
                raise self._too_large(f"is nested more than {MAX_SCHEMA_DEPTH} deep")
            size += 1 + (len(one) if isinstance(one, str) else 0)
            if isinstance(one, Mapping):
                unvisited += [(inner, depth + 1) for inner in one.values()]
                size += sum(len(key) + 1 for key in one if isinstance(key, str))
            elif isinstance(one, list | tuple):
                unvisited += [(inner, depth + 1) for inner in one]
            if size + len(unvisited) > MAX_GRAMMAR_BYTES:
                raise self._too_large(f"is longer than {MAX_GRAMMAR_BYTES} bytes")

    def _too_large(self, why: str) -> InvalidInputError:
        return InvalidInputError(f"{self.name} {why}", field=self.name)

    def _given(self) -> list[str]:
        return [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]

    def _as_text(self, value: Any) -> str:
        """Raises `ValueError`, `TypeError`, `RecursionError`."""
        if self.kind == "json":
            return _schema_text(value)
        if self.kind == "json_object":
            return '{"type":"object"}'
        if self.kind == "choice":
            return json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str) or not value:
            raise TypeError("it is empty" if value == "" else f"it is a {type(value).__name__}")
        return value


def check_followed(schema: Mapping[str, Any], name: str) -> None:
    """Raise `InvalidInputError` if a schema, called `name` in the request, has a constraint that cannot be enforced."""
    found = unfollowed(schema)
    if found is not None:
        place, keyword = found
        where = f"{name}.{place}" if place else name
        message = (
            f"{where} has {keyword!r}, which cannot be compiled: Unimplemented; leave it out, or express it differently"
        )
        raise InvalidInputError(message, field=name)


_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")


def _parsed(text: str) -> Any:
    """Parse JSON; None if it is invalid or too deep. `text` raises the error later."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _schema_text(schema: Any) -> str:
    """Return the same text for schemas that mean the same, regardless of spacing. Raises `ValueError`, `TypeError`,
    `RecursionError`."""
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise TypeError(f"it is a {type(schema).__name__}")
    return json.dumps(settled(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


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
