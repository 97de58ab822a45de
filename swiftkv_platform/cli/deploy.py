"""`swiftkv deploy` and `generate`: deploy a model, and query it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    Json,
    ModelName,
    ServeUrl,
    Url,
    add_spec_options,
    complete_deployment,
    connect,
    find_deployment_id,
)
from swiftkv_platform.cli.output import get_error_console, print_json, print_result
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.deployment import DeploymentSpec

if TYPE_CHECKING:
    from swiftkv_platform.client import Generation


def _make_deployment_option(text: str) -> Any:
    return typer.Option(metavar="DEPLOYMENT", help=text, autocompletion=complete_deployment)


@add_spec_options(DeploymentSpec, exclude=("model",))
def deploy(
    model: ModelName,
    replace: Annotated[
        str | None, _make_deployment_option("Swap the model of this deployment: id, alias or model.")
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


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt to complete.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Max tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Sampling seed.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop sequence. Repeatable.")] = None,
    deployment: Annotated[
        str | None, _make_deployment_option("Deployment to query, through the control plane: id, alias or model.")
    ] = None,
    serve_url: ServeUrl = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Generate a completion with a deployed model, streamed to stdout."""
    from swiftkv_platform.client import Generation

    parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    parameters |= {name: value for name, value in {"seed": seed, "stop": stop}.items() if value is not None}
    with connect(url, serve_url) as client:
        if json and deployment is None:
            print_json(client.generate(prompt, **parameters))
            return
        started, last = time.perf_counter(), Generation()
        if deployment is None:
            pieces = client.generate(prompt, stream=True, **parameters)
        else:
            pieces = client.deployments.generate(find_deployment_id(client, deployment), prompt, **parameters)
        for last in pieces:
            if json:
                print_json(last)
            else:
                typer.echo(last.text, nl=False)
        if json:
            return
        typer.echo()
    _print_statistics(last, time.perf_counter() - started)


def _print_statistics(last: Generation, seconds: float) -> None:
    if last.usage is None:
        return
    parts = [f"{last.usage.prompt_tokens} + {last.usage.completion_tokens} tokens in {seconds:.2f} s"]
    if last.timings is not None and last.timings.ttft_ms is not None:
        parts.append(f"first token after {last.timings.ttft_ms:.0f} ms")
    get_error_console().print(f"[dim]{', '.join(parts)}[/]", highlight=False)
