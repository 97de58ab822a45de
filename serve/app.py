"""The Ray Serve application, `swiftkv_platform.serve.app:build_app` in a Serve config.

Knows how many replicas, not what they do.
"""

from __future__ import annotations

from typing import Any

from ray import serve as ray_serve
from ray.serve.config import RequestRouterConfig

from swiftkv_platform.contract.autoscaling import autoscaling_config, replica_resources
from swiftkv_platform.serve.args import ReplicaArgs, ServeArgs
from swiftkv_platform.serve.deployment import Replica
from swiftkv_platform.serve.prefix_router import ROUTER

MAX_ONGOING_REQUESTS = 4096
"""Requests Serve hands to a replica at once. Far more than an engine admits: the replica itself refuses what is too
much, at once and with a problem document, which Serve's own refusal is not."""

DRAIN_TIMEOUT_S = 120.0
"""Seconds for which a replica that is being replaced may go on answering what it has begun."""


def build_app(args: dict[str, Any]) -> Any:
    """The application for `args` (see `ServeArgs`; unknown keys are refused). Raises `pydantic.ValidationError`."""
    parsed = ServeArgs.model_validate(args)
    served = parsed.served()
    deployment = ray_serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options=_resources(parsed),
        autoscaling_config=autoscaling_config(parsed),
        user_config=None if served is None else served.model_dump(mode="json"),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        health_check_period_s=5.0,
        max_constructor_retry_count=2,
    )
    return deployment.bind(parsed.model_dump(mode="json", include=set(ReplicaArgs.model_fields)))


def _resources(args: ServeArgs) -> dict[str, float]:
    """Resources that Ray reserves for a replica: those that the arguments name, else those that its engine needs."""
    named = {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus}
    needed = replica_resources(args.engine.model_dump())
    return {name: needed[name] if amount is None else amount for name, amount in named.items()}
