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
_UNSUPPORTED_KEYWORDS = frozenset(
    (
        *("uniqueItems", "not", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "if", "contains", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that the compiler does not support."""
_REMOVABLE_KEYWORDS = _UNSUPPORTED_KEYWORDS | {"format", "then", "else", "minContains", "maxContains"}
"""Keywords that are removed where they constrain nothing: those above, and those that depend on them."""
_CONSTRAINING_KEYWORDS = frozenset(("enum", "const", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"))
"""Keywords that are always taken to constrain; other keywords without a rule are annotations."""
_KINDS_BY_TYPE = {
    **{name: frozenset((name,)) for name in ("object", "array", "string", "integer", "boolean", "null")},
    "number": frozenset(("integer", "fraction")),
}
_ALL_KINDS = frozenset().union(*_KINDS_BY_TYPE.values())
"""Disjoint kinds of JSON values."""
_KINDS_BY_KEYWORD = {
    keyword: _KINDS_BY_TYPE[name]
    for name, keywords in {
        "string": "minLength maxLength pattern format",
        "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
        "array": "items additionalItems prefixItems unevaluatedItems minItems maxItems uniqueItems contains "
        "minContains maxContains",
        "object": "properties patternProperties additionalProperties unevaluatedProperties propertyNames "
        "minProperties maxProperties required dependencies dependentRequired dependentSchemas",
    }.items()
    for keyword in keywords.split()
}
"""JSON types that each JSON Schema keyword constrains. Keywords not listed constrain values of every type."""
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
            accepted = _ACCEPTED.get(self.kind, "text")
            raise InvalidInputError(
                f"{self.name} must be {accepted}: {error}", field=self.name, value=getattr(self, self.kind)
            ) from error
        return text

    @property
    def name(self) -> str:
        """Name of the constraint in errors."""
        return self.source or f"structured_outputs.{self.kind}"

    def check_schema_supported(self) -> None:
        """Raise `InvalidInputError` if the schema has a constraint that cannot be enforced."""
        if self.kind == "json":
            check_schema_supported(json.loads(self.text), self.name)

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
        # vLLM refuses these two.
        if self.kind == "regex" and "\0" in value:
            raise ValueError(r"it has a NUL character; write it as \x00")
        if self.kind == "grammar" and value.lstrip().startswith("{"):
            raise ValueError("it is JSON; give a schema as structured_outputs.json")
        return value


def check_schema_supported(schema: Mapping[str, Any], name: str) -> None:
    """Raise `InvalidInputError` if a schema has a constraint that cannot be enforced. `name`: of the schema in
    errors."""
    found = find_unsupported_keyword(schema)
    if found is not None:
        path, keyword = found
        where = f"{name}.{path}" if path else name
        message = (
            f"{where} has {keyword!r}, which cannot be compiled: Unimplemented; remove it, or express it differently"
        )
        raise InvalidInputError(message, field=name)


_ACCEPTED = {"json": "a JSON schema, an object", "grammar": "a Lark grammar"}
"""Accepted values by kind of constraint; of other kinds: text."""
_COMPILER_OPTIONS = "x-guidance"
"""Key of a schema with the compiler's own options."""
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
    if not isinstance(schema.get(_COMPILER_OPTIONS, {}), Mapping):
        raise TypeError(f"its {_COMPILER_OPTIONS} is no object; leave it out")
    return json.dumps(normalize_schema(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def normalize_schema(schema: Schema) -> dict[str, Any]:
    """Return the schema without keywords that have no effect but that the compiler would refuse."""
    kinds = _list_kinds(schema)
    kept = {
        key: value
        for key, value in schema.items()
        if key not in _REMOVABLE_KEYWORDS or not _constrains_nothing(schema, key, value, kinds)
    }
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


def find_unsupported_keyword(schema: Schema) -> tuple[str, str] | None:
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


def _list_kinds(schema: Schema) -> frozenset[str]:
    """Return the kinds of instances that `type`, `enum` and `const` of a schema admit."""
    kinds = _ALL_KINDS & _parse_types(schema.get("type"))
    values = schema["enum"] if isinstance(schema.get("enum"), list | tuple) else None
    values = [schema["const"]] if "const" in schema else values
    return kinds if values is None else kinds & frozenset(map(_get_kind, values))


def _parse_types(types: Any) -> frozenset[str]:
    """Return the kinds of a `type`; all for an invalid one, which the compiler refuses."""
    names = types if isinstance(types, list | tuple) else [types]
    if not all(isinstance(name, str) and name in _KINDS_BY_TYPE for name in names):
        return _ALL_KINDS
    return frozenset().union(*(_KINDS_BY_TYPE[name] for name in names))


def _get_kind(value: Any) -> str:
    if isinstance(value, bool | None):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _accepts_all(schema: Any, kinds: frozenset[str] = _ALL_KINDS) -> bool:
    """Whether a schema is known to accept all instances of these kinds."""
    if not isinstance(schema, Mapping):
        return schema is True
    return all(_constrains_nothing(schema, key, value, kinds) for key, value in schema.items())


def _accepts_none(schema: Any, kinds: frozenset[str]) -> bool:
    """Whether a schema is known to accept no instance of these kinds."""
    if not isinstance(schema, Mapping):
        return schema is False
    kinds &= _list_kinds(schema)
    return not kinds or ("not" in schema and _accepts_all(schema["not"], kinds))


def _constrains_nothing(schema: Schema, key: str, value: Any, kinds: frozenset[str]) -> bool:
    """Whether a keyword of a schema is known to accept all instances of these kinds. Unknown keywords do."""
    if not _KINDS_BY_KEYWORD.get(key, _ALL_KINDS) & kinds:
        return True
    match key:
        # 1. values
        case "type":
            return kinds <= _parse_types(value)
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "minLength" | "minItems" | "minProperties":
            return bool(value == 0)
        case "required":
            return value in ([], ())
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        # 2. subschemas that must all accept
        case "additionalProperties" | "additionalItems":
            return _accepts_all(value)
        case "propertyNames":
            return _accepts_all(value, _KINDS_BY_TYPE["string"])
        case "unevaluatedProperties":
            return "additionalProperties" in schema or _accepts_all(value)
        case "unevaluatedItems":
            return isinstance(schema.get("items"), Mapping | bool) or _accepts_all(value)
        case "items" | "prefixItems":
            return all(map(_accepts_all, value)) if isinstance(value, list | tuple) else _accepts_all(value)
        case "properties" | "patternProperties":
            return isinstance(value, Mapping) and all(map(_accepts_all, value.values()))
        case "dependencies" | "dependentRequired" | "dependentSchemas":
            return isinstance(value, Mapping) and all(_is_dependency_met(each, schema) for each in value.values())
        # 3. combinations
        case "allOf":
            return isinstance(value, list | tuple) and all(_accepts_all(one, kinds) for one in value)
        case "anyOf":
            return isinstance(value, list | tuple) and any(_accepts_all(one, kinds) for one in value)
        case "not":
            return _accepts_none(value, kinds)
        case "if":
            then, otherwise = (_accepts_all(schema.get(name, True), kinds) for name in ("then", "else"))
            return (then or _accepts_none(value, kinds)) and (otherwise or _accepts_all(value, kinds))
        case "then" | "else":
            return "if" not in schema or _constrains_nothing(schema, "if", schema["if"], kinds)
        case "contains":
            return bool(schema.get("minContains") == 0) and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or _constrains_nothing(schema, "contains", schema["contains"], kinds)
        case _:
            return key not in _CONSTRAINING_KEYWORDS and key not in _KINDS_BY_KEYWORD


def _is_dependency_met(dependency: Any, schema: Schema) -> bool:
    """Whether all objects meet a dependency: a list of names, or a schema."""
    if isinstance(dependency, list | tuple):
        required = schema.get("required")
        return all(isinstance(required, list | tuple) and name in required for name in dependency)
    return _accepts_all(dependency, _KINDS_BY_TYPE["object"])
