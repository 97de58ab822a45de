"""Make options of a command from the fields of a spec, with their bounds and descriptions. Knows no command."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection
from types import NoneType
from typing import Annotated, Any, Literal, Union

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swiftkv_platform.specs.base import Range
from swiftkv_platform.specs.documents import load_yaml

_SCALARS = (str, int, float, bool)


def spec_options(
    spec: type[BaseModel], *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that replaces a command's parameter `given` by one option per field of `spec`, except `without`.

    The command gets the values of the options that were used as `given`.
    """
    fields = {name: field for name, field in spec.model_fields.items() if name not in without}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(field))
        for name, field in fields.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            values = {name: arguments.pop(name) for name in fields}
            command(**arguments, given={name: value for name, value in values.items() if value not in (None, [])})

        signature = inspect.signature(command, eval_str=True)
        own = [
            item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for item in signature.parameters.values()
            if item.name != "given"
        ]
        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def _annotation(field: FieldInfo) -> Any:
    kind = _scalar(field.annotation)
    several = _several(field.annotation)
    if several is not None:
        return Annotated[several | None, typer.Option(help=f"{_help(field)} May be repeated.")]
    if kind is None:
        return Annotated[dict[str, Any] | None, typer.Option(parser=_mapping, metavar="YAML", help=_help(field))]
    limits = next((item for item in field.metadata if isinstance(item, Range)), None)
    low, high = (None, None) if limits is None else (limits.low, limits.high)
    return Annotated[kind | None, typer.Option(min=low, max=high, help=_help(field))]


def _several(annotation: Any) -> Any:
    """Return `list[item]` for a tuple annotation, optional or not; None for any other."""
    if typing.get_origin(annotation) is tuple:
        return types.GenericAlias(list, _scalar(typing.get_args(annotation)[0]))
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
    return next((found for member in members if (found := _several(member)) is not None), None)


def _scalar(annotation: Any) -> Any:
    """Return the type of a scalar annotation, optional or not; None for an object."""
    if annotation in _SCALARS:
        return annotation
    if typing.get_origin(annotation) is Literal:
        return str
    members = [member for member in typing.get_args(annotation) if member is not NoneType]
    return _scalar(members[0]) if members and typing.get_origin(annotation) is not dict else None


def _help(field: FieldInfo) -> str:
    description = " ".join((field.description or "").split())
    return description if field.default in (None, {}) else f"{description} Default: {field.default}."


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{text!r} is neither YAML nor JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not an object; expected one such as '{{share: 0.1}}'")
    return value
