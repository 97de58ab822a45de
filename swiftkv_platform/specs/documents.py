"""Documents written by people: reading YAML and JSON, in which a duplicate key is refused, and changes by dotted paths,
such as `training.max_steps`. Independent of any spec's fields.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from swiftkv_platform.errors import InvalidInputError


class DuplicateKeyError(yaml.YAMLError):
    """A mapping that has a key twice."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before the mapping is constructed: `<<` would then have merged its keys with the mapping's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            before = seen.setdefault((key.tag, key.value), key.start_mark)
            if before is not key.start_mark:
                lines = f"in line {before.line + 1} and in line {key.start_mark.line + 1}"
                raise DuplicateKeyError(f"the key {key.value!r} is given twice, {lines}; give it once")
        return node


def load_yaml(text: str | bytes) -> Any:
    """Parse YAML or JSON. Raises `DuplicateKeyError`, which names both lines, for a duplicate key, and other
    `yaml.YAMLError`s for invalid YAML, an impossible date, or too deep nesting."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("its lists and mappings are nested too deeply") from error
    except ValueError as error:  # from constructors: 2026-13-01 is read as a date
        raise yaml.YAMLError(f"a value cannot be read as the type it looks like ({error}); quote it") from error
    finally:
        loader.dispose()


def with_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `document` with the values of `changes`, keyed by dotted path; a number is an index into a list.
    Missing objects on the way are created. Raises `InvalidInputError` if a path leads through a value that is neither
    an object nor a list, or to an index that a list does not have."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *way, last = path.split(".")
        inner: Any = changed
        for key in way:
            inner = _enter(inner, key, path)
        _validate_key(inner, last, path)
        inner[int(last) if isinstance(inner, list) else last] = value
    return changed


def is_index(key: str, items: Sequence[Any]) -> bool:
    """Whether a key of a path is the index of one of the items."""
    return key.isdecimal() and len(key) < 10 and int(key) < len(items)  # `int` refuses thousands of digits


def _enter(container: Any, key: str, path: str) -> Any:
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
            why = f"the list has {len(container)} items, and {key!r} is not an index from 0 to {len(container) - 1}"
        case dict() if key:
            return
        case dict():
            why = "a key in it is empty"
        case _:
            why = f"{container!r:.40} has no field {key!r}"
    raise InvalidInputError(
        f"{path!r} is not a path in the spec: {why}; use one such as training.max_steps or data.sources.0.weight",
        field=path,
    )
