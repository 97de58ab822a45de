"""Conversion of Pydantic's validation errors to the fields that a caller has sent. Knows annotations, no HTTP.

Pydantic tries every member of a union and puts a label of the member into the location of its error: `("evaluation",
"tasks", 0, "TaskSpec", "zzz")`. Callers have sent `evaluation.tasks[0].zzz`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swiftkv_platform.errors import suggest_name
from swiftkv_platform.web.safe_json import JsonPath

_MAX_DEPTH = 3
"""Depth of nested objects down to which the place of a misplaced key is searched."""
_KEY = "[key]"
"""Label of an error about a key rather than about its value."""


def get_json_path(item: Mapping[str, Any], body: Any) -> JsonPath:
    """Return the place of an error, as the caller wrote it. `item`: one of `ValidationError.errors()`; the first part
    of its location says where the value came from. `body`: annotation of the endpoint's body."""
    source, *location = item["loc"]
    if source != "body" or body is None:
        return tuple(location)
    annotation, place = body, list[str | int]()
    for index, part in enumerate(location):
        is_unknown_key = item["type"] == "extra_forbidden" and index == len(location) - 1
        annotation, is_label = (None, False) if is_unknown_key else _descend(annotation, part)
        if not is_label:
            place.append(part)
    return tuple(place)


def describe_unknown_key(item: Mapping[str, Any], body: Any) -> str:
    """Return a message for an unknown key, with the nearest known key, or the place where the key belongs."""
    name, known = str(item["loc"][-1]), _list_accepted_keys(item, body)
    places = _find_paths(name, body)
    suggestion = f" (did you mean {' or '.join(places)}?)" if places else suggest_name(name, known)
    return f"unknown key{suggestion}; accepted here: {', '.join(known)}"


def _find_paths(name: str, annotation: Any, place: str = "") -> list[str]:
    """Return the dotted paths of the fields called `name`, except those inside lists."""
    found = []
    for model in _find_models(annotation):
        for key, field in _get_fields(model).items():
            path = f"{place}{key}"
            if key == name:
                found.append(path)
            elif _get_item_annotation(field.annotation) is None and path.count(".") < _MAX_DEPTH:
                found += _find_paths(name, field.annotation, f"{path}.")
    return found


def _list_accepted_keys(item: Mapping[str, Any], body: Any) -> Sequence[str]:
    """Return the keys accepted by the object in which an error has found an unknown one."""
    annotation = body
    for part in item["loc"][1:-1]:
        annotation, _ = _descend(annotation, part)
    return sorted({name for model in _find_models(annotation) for name in _get_fields(model)})


def drop_redundant_errors(
    found: Sequence[tuple[JsonPath, Mapping[str, Any]]],
) -> list[tuple[JsonPath, Mapping[str, Any]]]:
    """Return the errors without those that another one explains better.

    A container causes an error as well when its items do, and each member of a union says that a value is not of its
    type.
    """
    around = {place[:end] for place, _ in found for end in range(len(place))}
    of_values = {place for place, item in found if not _is_type_error(item)}
    return [
        (place, item)
        for place, item in found
        if place not in around and not (place in of_values and _is_type_error(item))
    ]


def _is_type_error(item: Mapping[str, Any]) -> bool:
    kind: str = item["type"]
    return kind.endswith("_type")


def _descend(annotation: Any, part: str | int) -> tuple[Any, bool]:
    """Return the annotation at the next part of a location, and whether that part is only a label of Pydantic's."""
    if isinstance(part, int):
        return _get_item_annotation(annotation), False
    models = _find_models(annotation)
    for model in models:
        if part in _get_fields(model):
            return _get_fields(model)[part].annotation, False
    # A model with validators of its own is labelled `function-after[validate(), Model]`.
    named = next((model for model in models if re.search(rf"\b{model.__name__}\b", part)), None)
    if named is not None:
        return named, True
    values = _get_item_annotation(annotation, Mapping)
    if values is None or part == _KEY:
        return annotation, True
    return values, False


def _get_fields(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of a model by the names that callers use."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, also inside unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _find_models(argument)]


def _get_item_annotation(annotation: Any, container: type = object) -> Any:
    """Return the annotation of a container's items, for a union that of its first container; None if there is none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, container):
        if issubclass(origin, Mapping):
            return arguments[1]
        if issubclass(origin, (list, tuple, set, frozenset)):
            return arguments[0]
    found = (_get_item_annotation(argument, container) for argument in arguments)
    return next((item for item in found if item is not None), None)
