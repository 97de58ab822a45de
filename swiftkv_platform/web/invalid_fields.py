"""Conversion of Pydantic's validation errors to the fields of the request. Knows annotations, no HTTP.

Pydantic tries every member of a union and adds a label of the member to the location of its error: `("evaluation",
"tasks", 0, "TaskSpec", "zzz")`. The field of the request is `evaluation.tasks[0].zzz`.
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
"""Max depth of nested objects in the search for a misplaced key."""
_MAX_GIVEN_CHARACTERS = 100
"""Max characters of a text that a message repeats."""
_KEY_LABEL = "[key]"
"""Label of an error about a key rather than about its value."""


def get_body_annotation(scope: Mapping[str, Any]) -> Any:
    """Return the type of the body of a request's endpoint; None without a body."""
    parameters = scope["route"].dependant.body_params
    return parameters[0].field_info.annotation if parameters else None


def get_json_path(error: Mapping[str, Any], body: Any) -> JsonPath:
    """Return the JSON path of an error in the request. `error`: one of `ValidationError.errors()`; its location
    begins with the source of the value. `body`: annotation of the endpoint's body."""
    source, *location = error["loc"]
    if source != "body" or body is None:
        return tuple(location)
    annotation, place = body, list[str | int]()
    for index, part in enumerate(location):
        is_unknown_key = error["type"] == "extra_forbidden" and index == len(location) - 1
        annotation, is_label = (None, False) if is_unknown_key else _get_part_annotation(annotation, part)
        if not is_label:
            place.append(part)
    return tuple(place)


def _describe_unknown_key(error: Mapping[str, Any], body: Any) -> str:
    """Return the message for an unknown key, with a similar known key, or the path where the key is accepted."""
    name, known = str(error["loc"][-1]), _list_accepted_keys(error, body)
    places = _find_paths(name, body)
    suggestion = f" (did you mean {' or '.join(places)}?)" if places else suggest_name(name, known)
    return f"unknown key{suggestion}; accepted here: {', '.join(known)}"


def describe_validation_error(error: Mapping[str, Any], body: Any) -> str:
    """Return the message of an error in a field, with its value if that is a short scalar; the same text on all routes
    and on the command line."""
    if error["type"] == "missing":
        return "required, and missing"
    is_unknown_key, value = error["type"] == "extra_forbidden", error.get("input")
    message = _describe_unknown_key(error, body) if is_unknown_key else error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | list | tuple | BaseModel) else repr(value)
    is_short = 0 < len(shown) <= _MAX_GIVEN_CHARACTERS
    return f"{message} (given: {shown})" if is_short and shown not in message else message


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


def _list_accepted_keys(error: Mapping[str, Any], body: Any) -> Sequence[str]:
    """Return the keys accepted by the object that has the unknown key."""
    annotation = body
    for part in error["loc"][1:-1]:
        annotation, _ = _get_part_annotation(annotation, part)
    return sorted({name for model in _find_models(annotation) for name in _get_fields(model)})


def drop_redundant_errors(
    found: Sequence[tuple[JsonPath, Mapping[str, Any]]],
) -> list[tuple[JsonPath, Mapping[str, Any]]]:
    """Drop errors that another error explains better.

    If items of a container are invalid, Pydantic reports the container, too; and each member of a union reports that
    the value has another type.
    """
    around = {place[:end] for place, _ in found for end in range(len(place))}
    of_values = {place for place, error in found if not _is_type_error(error)}
    return [
        (place, error)
        for place, error in found
        if place not in around and not (place in of_values and _is_type_error(error))
    ]


def _is_type_error(error: Mapping[str, Any]) -> bool:
    kind: str = error["type"]
    # A number is no `auto`, whatever its value.
    return kind.endswith("_type") or (kind == "literal_error" and not isinstance(error.get("input"), str))


def _get_part_annotation(annotation: Any, part: str | int) -> tuple[Any, bool]:
    """Return (annotation at the next part of a location, whether that part is only a label added by Pydantic)."""
    # 1. index of a list  2. field of a model  3. label of a model  4. key of a mapping, or another label
    if isinstance(part, int):
        return _get_item_annotation(annotation), False
    models = _find_models(annotation)
    for model in models:
        if part in _get_fields(model):
            return _get_fields(model)[part].annotation, False
    # A model with validators of its own is labeled `function-after[validate(), Model]`.
    named = next((model for model in models if re.search(rf"\b{model.__name__}\b", part)), None)
    if named is not None:
        return named, True
    values = _get_item_annotation(annotation, Mapping)
    if values is None or part == _KEY_LABEL:
        return annotation, True
    return values, False


def _get_fields(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a model by their names in requests."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation, also inside unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _find_models(argument)]


def _get_item_annotation(annotation: Any, container: type = object) -> Any:
    """Return the annotation of a container's items; for a union, that of its first container; None without a
    container."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, container):
        if issubclass(origin, Mapping):
            return arguments[1]
        if issubclass(origin, (list, tuple, set, frozenset)):
            return arguments[0]
    found = (_get_item_annotation(argument, container) for argument in arguments)
    return next((error for error in found if error is not None), None)
