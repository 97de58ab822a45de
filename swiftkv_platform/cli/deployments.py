"""`swiftkv deployments`, `deploy` and `generate`: manage and query deployed models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    DeploymentId,
    Json,
    ModelName,
    ServeUrl,
    Url,
    add_spec_options,
    complete_deployment,
    connect,
)
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    get_error_console,
    print_json,
    print_result,
    print_schema,
    print_table,
    print_table_result,
)
from swiftkv_platform.client import Generation, Resource
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.terminal import format_duration, pluralize
from swiftkv_platform.specs.deployment import DeploymentSpec

deployments_app = typer.Typer(no_args_is_help=True, help="Manage deployments. Create one with `swiftkv deploy`.")


@deployments_app.command("list")
def list_deployments(url: Url = None, json: Json = False) -> None:
    """List deployments, newest first."""
    with connect(url) as client:
        found = client.deployments.list()
    columns: Columns = {
        "deployment": "id",
        "model": "model",
        "status": "status",
        "replicas": _format_replicas,
        "url": "url",
    }
    empty = "No deployments. Create one with `swiftkv deploy MODEL`; `swiftkv models list` shows the models."
    print_table_result(found, {**columns, "message": "message"}, empty=empty, json=json)


@deployments_app.command()
def get(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show details of a deployment."""
    with connect(url) as client:
        found = client.deployments.get(deployment_id)
    print_result(found, _format_deployment(found), json=json)


@deployments_app.command()
def metrics(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show the metrics of each replica, counted since its start."""
    with connect(url) as client:
        found = client.deployments.metrics(deployment_id)
    if json:
        print_json(found)
        return
    rows = [_make_metrics_row(replica) for replica in found.replicas]
    columns = ("replica", "requests", "prompt tokens", "tokens", "exited", "TTFT ms", "KV usage", "running", "waiting")
    print_table(columns, rows, empty="No running replicas.")


@deployments_app.command()
def delete(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Delete a deployment; replicas finish their running requests."""
    with connect(url) as client:
        client.deployments.delete(deployment_id)
    print_result({"id": deployment_id, "status": "deleting"}, f"{deployment_id} is being deleted.", json=json)


@deployments_app.command()
def schema() -> None:
    """Print the JSON schema of a deployment (the body of `POST /deployments`)."""
    print_schema(DeploymentSpec)


def _format_deployment(deployment: Resource) -> dict[str, Any]:
    candidate = deployment.candidate
    return {
        "deployment": deployment.id,
        "model": f"{deployment.model} (alias {deployment.alias})" if deployment.alias else deployment.model,
        "status": deployment.status,
        "message": deployment.message,
        "url": deployment.url,
        "replicas": _format_replicas(deployment),
        "cold start": _format_cold_start(deployment.load_seconds),
        "scaling": _format_scaling(deployment),
        "engine": ", ".join(f"{name} {value}" for name, value in (deployment.engine or {}).items()),
        "candidate": f"{candidate['model']}, {candidate['share']:.1%} of requests" if candidate else None,
        "artifact": deployment.artifact_uri,
        "version": deployment.version,
        "created": format_local_time(deployment.created_at),
    }


def _format_replicas(deployment: Resource) -> str | None:
    """Return e.g. `1 (min 1, max 4)`; None if the control plane does not report it."""
    if deployment.min_replicas is None or deployment.max_replicas is None:
        return None
    return f"{deployment.replicas or 0} (min {deployment.min_replicas}, max {deployment.max_replicas})"


def _format_cold_start(seconds: Mapping[str, float] | None) -> str | None:
    """Return e.g. `2.53 s (fetch 1.20, load 1.31, check 0.02)`; None until a replica reports it."""
    if not seconds:
        return None
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    return f"{sum(seconds.values()):.2f} s ({phases})"


def _format_scaling(deployment: Resource) -> str | None:
    if deployment.min_replicas == deployment.max_replicas or deployment.upscale_delay_s is None:
        return None
    target = deployment.target_ongoing_requests
    load = "" if target is None else f"target {pluralize(target, 'concurrent request')} per replica, "
    up, down = format_duration(deployment.upscale_delay_s), format_duration(deployment.downscale_delay_s)
    return f"{load}scale up after {up}, down after {down}"


def _make_metrics_row(replica: dict[str, Any]) -> tuple[str, ...]:
    values = replica["values"]
    count, tokens = values.get("time_to_first_token_seconds_count", 0.0), values.get("generation_tokens_total", 0.0)
    return (
        replica["replica"],
        f"{values.get('request_success_total', 0.0):g}",
        f"{values.get('prompt_tokens_total', 0.0):g}",
        f"{tokens:g}",
        f"{values.get('tokens_exited_total', 0.0) / tokens:.1%}" if tokens else "",
        f"{1000 * values['time_to_first_token_seconds_sum'] / count:.0f}" if count else "",
        f"{values['kv_cache_usage_perc']:.1%}" if "kv_cache_usage_perc" in values else "",
        f"{values.get('num_requests_running', 0.0):g}",
        f"{values.get('num_requests_waiting', 0.0):g}",
    )


def _make_deployment_option(text: str) -> Any:
    return typer.Option(metavar="DEPLOYMENT", help=text, autocompletion=complete_deployment)


@add_spec_options(DeploymentSpec, exclude=("model",))
def deploy(
    model: ModelName,
    replace: Annotated[str | None, _make_deployment_option("Swap the model of this deployment (dep_...).")] = None,
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
            deployment = client.deployments.update(replace, model=model, **spec_values)
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
        str | None, _make_deployment_option("Deployment to query (dep_...), through the control plane.")
    ] = None,
    serve_url: ServeUrl = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Generate a completion with a deployed model, streamed to stdout."""
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
            pieces = client.deployments.generate(deployment, prompt, **parameters)
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
