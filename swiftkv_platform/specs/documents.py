"""YAML and JSON documents: a parser that refuses duplicate keys, and changes by dotted path (`training.max_steps`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from swiftkv_platform.errors import InvalidInputError


class DuplicateKeyError(yaml.YAMLError):
    """A mapping has a key twice."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Check before construction, which merges the keys of `<<` into the mapping.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            before = seen.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                lines = f"in line {before.line + 1} and in line {key.start_mark.line + 1}"
                raise DuplicateKeyError(f"duplicate key {key.value!r}, {lines}; remove one")
        return node


def load_yaml(text: str | bytes) -> Any:
    """Parse YAML or JSON. Raises `DuplicateKeyError` for a duplicate key, and other `yaml.YAMLError`s for invalid YAML,
    an invalid date, or too deep nesting."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("lists and mappings are nested too deeply") from error
    except ValueError as error:  # e.g. 2026-13-01, which YAML reads as a date
        raise yaml.YAMLError(f"invalid value ({error}); quote it to use it as text") from error
    finally:
        loader.dispose()


def apply_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `document` with `changes` by dotted path, where a number is a list index. Missing objects are
    created. Raises `InvalidInputError` if a path goes through a scalar or beyond the end of a list."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *parents, last = path.split(".")
        inner: Any = changed
        for key in parents:
            inner = _enter_container(inner, key, path)
        _validate_key(inner, last, path)
        inner[int(last) if isinstance(inner, list) else last] = value
    return changed


def is_index(key: str, items: Sequence[Any]) -> bool:
    """Whether a key of a path is a valid index of `items`."""
    return key.isdecimal() and len(key) < 10 and int(key) < len(items)  # `int` fails for thousands of digits


def _enter_container(container: Any, key: str, path: str) -> Any:
    _validate_key(container, key, path)
    if isinstance(container, list):
        return container[int(key)]
    if container.get(key) is None:
        container[key] = {}
    return container[key]


def _validate_key(container: Any, key: str, path: str) -> None:
    """Raise `InvalidInputError` unless `key` can be set in the container."""
    match container:
        case list() if is_index(key, container):
            return
        case list():
            why = f"{key!r} is not an index of a list with {len(container)} items (0 to {len(container) - 1})"
        case dict() if key:
            return
        case dict():
            why = "a key is empty"
        case _:
            why = f"{container!r:.40} has no field {key!r}"
    raise InvalidInputError(
        f"{path!r} is not a valid path: {why}; use e.g. training.max_steps or data.sources.0.weight",
        field=path,
    )
