"""Parameters shared by commands: addresses, the spec file, fields of a spec, and ids, with shell completion from the
control plane. Prints nothing; if no answer comes in time, the shell completes nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, Union

import typer
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from swiftkv_platform.cli.output import JSON_OPTION
from swiftkv_platform.client import Client
from swiftkv_platform.control_plane.http.invalid_fields import (
    describe_unknown_key,
    drop_redundant_errors,
    get_json_path,
)
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.local.stack import Stack
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.names import make_paths_absolute
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.specs.base import Range
from swiftkv_platform.specs.documents import DuplicateKeyError, load_yaml
from swiftkv_platform.web.safe_json import format_path

Model = TypeVar("Model", bound=BaseModel)

_MAX_RETRIES = 2
"""Less than the client's default, which suits programs: here a user waits."""

Json = Annotated[bool, JSON_OPTION]
Url = Annotated[
    str | None,
    typer.Option(envvar="SWIFTKV_URL", help="Control plane URL. Default: that of `swiftkv up`.", show_envvar=True),
]
ServeUrl = Annotated[
    str | None,
    typer.Option(
        envvar="SWIFTKV_SERVE_URL", help="Deployment URL. Default: the newest running deployment's.", show_envvar=True
    ),
]
_SPEC_FILE_OPTION: Any = typer.Option(
    "--file", "-f", metavar="SPEC", help="Job spec, YAML or JSON.", exists=True, dir_okay=False
)
SpecFile = Annotated[Path, _SPEC_FILE_OPTION]
OptionalSpecFile = Annotated[Path | None, _SPEC_FILE_OPTION]
PrefillLayers = Annotated[
    str | None,
    typer.Option(metavar="LAYERS", help="Layers that prompts run through, such as 0-2,4,6-16, instead of -l."),
]
Limit = Annotated[int, typer.Option(min=1, help="Most entries to list, newest first.")]


def load_settings() -> Settings:
    """Return the process's settings. Raises `InvalidInputError` for a variable that is not valid."""
    try:
        return Settings()
    except ValidationError as error:
        raise InvalidInputError(
            f"The environment's SWIFTKV_* variables are refused:\n{_describe_validation_error(error, Settings)}"
        ) from error


def connect(url: str | None = None, serve_url: str | None = None, *, max_retries: int = _MAX_RETRIES) -> Client:
    """Return a client of the control plane at `url`, else of the local stack's, else of the one of the settings."""
    if url is None:
        chosen = load_settings()
        state = Stack(chosen).state()
        url = f"http://{chosen.host}:{chosen.port}" if state is None else state.url
    return Client(url, os.environ.get("SWIFTKV_API_KEY"), serve_url=serve_url, max_retries=max_retries)


def read_spec(path: Path) -> JobSpec:
    """Return the spec in a file, with relative paths made absolute from the working directory. Raises
    `InvalidInputError` naming each field that is not valid."""
    try:
        return make_paths_absolute(load_spec(path))
    except ValidationError as error:
        raise _make_validation_error(f"{path} is", error, JobSpec) from error
    except DuplicateKeyError as error:
        raise InvalidInputError(f"{path}: {error}", field="file", value=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is neither YAML nor JSON: {error}", field="file", value=str(path)) from error


def validate_options(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate options as `model`. Raises `InvalidInputError` naming each that is not valid."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _make_validation_error("The options are", error, model) from error


def _make_validation_error(what: str, error: ValidationError, model: type[BaseModel]) -> InvalidInputError:
    first = error.errors()[0]
    return InvalidInputError(
        f"{what} refused:\n{_describe_validation_error(error, model)}",
        field=".".join(str(part) for part in first["loc"]),
        value=first["input"],
    )


def _describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    # A default that depends on a refused value is missing too, which says nothing new.
    errors = [item for item in error.errors() if item["type"] != "default_factory_not_called"]
    found = [{**item, "loc": ("body", *item["loc"])} for item in errors]
    lines = []
    for place, item in drop_redundant_errors([(get_json_path(item, model), item) for item in found]):
        message = describe_unknown_key(item, model) if item["type"] == "extra_forbidden" else item["msg"]
        given = "" if isinstance(item["input"], dict) else f" (given: {item['input']!r})"
        lines.append(f"  {format_path(place) or 'spec'}: {message}{given}")
    return "\n".join(lines)


COMPLETION_TIMEOUT_S = 1.0
"""Seconds that a shell waits for ids."""
_MAX_COMPLETIONS = 100
"""Newest ids that are requested."""

Completions = list[tuple[str, str]]
"""(id, description, which some shells show)"""


def _make_completer(ask: Callable[[Client], Completions]) -> Callable[[typer.Context, str], Completions]:
    def complete(ctx: typer.Context, incomplete: str) -> Completions:
        answer: SimpleQueue[Completions] = SimpleQueue()
        url = ctx.params.get("url")
        threading.Thread(target=lambda: answer.put(_fetch_completions(url, ask)), daemon=True).start()
        try:
            offers = answer.get(timeout=COMPLETION_TIMEOUT_S)
        except Empty:
            return []
        return [(identifier, words) for identifier, words in offers if identifier.startswith(incomplete)]

    return complete


def _fetch_completions(url: str | None, ask: Callable[[Client], Completions]) -> Completions:
    try:
        with connect(url, max_retries=0) as client:
            return ask(client)
    except SwiftKVError:  # the command itself will report it
        return []


complete_job = _make_completer(
    lambda client: [(job.id, f"{job.name}, {job.status}") for job in client.jobs.list(limit=_MAX_COMPLETIONS)]
)
complete_model = _make_completer(
    lambda client: [(model.id, model.name or "") for model in client.models.list(limit=_MAX_COMPLETIONS)]
)
complete_deployment = _make_completer(
    lambda client: [(each.id, f"{each.model}, {each.status}") for each in client.deployments.list()]
)
complete_file = _make_completer(
    lambda client: [(each.id, each.filename) for each in client.files.list(limit=_MAX_COMPLETIONS)]
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job (job_...).", autocompletion=complete_job)]
ModelId = Annotated[
    str, typer.Argument(metavar="MODEL", help="Id of the model (mdl_...).", autocompletion=complete_model)
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Id (mdl_...), its job's id, an alias, or a name that only one model has.",
        autocompletion=complete_model,
    ),
]
FileId = Annotated[str, typer.Argument(metavar="FILE", help="Id of the file (file-...).", autocompletion=complete_file)]
DeploymentId = Annotated[
    str,
    typer.Argument(metavar="DEPLOYMENT", help="Id of the deployment (dep_...).", autocompletion=complete_deployment),
]


_SCALAR_TYPES = (str, int, float, bool)


def add_spec_options(
    spec: type[BaseModel], *, without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that replaces a command's parameter `given` by one option per field of `spec`, except `without`.

    The command gets the values of the options that were used as `given`.
    """
    fields = {name: field for name, field in spec.model_fields.items() if name not in without}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_make_option(field))
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


def _make_option(field: FieldInfo) -> Any:
    kind = _scalar_type(field.annotation)
    several = _list_type(field.annotation)
    if several is not None:
        return Annotated[several | None, typer.Option(help=f"{_make_help(field)} May be repeated.")]
    if kind is None:
        return Annotated[
            dict[str, Any] | None, typer.Option(parser=_parse_mapping, metavar="YAML", help=_make_help(field))
        ]
    limits = next((item for item in field.metadata if isinstance(item, Range)), None)
    low, high = (None, None) if limits is None else (limits.low, limits.high)
    return Annotated[kind | None, typer.Option(min=low, max=high, help=_make_help(field))]


def _list_type(annotation: Any) -> Any:
    """Return `list[item]` for a tuple annotation, optional or not; None for any other."""
    if typing.get_origin(annotation) is tuple:
        return types.GenericAlias(list, _scalar_type(typing.get_args(annotation)[0]))
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
    return next((found for member in members if (found := _list_type(member)) is not None), None)


def _scalar_type(annotation: Any) -> Any:
    """Return the type of a scalar annotation, optional or not; None for an object."""
    if annotation in _SCALAR_TYPES:
        return annotation
    if typing.get_origin(annotation) is Literal:
        return str
    members = [member for member in typing.get_args(annotation) if member is not NoneType]
    return _scalar_type(members[0]) if members and typing.get_origin(annotation) is not dict else None


def _make_help(field: FieldInfo) -> str:
    description = " ".join((field.description or "").split())
    return description if field.default in (None, {}) else f"{description} Default: {field.default}."


def _parse_mapping(text: str) -> dict[str, Any]:
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{text!r} is neither YAML nor JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not an object; expected one such as '{{share: 0.1}}'")
    return value
