"""Changes of a spec document by dotted paths, such as `training.max_steps`. Independent of any spec's fields."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from swiftkv_platform.errors import InvalidInputError


def with_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `document` with the values of `changes`, keyed by dotted path; a number is an index into a list.
    Missing objects on the way are created. Raises `InvalidInputError` if a path leads through a value that is neither
    an object nor a list, or to an index that a list does not have."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *way, last = path.split(".")
        inner: Any = changed
        for key in way:
            inner = _inside(inner, key, path)
        _check(inner, last, path)
        inner[int(last) if isinstance(inner, list) else last] = value
    return changed


def is_index(key: str, items: Sequence[Any]) -> bool:
    """Whether a key of a path is the index of one of the items."""
    return key.isdecimal() and len(key) < 10 and int(key) < len(items)  # `int` refuses thousands of digits


def _inside(container: Any, key: str, path: str) -> Any:
    _check(container, key, path)
    if isinstance(container, list):
        return container[int(key)]
    if container.get(key) is None:
        container[key] = {}
    return container[key]


def _check(container: Any, key: str, path: str) -> None:
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
