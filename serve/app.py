"""The Ray Serve application, `serve.app:build_app` in a Serve config. Knows how many replicas, not what they do."""

from __future__ import annotations

from typing import Any

from ray import serve as ray_serve

from serve.args import ReplicaArgs, ServeArgs
from serve.deployment import Replica
from swiftkv_platform.engine import EngineConfig

REFUSAL_HEADROOM = 32
"""Requests a replica takes on beyond its queue, only to refuse them: Serve's own refusal comes late and is no problem
document."""

DRAIN_TIMEOUT_S = 120.0
"""How long a replica that is being replaced may go on answering what it has begun."""


def build_app(args: dict[str, Any]) -> Any:
    """The application for `args` (see `ServeArgs`; unknown keys are refused). Raises `pydantic.ValidationError`."""
    parsed = ServeArgs.model_validate(args)
    deployment = ray_serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options=_resources(parsed.engine),
        autoscaling_config={
            "min_replicas": parsed.min_replicas,
            "max_replicas": parsed.max_replicas,
            "target_ongoing_requests": parsed.target_ongoing_requests,
        },
        max_ongoing_requests=parsed.engine.max_num_waiting + REFUSAL_HEADROOM,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        health_check_period_s=5.0,
        max_constructor_retry_count=2,
    )
    # Only what a replica needs: Serve replaces replicas whose arguments change, and scaling is no reason to.
    return deployment.bind(parsed.model_dump(mode="json", include=set(ReplicaArgs.model_fields)))


def _resources(engine: EngineConfig) -> dict[str, float]:
    """What Ray reserves for a replica."""
    return {"num_cpus": engine.num_threads or 1, "num_gpus": 1 if engine.device == "cuda" else 0}
