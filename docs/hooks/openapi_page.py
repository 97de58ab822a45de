"""Render an OpenAPI document as Markdown: routes by tag, then the objects that they take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from schema_tables import fields, link_to, text, type_of

Document = Mapping[str, Any]

_METHODS = ("get", "post", "put", "patch", "delete")
_NOT_OURS = frozenset({"HTTPValidationError", "ValidationError"})
"""FastAPI's own validation errors, which neither application returns."""


def page(document: Document, *, title: str, introduction: str) -> str:
    """Return the whole page."""
    return "\n".join([f"# {title}", "", introduction, "", *_routes(document), *_objects(document)]) + "\n"


def _routes(document: Document) -> Iterator[str]:
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method in (method for method in _METHODS if method in methods):
            route = methods[method]
            tag = (route.get("tags") or ["routes"])[0]
            tags.setdefault(tag, []).extend(_route(method, path, route))
    for tag, lines in tags.items():
        yield from (f"## {tag.capitalize()}", "", *lines)


def _route(method: str, path: str, route: Document) -> Iterator[str]:
    yield from (f"### `{method.upper()} {path}`", "", route.get("description") or route["summary"], "")
    scopes = [scope for entry in route.get("security", []) for needed in entry.values() for scope in needed]
    if scopes:
        yield from (f"Scope of the key: {', '.join(f'`{scope}`' for scope in scopes)}.", "")
    if parameters := route.get("parameters"):
        yield from ("| parameter | in | type | default | |", "|---|---|---|---|---|")
        for item in parameters:
            schema = item["schema"]
            default = "required" if item["required"] else f"`{schema.get('default', 'none')}`"
            note = text(item.get("description") or schema.get("description"))
            yield f"| `{item['name']}` | {item['in']} | {type_of(schema)} | {default} | {note} |"
        yield ""
    if "requestBody" in route:
        yield from (f"Body: {_content(route['requestBody'])}", "")
    for status, answer in route["responses"].items():
        if status.startswith("2"):
            yield from (f"Answers {status}: {_content(answer)}", "")


def _content(part: Document) -> str:
    schemas = [(kind, content.get("schema", {})) for kind, content in part.get("content", {}).items()]
    shown = [type_of(schema) if schema else f"`{kind}`" for kind, schema in schemas]
    return ", ".join(shown) or "nothing"


def _objects(document: Document) -> Iterator[str]:
    yield from ("## Objects", "")
    for name, schema in sorted(document["components"]["schemas"].items()):
        if name not in _NOT_OURS:
            yield from (f"### {name} {{ #{link_to(name)} }}", "", *fields(schema))
