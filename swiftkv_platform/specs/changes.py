"""Changes of a spec's document by dotted paths, such as `training.max_steps`. Knows no field of any spec."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from swiftkv_platform.errors import InvalidInputError


def with_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `document` in which the paths that `changes` names have its values. `changes`: values by dotted
    path; a number is a place in a list. What is missing on the way is made an object. Raises `InvalidInputError`: a
    path leads through what is neither an object nor a list, or to no place of a list."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for path, value in changes.items():
        *way, last = path.split(".")
        inner: Any = changed
        for key in way:
            inner = _inside(inner, key, path)
        _check(inner, last, path)
        inner[int(last) if isinstance(inner, list) else last] = value
    return changed


def _inside(container: Any, key: str, path: str) -> Any:
    _check(container, key, path)
    if isinstance(container, list):
        return container[int(key)]
    if container.get(key) is None:
        container[key] = {}
    return container[key]


def _check(container: Any, key: str, path: str) -> None:
    """Raises `InvalidInputError` unless `key` is a place in the container."""
    match container:
        case list() if key.isdecimal() and int(key) < len(container):
            return
        case list():
            why = f"the list has {len(container)} items, and {key!r} is none of 0 to {len(container) - 1}"
        case dict() if key:
            return
        case dict():
            why = "a key in it is empty"
        case _:
            why = f"what would hold {key!r} is {container!r:.40}"
    raise InvalidInputError(
        f"{path!r} is no path of the spec: {why}; use one such as training.max_steps or data.sources.0.weight",
        field=path,
    )
