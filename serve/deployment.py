"""A replica: one engine on one verified model, behind HTTP. Knows Ray Serve's lifecycle, no routes.

Building the application imports this module too, so the engine, and torch with it, is imported where it is loaded.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve as ray_serve

from swiftkv_platform.contract.autoscaling import KV_CACHE_USAGE, WAITING_STEPS
from swiftkv_platform.contract.gpus import hide_unreserved
from swiftkv_platform.logs import configure_logging
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, Served
from swiftkv_platform.serve.current import Current, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport
from swiftkv_platform.serve.swaps import Swaps
from swiftkv_platform.serve.tracing import RequestLog, configured_tracing
from swiftkv_platform.serve.versions import load_version


@ray_serve.ingress()
class Replica:
    """Replica that Ray Serve starts, configures, asks for its health and drains. `args`: see `ReplicaArgs`."""

    def __init__(self, args: dict[str, Any]) -> None:
        hide_unreserved()
        self._args = ReplicaArgs.model_validate(args)
        configure_logging(deployment=self._args.id)
        tracing = configured_tracing()
        replica = ray_serve.get_replica_context().replica_id.unique_id
        self._export = RayMetricsExport(self._args.id, replica)
        self._current = Current(
            metrics=Metrics(self._export),
            replica=replica,
            observers=[RequestLog(with_text=self._args.log_text), *([tracing] if tracing else [])],
        )
        self._swaps = Swaps(self._current, self._load)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the app, once, after the constructor; the model comes with the first `reconfigure`."""
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
        """Serve what `user_config` (`Served`) says. The replica is ready when the first call returns; later ones
        return at once, and the version is swapped when the new one is loaded."""
        await self._swaps.want(user_config)

    def check_health(self) -> None:
        """Raises `EngineDeadError` if nothing is loaded or the engine's loop has failed; Serve then replaces the
        replica."""
        self._current.version.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Load that `contract.autoscaling.replicas_by_load` goes by."""
        if self._current.is_empty:
            return {WAITING_STEPS: 0.0, KV_CACHE_USAGE: 0.0}
        engine, state = self._current.version.engine, self._current.version.engine.state
        return {
            WAITING_STEPS: state.num_waiting_tokens / engine.config.max_num_batched_tokens,
            KV_CACHE_USAGE: state.kv_cache_usage,
        }

    async def _load(self, served: Served) -> Version:
        metrics = self._current.metrics
        return await load_version(self._args, served, metrics.compared, metrics.loaded)
