"""`swiftkv serve`: serve a model at `/generate` and OpenAI's routes on this machine, without a control plane."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, add_spec_options, load_settings, validate_options
from swiftkv_platform.cli.output import get_error_console, print_result, require_extra
from swiftkv_platform.cli.sources import resolve_model_path
from swiftkv_platform.contract.attempts import MANIFEST
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.settings import is_loopback
from swiftkv_platform.specs.engine import EngineConfig

_DEPLOYMENT_NAME = "local"
"""Name of the deployment in `/health` and in the log."""


@add_spec_options(EngineConfig)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Output of `swiftkv distill`, `convert` or `jobs download`, a Hugging Face directory, a .gguf file, "
            "builtin:python-5m or a hub id.",
        ),
    ],
    given: dict[str, Any],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="Model name in requests. Default: the directory's, or the hub id.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Jinja chat template, instead of the model's.")
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Keys from `swiftkv keys create`. Default: SWIFTKV_API_KEYS_FILE, else keys.json in the home "
            "directory if it exists, else no key is needed.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Public host name to accept requests for without keys. Repeatable."),
    ] = None,
    json: Json = False,
) -> None:
    """Serve a model on this machine with `/generate` and OpenAI's routes, until Ctrl-C."""
    with require_extra("Serving here"):
        from swiftkv_platform.serve.args import HUB_PREFIX, ReplicaArgs, ServedConfig
        from swiftkv_platform.serve.standalone import serve_model
    directory = Path(resolve_model_path(model))
    is_local = directory.is_dir()
    if not is_local and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise InvalidInputError.for_field(
            "model", model, ", which is not a directory here; a directory, a .gguf file or a hub id is accepted"
        )
    called = name or (directory.resolve().name if is_local and not model.startswith("builtin:") else model)
    served = ServedConfig(
        model=called,
        artifact_uri=str(directory.resolve()) if is_local else f"{HUB_PREFIX}{model}",
        engine=validate_options(EngineConfig, given),
        verify=(directory / MANIFEST).is_file(),
        chat_template=None if chat_template is None else chat_template.read_text(encoding="utf-8"),
    )
    keys = api_keys_file or load_settings().api_keys_file
    args = ReplicaArgs(id=_DEPLOYMENT_NAME, api_keys_file=keys and str(keys), allowed_hosts=tuple(allowed_host or ()))
    configure_logging()

    spinner = get_error_console().status(f"Loading {called}")

    def ready(url: str) -> None:
        spinner.stop()
        addresses = f"{url}/v1 (OpenAI's routes) and {url}/generate"
        line = f"{called} answers at {addresses}. {_describe_access(host, keys)} Ctrl-C ends it."
        print_result({"url": url, "model": called, "keys_required": keys is not None}, line, json=json)

    try:
        with spinner:
            serve_model(served, args, host=host, port=port, on_ready=ready)
    except KeyboardInterrupt:  # how it is meant to end
        return


def _describe_access(host: str, keys: Path | None) -> str:
    """Say who is answered."""
    if keys is not None:
        return f"Callers need an API key of {keys} with the scope generate."
    if is_loopback(host):
        return "Programs on this machine need no key."
    return "It needs no key, also from other machines; --api-keys-file requires one (`swiftkv keys create`)."
