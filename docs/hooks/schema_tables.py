"""Render pydantic's JSON schemas as Markdown: one table of fields per object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
_GENERIC = re.compile(r"^(\w+?)_(\w+)_$")
"""pydantic's name `List_Item_` of `List[Item]`."""
_LONGEST_DEFAULT = 60
"""Characters of a default; a longer one is an object with a table of its own."""


def fields(schema: Schema) -> Iterator[str]:
    """Yield lines: the description, then a table of the properties or the values of an enumeration."""
    if schema.get("description"):
        yield from (schema["description"], "")
    if "enum" in schema:
        yield from (f"One of {_values(schema['enum'])}.", "")
    if not schema.get("properties"):
        return
    required = schema.get("required", ())
    yield from ("| field | type | default | |", "|---|---|---|---|")
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {type_of(field)} | {default} | {text(field.get('description'))} |"
    yield ""


def type_of(schema: Schema) -> str:
    """Return the type in words, with links to the tables of objects."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        shown = _GENERIC.sub(r"\1 of \2", name)
        return f"[{shown}](#{link_to(name)})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return _values(schema["enum"])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(type_of(part) for part in schema[several]))
    kind = schema.get("type", "any")
    if kind == "array":
        parts = schema.get("prefixItems")
        items = ", ".join(type_of(part) for part in parts) if parts else type_of(schema.get("items", {}))
        return f"list of {items}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_of(schema['additionalProperties'])}"
    limits = [words.format(schema[name]) for name, words in _LIMITS.items() if name in schema]
    return f"{kind} {' and '.join(limits)}" if limits else str(kind)


def link_to(name: str) -> str:
    """Return the anchor of an object's table."""
    return "object-" + "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")


def text(description: str | None) -> str:
    """Return the description on one line, safe inside a table cell."""
    return " ".join((description or "").split()).replace("|", "\\|")


def _default(field: Schema) -> str:
    if "default" not in field:
        return ""
    shown = json.dumps(field.get("default"))
    return f"`{shown}`" if len(shown) <= _LONGEST_DEFAULT else "see there"


def _values(values: list[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)
