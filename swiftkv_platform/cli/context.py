"""Parameters that commands share: the addresses and the spec file. Prints nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ValidationError

from swiftkv_platform.api.refused_fields import most_telling, place_of, unknown_key
from swiftkv_platform.cli.output import JSON_OPTION
from swiftkv_platform.client import Client
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.stack import Stack
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec, load_spec
from swiftkv_platform.web.hostile_json import dotted

_MAX_RETRIES = 2
"""A person waits at the keyboard; the client's own patience is for programs."""

Json = Annotated[bool, JSON_OPTION]
Url = Annotated[
    str | None,
    typer.Option(envvar="SWIFTKV_URL", help="Control plane. Default: the one `swiftkv up` started.", show_envvar=True),
]
ServeUrl = Annotated[
    str | None,
    typer.Option(
        envvar="SWIFTKV_SERVE_URL", help="Where it answers. Default: the newest running deployment.", show_envvar=True
    ),
]
SpecFile = Annotated[
    Path, typer.Option("--file", "-f", metavar="SPEC", help="Job spec, YAML or JSON.", exists=True, dir_okay=False)
]


def settings() -> Settings:
    """The process's settings. Raises `InvalidInputError` for a variable that cannot be read."""
    try:
        return Settings()
    except ValidationError as error:
        raise InvalidInputError(
            f"The environment's SWIFTKV_* variables are refused:\n{_describe(error, Settings)}"
        ) from error


def connect(url: str | None = None, serve_url: str | None = None, *, max_retries: int = _MAX_RETRIES) -> Client:
    """A client of the control plane given, else of the local stack's, else of the one at the default address."""
    if url is None:
        chosen = settings()
        state = Stack(chosen).state()
        url = f"http://{chosen.host}:{chosen.port}" if state is None else state.url
    return Client(url, os.environ.get("SWIFTKV_API_KEY"), serve_url=serve_url, max_retries=max_retries)


def read_spec(path: Path) -> JobSpec:
    """The spec in a file. Raises `InvalidInputError` naming each field that is wrong."""
    try:
        return load_spec(path)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInputError(
            f"{path} is refused:\n{_describe(error, JobSpec)}",
            field=".".join(str(part) for part in first["loc"]),
            value=first["input"],
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is neither YAML nor JSON: {error}", field="file", value=str(path)) from error


def _describe(error: ValidationError, model: type[BaseModel]) -> str:
    found = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
    lines = []
    for place, item in most_telling([(place_of(item, model), item) for item in found]):
        message = unknown_key(item, model) if item["type"] == "extra_forbidden" else item["msg"]
        given = "" if isinstance(item["input"], dict) else f" (given: {item['input']!r})"
        lines.append(f"  {dotted(place) or 'spec'}: {message}{given}")
    return "\n".join(lines)
