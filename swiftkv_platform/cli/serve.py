"""`swiftkv serve`: serve a model with an OpenAI-compatible API on this machine, without a control plane;
`swiftkv deploy`: deploy a model on the platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    Json,
    ModelName,
    Url,
    add_spec_options,
    connect,
    find_deployment_id,
    load_settings,
    make_deployment_option,
    read_text_file,
    validate_options,
)
from swiftkv_platform.cli.output import configure_logs, get_error_console, print_result, require_extra, show_activity
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.deployment import DeploymentSpec
from swiftkv_platform.specs.engine import EngineConfig


@add_spec_options(DeploymentSpec, exclude=("model",))
def deploy(
    model: ModelName,
    replace: Annotated[
        str | None, make_deployment_option("Swap the model of this deployment: id, alias or model.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the deployment is ready.")] = True,
    timeout: Annotated[float, typer.Option(help="Max seconds to wait.")] = 300.0,
    url: Url = None,
    json: Json = False,
    *,
    spec_values: dict[str, Any],
) -> None:
    """Deploy a distilled model.

    With --replace, swap it into an existing deployment and keep that deployment's other options.
    """
    if replace is not None and "route_prefix" in spec_values:
        raise InvalidInputError(
            f"--replace cannot change the route prefix; omit --route-prefix, or deploy {model} without --replace",
            field="route_prefix",
            value=spec_values["route_prefix"],
        )
    with connect(url) as client, get_error_console().status(f"Deploying {model}"):
        if replace is None:
            deployment = client.deployments.create(model, **spec_values)
        else:
            deployment = client.deployments.update(find_deployment_id(client, replace), model=model, **spec_values)
        if wait:
            deployment = client.deployments.wait_ready(deployment.id, timeout)
    line = f"Deployment {deployment.id} of {deployment.model} is {deployment.status}"
    print_result(deployment, f"{line} at {deployment.url}" if deployment.url else line, json=json)


_DEPLOYMENT_NAME = "local"
"""Deployment name in `/health` and in logs."""


@add_spec_options(EngineConfig)
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Directory (output of `swiftkv distill`, `convert` or `jobs download`, or any Hugging Face model), "
            ".gguf file, builtin:python-5m or hub id.",
        ),
    ],
    spec_values: dict[str, Any],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="Model name in requests. Default: the directory's name or the hub id.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Jinja chat template. Default: the model's.")
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="API keys file (see `swiftkv keys create`). Default: SWIFTKV_API_KEYS_FILE, else keys.json in "
            "SWIFTKV_HOME. Without a file, requests need no key.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Host header to accept without API keys, besides local names. Repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Serve a model on this machine with an OpenAI-compatible API. Stop with Ctrl-C."""
    configure_logs()
    with show_activity("Loading libraries"), require_extra("swiftkv serve"):
        from swiftkv_platform.serve.args import HUB_PREFIX, ReplicaArgs, ServedConfig
        from swiftkv_platform.serve.standalone import serve_model
    from swiftkv_platform.cli.sources import resolve_model_path
    from swiftkv_platform.contract.attempts import MANIFEST

    directory = Path(resolve_model_path(model))
    is_local = directory.is_dir()
    given = Path(model).expanduser()  # `directory` may be a cached conversion
    model_name = name or (given.resolve().name if given.exists() else model)
    served = ServedConfig(
        model=model_name,
        artifact_uri=str(directory.resolve()) if is_local else f"{HUB_PREFIX}{model}",
        engine=validate_options(EngineConfig, spec_values),
        verify=(directory / MANIFEST).is_file(),
        chat_template=None if chat_template is None else read_text_file(chat_template, "chat_template"),
    )
    keys = api_keys_file or load_settings().api_keys_file
    args = ReplicaArgs(id=_DEPLOYMENT_NAME, api_keys_file=keys and str(keys), allowed_hosts=tuple(allowed_host or ()))
    spinner = get_error_console().status(f"Loading {model_name}")

    def print_ready(url: str) -> None:
        spinner.stop()
        addresses = f"{url}/v1 (OpenAI-compatible) and {url}/generate"
        line = f"Serving {model_name} at {addresses}. {_describe_access(host, keys)} Press Ctrl-C to stop."
        print_result({"url": url, "model": model_name, "keys_required": keys is not None}, line, json=json)

    try:
        with spinner:
            serve_model(served, args, host=host, port=port, on_ready=print_ready)
    except KeyboardInterrupt:  # the normal way to stop
        return


def _describe_access(host: str, keys: Path | None) -> str:
    from swiftkv_platform.settings import is_loopback

    if keys is not None:
        return f"Requests need an API key from {keys} with the scope generate."
    if is_loopback(host):
        return "Requests from this machine need no API key."
    return "Other machines need no API key; use --api-keys-file to require one (`swiftkv keys create`)."
