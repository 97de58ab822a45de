"""`swiftkv generate`: query a deployed model. Imports no specs, so that its help is fast."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, ServeUrl, Url, connect, find_deployment_id, make_deployment_option
from swiftkv_platform.cli.output import get_error_console, print_json

if TYPE_CHECKING:
    from swiftkv_platform.client import Generation


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt to complete.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Max tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Sampling seed.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop sequence. Repeatable.")] = None,
    deployment: Annotated[
        str | None, make_deployment_option("Deployment to query, through the control plane: id, alias or model.")
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
