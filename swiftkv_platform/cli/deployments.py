"""`swiftkv deployments`: models in service. `swiftkv deploy` puts them there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from swiftkv_platform.cli.context import Json, Url, connect
from swiftkv_platform.cli.ids import DeploymentId
from swiftkv_platform.cli.output import local_time, print_fields, print_json, print_schema, print_table, say
from swiftkv_platform.client import ReplicaMetrics
from swiftkv_platform.local.units import duration, plural
from swiftkv_platform.specs.deployment import DeploymentSpec

deployments_app = typer.Typer(no_args_is_help=True, help="Models in service; `swiftkv deploy` puts them there.")


@deployments_app.command("list")
def list_deployments(url: Url = None, json: Json = False) -> None:
    """List deployments, newest first."""
    with connect(url) as client:
        found = client.deployments.list()
    if json:
        print_json(found)
        return
    rows = [(item.id, item.model, item.status, _replicas(item.model_dump()), item.url, item.message) for item in found]
    empty = "Nothing is served. `swiftkv deploy MODEL` serves one of `swiftkv models list`."
    print_table(("deployment", "model", "status", "replicas", "url", "message"), rows, empty=empty)


@deployments_app.command()
def get(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show a deployment."""
    with connect(url) as client:
        found = client.deployments.get(deployment_id)
    if json:
        print_json(found)
    else:
        print_fields(_sentences(found.model_dump(mode="json")))


@deployments_app.command()
def metrics(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show what each replica has measured since it was started."""
    with connect(url) as client:
        found = client.deployments.metrics(deployment_id)
    if json:
        print_json(found)
        return
    rows = [_row(replica) for replica in found.replicas]
    columns = ("replica", "requests", "prompt tokens", "tokens", "exited", "TTFT ms", "KV in use", "running", "waiting")
    print_table(columns, rows, empty="No replica runs.")


@deployments_app.command()
def delete(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Stop serving; replicas finish what they have."""
    with connect(url) as client:
        client.deployments.delete(deployment_id)
    if json:
        print_json({"id": deployment_id, "status": "deleting"})
    else:
        say(f"{deployment_id} is being taken out of service.")


@deployments_app.command()
def schema() -> None:
    """Print the JSON schema of the body of `POST /deployments`."""
    print_schema(DeploymentSpec)


def _sentences(found: Mapping[str, Any]) -> dict[str, Any]:
    alias = found.get("alias")
    return {
        "deployment": found["id"],
        "model": f"{found['model']}, as {alias} stands for it" if alias else found["model"],
        "status": found["status"],
        "message": found.get("message"),
        "url": found.get("url"),
        "replicas": _replicas(found),
        "cold start": _cold_start(found.get("load_seconds")),
        "scaling": _scaling(found),
        "engine": ", ".join(f"{name} {value}" for name, value in (found.get("engine") or {}).items()),
        "candidate": _share(found.get("candidate"), "model", "of the requests"),
        "shadow": _share(found.get("shadow"), "against", "of the answers"),
        "artifact": found.get("artifact_uri"),
        "version": found.get("version"),
        "created": local_time(found.get("created_at")),
    }


def _replicas(found: Mapping[str, Any]) -> str | None:
    """`1 of 1 to 4`; None where the control plane does not tell."""
    least, most = found.get("min_replicas"), found.get("max_replicas")
    if least is None or most is None:
        return None
    return (
        f"{found.get('replicas', 0)} of {most}" if least == most else f"{found.get('replicas', 0)} of {least} to {most}"
    )


def _cold_start(seconds: Mapping[str, float] | None) -> str | None:
    """`2.53 s (fetch 1.20, load 1.31, check 0.02)`; None while no replica has told."""
    if not seconds:
        return None
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    return f"{sum(seconds.values()):.2f} s ({phases})"


def _scaling(found: Mapping[str, Any]) -> str | None:
    if found.get("min_replicas") == found.get("max_replicas") or "upscale_delay_s" not in found:
        return None
    target = found.get("target_ongoing_requests")
    load = "" if target is None else f"for {plural(target, 'request')} at a time each, "
    return f"{load}up after {duration(found['upscale_delay_s'])}, down after {duration(found['downscale_delay_s'])}"


def _share(part: Mapping[str, Any] | None, name: str, whole: str) -> str | None:
    return None if not part else f"{part[name]}, {part['share']:.1%} {whole}"


def _row(replica: ReplicaMetrics) -> tuple[str, ...]:
    values = replica.values
    count, tokens = values.get("time_to_first_token_seconds_count", 0.0), values.get("generation_tokens_total", 0.0)
    return (
        replica.replica,
        f"{values.get('request_success_total', 0.0):g}",
        f"{values.get('prompt_tokens_total', 0.0):g}",
        f"{tokens:g}",
        f"{values.get('tokens_exited_total', 0.0) / tokens:.1%}" if tokens else "",
        f"{1000 * values['time_to_first_token_seconds_sum'] / count:.0f}" if count else "",
        f"{values['kv_cache_usage_perc']:.1%}" if "kv_cache_usage_perc" in values else "",
        f"{values.get('num_requests_running', 0.0):g}",
        f"{values.get('num_requests_waiting', 0.0):g}",
    )
