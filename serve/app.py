"""The Ray Serve application (`swiftkv_platform.serve.app:build_app` in a Serve config) and its replicas, which serve a
verified model over HTTP. Knows Ray Serve's lifecycle, no routes.

Ray also imports this module to build the application, so the engine and torch are imported only when a model is loaded.
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
from swiftkv_platform.security.keys import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, ServeArgs, ServedConfig
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.serve.tracing import make_request_observers
from swiftkv_platform.serve.versions import VersionSwapper, load_version

ROUTER = "swiftkv_platform.serve.prefixes.PrefixRouter"
"""Import path of the request router."""

MAX_ONGOING_REQUESTS = 4096
"""Max concurrent requests per replica that Serve allows. Far more than an engine admits, so that the replica refuses
the excess at once and with a problem document, unlike Serve."""

DRAIN_TIMEOUT_S = 120.0
"""Max seconds for a replaced replica to finish its running requests."""


def build_app(args: dict[str, Any]) -> Any:
    """Build the application for `args` (see `ServeArgs`).

    Raises:
        pydantic.ValidationError: invalid arguments or unknown keys.
        InvalidInputError: Serve runs without its own proxy, for example with HAProxy.
    """
    if RAY_SERVE_ENABLE_DIRECT_INGRESS:
        raise InvalidInputError(
            "Ray Serve runs without its own proxy, but SwiftKV's middleware of that proxy is required: it hides other "
            "tenants' routes, answers probes and routes prompts by cached prefix. Start Ray without "
            "RAY_SERVE_ENABLE_HA_PROXY, RAY_SERVE_ENABLE_DIRECT_INGRESS and RAY_SERVE_THROUGHPUT_OPTIMIZED",
            field="RAY_SERVE_ENABLE_HA_PROXY",
        )
    parsed = ServeArgs.model_validate(args)
    served = parsed.make_served_config()
    deployment = ray_serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options=_select_resources(parsed),
        autoscaling_config=make_autoscaling_config(parsed),
        user_config=None if served is None else served.model_dump(mode="json"),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        health_check_period_s=5.0,
        max_constructor_retry_count=2,
    )
    return deployment.bind(parsed.model_dump(mode="json", include=set(ReplicaArgs.model_fields)))


def _select_resources(args: ServeArgs) -> dict[str, float]:
    """Return the resources that Ray reserves for a replica: from the arguments, else by its engine."""
    given = {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus}
    defaults = compute_replica_resources(args.engine.model_dump())
    return {name: defaults[name] if amount is None else amount for name, amount in given.items()}


@ray_serve.ingress()
class Replica:
    """A replica of the deployment, with the methods that Ray Serve calls. `args`: see `ReplicaArgs`."""

    def __init__(self, args: dict[str, Any]) -> None:
        hide_unreserved_gpus()
        self._args = ReplicaArgs.model_validate(args)
        configure_logging(deployment=self._args.id)
        replica = ray_serve.get_replica_context().replica_id.unique_id
        self._export = RayMetricsExport(self._args.id, replica)
        self._state = ReplicaState(
            metrics=Metrics(self._export),
            replica=replica,
            observers=make_request_observers(with_text=self._args.log_text),
        )
        self._swapper = VersionSwapper(self._state, self._load)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the ASGI application, after the constructor and before the first `reconfigure`."""
        self._gauges = asyncio.create_task(self._export.export_gauges(self._state.metrics), name="gauges")
        files = (self._args.api_keys_file, self._args.oidc_file)
        credentials = open_credentials(*(None if file is None else Path(file) for file in files))
        return create_http_app(
            self._state,
            key_ring=credentials,
            tenant=self._args.tenant,
            max_body_bytes=self._args.max_body_bytes,
            allowed_hosts=self._args.allowed_hosts,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve the models of `user_config` (see `ServedConfig`). The first call returns when the model is loaded.
        Later calls return at once; the replica swaps to the new version when it is loaded."""
        await self._swapper.request_version(user_config)

    def check_health(self) -> None:
        """Raise `EngineDeadError` if no model is loaded or the engine has failed; Serve then replaces the replica."""
        self._state.version.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `contract.autoscaling.replicas_by_load`."""
        if self._state.has_no_model:
            return {WAITING_STEPS: 0.0, KV_CACHE_USAGE: 0.0}
        engine, state = self._state.version.engine, self._state.version.engine.state
        return {
            WAITING_STEPS: state.num_waiting_tokens / engine.config.max_num_batched_tokens,
            KV_CACHE_USAGE: state.kv_cache_usage,
        }

    async def _load(self, served: ServedConfig) -> ModelVersion:
        return await load_version(self._args, served, self._state.metrics.count_load)
