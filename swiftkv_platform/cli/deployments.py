"""`swiftkv deployments`: models in service. `swiftkv deploy` puts them there."""

from __future__ import annotations

import typer

from swiftkv_platform.cli.context import Json, Url, connect
from swiftkv_platform.cli.ids import DeploymentId
from swiftkv_platform.cli.output import local_time, print_fields, print_json, print_schema, print_table, say
from swiftkv_platform.client import ReplicaMetrics
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
    rows = [(item.id, item.model, item.status, item.url, item.message) for item in found]
    empty = "Nothing is served. `swiftkv deploy MODEL` serves one of `swiftkv models list`."
    print_table(("deployment", "model", "status", "url", "message"), rows, empty=empty)


@deployments_app.command()
def get(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show a deployment."""
    with connect(url) as client:
        found = client.deployments.get(deployment_id)
    if json:
        print_json(found)
    else:
        fields = found.model_dump(mode="json", exclude={"object"})
        print_fields({**fields, "created_at": local_time(fields.get("created_at"))})


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
