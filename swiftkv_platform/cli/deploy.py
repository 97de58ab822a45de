"""`swiftkv deploy`: deploy a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    Json,
    ModelName,
    Url,
    add_spec_options,
    connect,
    find_deployment_id,
    make_deployment_option,
)
from swiftkv_platform.cli.output import get_error_console, print_result
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.deployment import DeploymentSpec


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
