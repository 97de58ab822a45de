"""`swiftkv models`, `deploy` and `generate`: what distillation left behind, put to work."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, ServeUrl, Url, connect
from swiftkv_platform.cli.ids import ModelId, complete_deployment
from swiftkv_platform.cli.output import err, local_time, print_fields, print_json, print_table, say
from swiftkv_platform.cli.spec_options import spec_options
from swiftkv_platform.client import Generation
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.units import size
from swiftkv_platform.specs.deployment import DeploymentSpec

models_app = typer.Typer(no_args_is_help=True, help="Distilled models.")


@models_app.command("list")
def list_models(
    limit: Annotated[int, typer.Option(min=1, help="Most that are listed, newest first.")] = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List models, newest first."""
    with connect(url) as client:
        models = client.models.list(limit=limit)
    if json:
        print_json(models)
        return
    rows = [(model.id, model.name, model.job_id, local_time(model.created_at)) for model in models]
    print_table(("model", "name", "job", "created"), rows, empty="No models. `swiftkv jobs submit` makes one.")


@models_app.command("get")
def get_model(
    model_id: ModelId,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show a model with its lineage and quality report."""
    with connect(url) as client:
        model = client.models.get(model_id)
    if json:
        print_json(model)
    else:
        fields = model.model_dump(mode="json", exclude={"object"})
        num_bytes = fields.get("size")
        of_people = {"created_at": local_time(model.created_at), "size": None if num_bytes is None else size(num_bytes)}
        print_fields({**fields, **of_people})


@spec_options(DeploymentSpec, without=("model",))
def deploy(
    model: ModelId,
    replace: Annotated[
        str | None,
        typer.Option(
            metavar="DEPLOYMENT",
            help="Swap the model of this deployment (dep_...), live.",
            autocompletion=complete_deployment,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Return only when it answers.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 300.0,
    url: Url = None,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Serve a distilled model, or serve it where another one is served now; what is not given then stays."""
    if replace is not None and "route_prefix" in given:
        raise InvalidInputError(
            f"a deployment keeps its route prefix; leave out --route-prefix, or deploy {model} beside {replace}",
            field="route_prefix",
            value=given["route_prefix"],
        )
    with connect(url) as client, err().status(f"Deploying {model}"):
        if replace is None:
            deployment = client.deployments.create(model, **given)
        else:
            deployment = client.deployments.update(replace, model=model, **given)
        if wait:
            deployment = client.deployments.wait_ready(deployment.id, timeout)
    if json:
        print_json(deployment)
    else:
        where = f" ({deployment.url})" if deployment.url else ""
        say(f"{deployment.id} serves {deployment.model}: {deployment.status}{where}")


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            metavar="DEPLOYMENT",
            help="Ask this one (dep_...), through the control plane.",
            autocompletion=complete_deployment,
        ),
    ] = None,
    serve_url: ServeUrl = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Continue a text with the deployed model; the answer is streamed."""
    parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    parameters |= {name: value for name, value in {"seed": seed, "stop": stop}.items() if value is not None}
    with connect(url, serve_url) as client:
        if json and deployment is None:
            print_json(client.generate(prompt, **parameters))
            return
        started = time.perf_counter()
        last = Generation()
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
    err().print(f"[dim]{', '.join(parts)}[/]", highlight=False)
