"""The Ray Serve application (`swiftkv_platform.serve.app:build_app` in a Serve config) and its replicas. Each replica
runs an engine on a verified model behind HTTP. Knows Ray Serve's lifecycle, no routes.

Ray imports this module to build the application too, so the engine, and torch with it, is imported on loading only.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve as ray_serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_DIRECT_INGRESS
from ray.serve.config import RequestRouterConfig

from swiftkv_platform.contract.autoscaling import (
    KV_CACHE_USAGE,
    WAITING_STEPS,
    compute_replica_resources,
    hide_unreserved_gpus,
    make_autoscaling_config,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, ServeArgs, Served
from swiftkv_platform.serve.current import Current, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport
from swiftkv_platform.serve.tracing import make_observers
from swiftkv_platform.serve.versions import Swaps, load_version

ROUTER = "swiftkv_platform.serve.prefixes.PrefixRouter"
"""Import path of the request router."""

MAX_ONGOING_REQUESTS = 4096
"""Most requests that Serve passes to a replica at a time. Far more than an engine admits, so that the replica itself
refuses the excess, immediately and with a problem document, unlike Serve."""

DRAIN_TIMEOUT_S = 120.0
"""Seconds within which a replica that is being replaced may finish its running requests."""


def build_app(args: dict[str, Any]) -> Any:
    """Build the application for `args` (see `ServeArgs`).

    Raises:
        pydantic.ValidationError: invalid arguments, also for unknown keys.
        InvalidInputError: Serve runs without its own proxy, such as with HAProxy.
    """
    if RAY_SERVE_ENABLE_DIRECT_INGRESS:
        raise InvalidInputError(
            "Ray Serve runs without its own proxy, whose middleware hides the routes of other tenants, answers probes "
            "and keeps prompts at the replica that has their prefix cached; start Ray without "
            "RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_ENABLE_DIRECT_INGRESS and RAY_SERVE_THROUGHPUT_OPTIMIZED",
            field="RAY_SERVE_ENABLE_HA_PROXY",
        )
    parsed = ServeArgs.model_validate(args)
    served = parsed.served()
    deployment = ray_serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options=_resources(parsed),
        autoscaling_config=make_autoscaling_config(parsed),
        user_config=None if served is None else served.model_dump(mode="json"),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        health_check_period_s=5.0,
        max_constructor_retry_count=2,
    )
    return deployment.bind(parsed.model_dump(mode="json", include=set(ReplicaArgs.model_fields)))


def _resources(args: ServeArgs) -> dict[str, float]:
    """Return the resources that Ray reserves for a replica: as given, else what its engine needs."""
    named = {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus}
    needed = compute_replica_resources(args.engine.model_dump())
    return {name: needed[name] if amount is None else amount for name, amount in named.items()}


@ray_serve.ingress()
class Replica:
    """Replica that Ray Serve starts, configures, health-checks and drains. `args`: see `ReplicaArgs`."""

    def __init__(self, args: dict[str, Any]) -> None:
        hide_unreserved_gpus()
        self._args = ReplicaArgs.model_validate(args)
        configure_logging(deployment=self._args.id)
        replica = ray_serve.get_replica_context().replica_id.unique_id
        self._export = RayMetricsExport(self._args.id, replica)
        self._current = Current(
            metrics=Metrics(self._export),
            replica=replica,
            observers=make_observers(with_text=self._args.log_text),
        )
        self._swaps = Swaps(self._current, self._load)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the ASGI app; called once, after the constructor. The first `reconfigure` loads the model."""
        self._gauges = asyncio.create_task(self._export.follow(self._current.metrics), name="gauges")
        keys, issuers = (
            None if file is None else Path(file) for file in (self._args.api_keys_file, self._args.oidc_file)
        )
        credentials = open_credentials(keys, issuers)
        return create_http_app(
            self._current,
            key_ring=credentials,
            tenant=self._args.tenant,
            max_body_bytes=self._args.max_body_bytes,
            allowed_hosts=self._args.allowed_hosts,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve the models of `user_config` (see `Served`). The first call returns when the replica is ready; later
        ones return at once, and the new version is swapped in when it is loaded."""
        await self._swaps.want(user_config)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if no model is loaded or the engine has failed; Serve then replaces the replica."""
        self._current.version.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load figures that `contract.autoscaling.replicas_by_load` uses."""
        if self._current.is_empty:
            return {WAITING_STEPS: 0.0, KV_CACHE_USAGE: 0.0}
        engine, state = self._current.version.engine, self._current.version.engine.state
        return {
            WAITING_STEPS: state.num_waiting_tokens / engine.config.max_num_batched_tokens,
            KV_CACHE_USAGE: state.kv_cache_usage,
        }

    async def _load(self, served: Served) -> Version:
        return await load_version(self._args, served, self._current.metrics.loaded)
