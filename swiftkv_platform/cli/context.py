"""Options and arguments shared by commands: URLs, the spec file, spec fields, and ids with shell completion.

Completion queries the control plane. It prints nothing, and offers nothing after a timeout.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

import typer

from swiftkv_platform.cli.output import JSON_OPTION
from swiftkv_platform.errors import InvalidInputError, NotFoundError, SwiftKVError, suggest_name

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

    from swiftkv_platform.client import Client
    from swiftkv_platform.settings import Settings
    from swiftkv_platform.specs import JobSpec

Model = TypeVar("Model", bound="BaseModel")

_MAX_RETRIES = 2
"""Lower than the client's default, since a user waits."""

Json = Annotated[bool, JSON_OPTION]
Url = Annotated[
    str | None,
    typer.Option(envvar="SWIFTKV_URL", help="Control plane URL. Default: the local platform's.", show_envvar=True),
]
ServeUrl = Annotated[
    str | None,
    typer.Option(
        envvar="SWIFTKV_SERVE_URL", help="Deployment URL. Default: the newest running deployment.", show_envvar=True
    ),
]
_SPEC_FILE_OPTION: Any = typer.Option(
    "--file", "-f", metavar="SPEC", help="Job spec, YAML or JSON.", exists=True, dir_okay=False
)
SpecFile = Annotated[Path, _SPEC_FILE_OPTION]
OptionalSpecFile = Annotated[Path | None, _SPEC_FILE_OPTION]
PrefillLayers = Annotated[
    str | None, typer.Option(metavar="LAYERS", help="Layers that prompts run, e.g. 0-2,4,6-16. Replaces -l.")
]
Limit = Annotated[int, typer.Option(min=1, help="Max entries to list, newest first.")]


def load_settings() -> Settings:
    """Load the settings from the environment. Raises `InvalidInputError` for invalid variables."""
    from pydantic import ValidationError

    from swiftkv_platform.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        raise InvalidInputError(
            f"Invalid SWIFTKV_* environment variables:\n{_describe_validation_error(error, Settings)}"
        ) from error


def connect(url: str | None = None, serve_url: str | None = None, *, max_retries: int = _MAX_RETRIES) -> Client:
    """Return a client of the control plane at `url`. Default: the local stack's URL, else the settings'."""
    from swiftkv_platform.client import Client

    if url is None:
        from swiftkv_platform.local.stack import Stack

        chosen = load_settings()
        state = Stack(chosen).load_state()
        url = f"http://{chosen.host}:{chosen.port}" if state is None else state.url
    return Client(url, os.environ.get("SWIFTKV_API_KEY"), serve_url=serve_url, max_retries=max_retries)


def read_spec(path: Path) -> JobSpec:
    """Read a job spec, with relative paths resolved from the working directory. Raises `InvalidInputError` that names
    each invalid field."""
    import yaml
    from pydantic import ValidationError

    from swiftkv_platform.sources.names import make_paths_absolute
    from swiftkv_platform.specs import JobSpec, load_spec
    from swiftkv_platform.specs.documents import DuplicateKeyError

    try:
        return make_paths_absolute(load_spec(path))
    except ValidationError as error:
        raise _make_validation_error(f"{path} is not a valid job spec", error, JobSpec) from error
    except DuplicateKeyError as error:
        raise InvalidInputError(f"{path}: {error}", field="file", value=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is neither YAML nor JSON: {error}", field="file", value=str(path)) from error


def read_text_file(path: Path, field: str) -> str:
    """Return the text of a file. Raises `InvalidInputError` unless it is UTF-8, and `OSError`."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        why = f", which is not UTF-8 at byte {error.start}; use a text file in UTF-8"
        raise InvalidInputError.for_field(field, str(path), why) from error


def validate_options(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Validate options as `model`. Raises `InvalidInputError` that names each invalid option."""
    from pydantic import ValidationError

    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _make_validation_error("Invalid options", error, model) from error


def _make_validation_error(summary: str, error: ValidationError, model: type[BaseModel]) -> InvalidInputError:
    first = error.errors()[0]
    return InvalidInputError(
        f"{summary}:\n{_describe_validation_error(error, model)}",
        field=".".join(str(part) for part in first["loc"]),
        value=first["input"],
    )


def _describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    from swiftkv_platform.web.invalid_fields import (
        describe_validation_error,
        drop_redundant_errors,
        get_json_path,
    )
    from swiftkv_platform.web.safe_json import format_path

    # Skip defaults that could not be computed from an invalid value: that value is reported already.
    errors = [item for item in error.errors() if item["type"] != "default_factory_not_called"]
    found = [{**item, "loc": ("body", *item["loc"])} for item in errors]
    lines = []
    for place, item in drop_redundant_errors([(get_json_path(item, model), item) for item in found]):
        lines.append(f"  {format_path(place) or 'spec'}: {describe_validation_error(item, model)}")
    return "\n".join(lines)


COMPLETION_TIMEOUT_S = 1.0
"""Seconds that a shell waits for the control plane."""
_MAX_COMPLETIONS = 100
"""Max ids to fetch, newest first."""

Completions = list[tuple[str, str]]
"""Pairs of id and description; some shells show the description."""


def _make_completer(list_items: Callable[[Client], Completions]) -> Callable[[typer.Context, str], Completions]:
    def complete(ctx: typer.Context, incomplete: str) -> Completions:
        import swiftkv_platform.client  # noqa: F401  # not within the timeout

        result: SimpleQueue[Completions] = SimpleQueue()
        url = ctx.params.get("url")
        threading.Thread(target=lambda: result.put(_fetch_completions(url, list_items)), daemon=True).start()
        try:
            completions = result.get(timeout=COMPLETION_TIMEOUT_S)
        except Empty:
            return []
        return [item for item in completions if item[0].startswith(incomplete)]

    return complete


def _fetch_completions(url: str | None, list_items: Callable[[Client], Completions]) -> Completions:
    try:
        with connect(url, max_retries=0) as client:
            return list_items(client)
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

Reason = Annotated[str, typer.Option("--reason", help="Reason, recorded with caller and time.")]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="Job id (job_...) or unique name.", autocompletion=complete_job)
]
SpecChanges = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a spec field, e.g. training.max_steps=100. Repeatable."),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Model id (mdl_...), job id, alias, or unique model name.", autocompletion=complete_model
    ),
]
FileId = Annotated[
    str, typer.Argument(metavar="FILE", help="File id (file-...) or unique file name.", autocompletion=complete_file)
]
DeploymentId = Annotated[
    str,
    typer.Argument(
        metavar="DEPLOYMENT",
        help="Deployment id (dep_...), alias or model of a single deployment.",
        autocompletion=complete_deployment,
    ),
]


def make_deployment_option(text: str) -> Any:
    return typer.Option(metavar="DEPLOYMENT", help=text, autocompletion=complete_deployment)


def find_job_id(client: Client, job: str) -> str:
    """Return the id of the job with an id or name. Raises `InvalidInputError` if several have the name."""
    if job.startswith("job_"):
        return job
    # A name that no job has is compared with recent ones, for a suggestion.
    found = client.jobs.list(name=job) or client.jobs.list(limit=_MAX_COMPLETIONS)
    return _choose_id("job", job, [(each.id, each.status, {each.name}) for each in found])


def find_file_id(client: Client, file: str) -> str:
    """Return the id of the file with an id or name. Raises as `find_job_id`."""
    if file.startswith("file-"):
        return file
    return _choose_id("file", file, [(each.id, f"{each.rows} rows", {each.filename}) for each in client.files.list()])


def find_model_id(client: Client, model: str) -> str:
    """Return the id of the model with an id, job id, alias or name."""
    return model if model.startswith("mdl_") else str(client.models.get(model).id)


def find_deployment_id(client: Client, deployment: str) -> str:
    """Return the id of the deployment with an id, alias, model id or model name. Raises as `find_job_id`."""
    if deployment.startswith("dep_"):
        return deployment
    found = client.deployments.list()
    named = [(each.id, each.status, {each.alias, each.model}) for each in found]
    if all(deployment not in names for *_, names in named) and found:
        deployment_model = find_model_id(client, deployment)
        named = [
            (identifier, status, {deployment} if deployment_model in names else set())
            for identifier, status, names in named
        ]
    return _choose_id("deployment", deployment, named)


def _choose_id(kind: str, name: str, candidates: Sequence[tuple[str, str, set[str | None]]]) -> str:
    """Return the id of the only candidate (id, description, names) with this name. Raises `NotFoundError` for none."""
    found = [(identifier, description) for identifier, description, names in candidates if name in names]
    if not found:
        known = {each for *_, names in candidates for each in names if each}
        raise NotFoundError.for_field(
            kind,
            name,
            f": there is no {kind} of this id or name{suggest_name(name, known)}; list them with "
            f"`swiftkv {kind}s list`",
        )
    if len(found) > 1:
        listed = ", ".join(f"{identifier} ({description})" for identifier, description in found[:_MAX_LISTED_IDS])
        raise InvalidInputError.for_field(kind, name, f", the name of {len(found)} {kind}s; use an id: {listed}")
    return found[0][0]


_MAX_LISTED_IDS = 5

_SCALAR_TYPES = (str, int, float, bool)


def parse_spec_change(text: str) -> tuple[str, Any]:
    """Parse `KEY=VALUE` to (path of the field, YAML value). Raises `InvalidInputError`."""
    import yaml

    from swiftkv_platform.sources.names import make_override_absolute
    from swiftkv_platform.specs.documents import load_yaml

    path, equals, value = text.partition("=")
    if not (path and equals):
        message = f"--set is {text!r}; expected KEY=VALUE, e.g. training.max_steps=100"
        raise InvalidInputError(message, field="set", value=text)
    try:
        return path, make_override_absolute(path, load_yaml(value))
    except yaml.YAMLError as error:
        message = f"--set {path} is {value!r}, which is not valid YAML: {error}"
        raise InvalidInputError(message, field=path, value=value) from error


def add_spec_options(
    spec: type[BaseModel], *, exclude: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: add one option per field of `spec`, except `exclude`.

    The command receives the used options as `spec_values`, a dictionary by field name; `null` becomes None.
    """
    fields = {name: field for name, field in spec.model_fields.items() if name not in exclude}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_make_option(field))
        for name, field in fields.items()
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            used = {name: value for name in fields if (value := arguments.pop(name)) not in (None, [])}
            values = {name: None if value in ("null", ["null"]) else value for name, value in used.items()}
            command(**arguments, spec_values=values)

        signature = inspect.signature(command, eval_str=True)
        own = [
            item.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for item in signature.parameters.values()
            if item.name != "spec_values"
        ]
        run.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def _make_option(field: FieldInfo) -> Any:
    from swiftkv_platform.specs.base import Range

    scalar_type, list_type = _get_scalar_type(field.annotation), _get_list_type(field.annotation)
    if list_type is not None:
        parser, metavar = (None, None) if list_type == list[str] else (_parse_item, "YAML")
        text = f"{_make_help(field)} Repeatable."
        return Annotated[list_type | None, typer.Option(parser=parser, metavar=metavar, help=text)]
    if scalar_type is None:
        return Annotated[
            dict[str, Any] | None, typer.Option(parser=_parse_mapping, metavar="YAML", help=_make_help(field))
        ]
    limits = next((item for item in field.metadata if isinstance(item, Range)), None)
    low, high = (None, None) if limits is None else (limits.low, limits.high)
    return Annotated[scalar_type | None, typer.Option(min=low, max=high, help=_make_help(field))]


def _get_list_type(annotation: Any) -> Any:
    """Return `list[item]` for a tuple annotation or its optional form, `list[dict]` for items of objects, else None."""
    if typing.get_origin(annotation) is tuple:
        return types.GenericAlias(list, _get_scalar_type(typing.get_args(annotation)[0]) or dict)
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
    return next((found for member in members if (found := _get_list_type(member)) is not None), None)


def _get_scalar_type(annotation: Any) -> Any:
    """Return the type of a scalar annotation or its optional form; None for an object."""
    if annotation in _SCALAR_TYPES:
        return annotation
    if typing.get_origin(annotation) is Literal:
        return str
    members = [member for member in typing.get_args(annotation) if member is not NoneType]
    return _get_scalar_type(members[0]) if members and typing.get_origin(annotation) is not dict else None


def _make_help(field: FieldInfo) -> str:
    description = " ".join((field.description or "").split())
    has_default = not field.is_required() and field.default not in (None, {})
    return f"{description} Default: {field.default}." if has_default else description


def _parse_mapping(text: str) -> dict[str, Any] | str:
    """Parse an object, or `null`. Raises `typer.BadParameter`."""
    value = _parse_yaml(text)
    if value is not None and not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not an object; expected e.g. '{{share: 0.1}}', or null")
    return "null" if value is None else value


def _parse_item(text: str) -> dict[str, Any] | str:
    """Parse an item of a list: an object, or a text such as an id. Raises `typer.BadParameter`."""
    value = _parse_yaml(text)
    return value if isinstance(value, dict) else text


def _parse_yaml(text: str) -> Any:
    import yaml

    from swiftkv_platform.specs.documents import load_yaml

    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{text!r} is neither YAML nor JSON: {error}") from error
