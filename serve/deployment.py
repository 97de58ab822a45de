"""A replica: one engine on one verified model, behind HTTP. Knows Ray Serve's lifecycle, no routes.

Building the application imports this module too, so the engine, and torch with it, is imported where it is loaded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve as ray_serve

from swiftkv_platform.cluster.gpus import hide_unreserved
from swiftkv_platform.contract.autoscaling import KV_CACHE_USAGE, WAITING_STEPS
from swiftkv_platform.errors import ModelError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, Served
from swiftkv_platform.serve.chat import set_template
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.loading import Loaded, load
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport
from swiftkv_platform.serve.shadow import Comparison, Judge, Shadow, judging
from swiftkv_platform.serve.swaps import Swaps
from swiftkv_platform.serve.tracing import RequestLog, configured_tracing

if TYPE_CHECKING:
    from swiftkv_platform.engine import AsyncLLMEngine
    from swiftkv_platform.engine.frontend import EngineFrontend


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
            self._current, key_ring=credentials, tenant=self._args.tenant, max_body_bytes=self._args.max_body_bytes
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


async def load_version(
    args: ReplicaArgs,
    served: Served,
    compared: Callable[[Comparison | None], None] = lambda _: None,
    loaded: Callable[[str, Mapping[str, float]], None] = lambda _model, _seconds: None,
) -> Version:
    """Load what `served` names, ready to answer, with its candidate and its shadow. Raises as `load`. `compared`: hears
    what the shadow finds. `loaded`: hears how long each phase took, by model: `fetch`, `load` and `check`."""
    version, teacher = await _load_one(args, served, loaded)
    if served.candidate is not None:
        update = {**served.candidate.model_dump(exclude={"share"}), "candidate": None}
        update["shadow"] = None if served.shadow is None else served.shadow.model_copy(update={"against": "candidate"})
        version.candidate, _ = await _load_one(args, served.model_copy(update=update), loaded)
        version.candidate.names, version.names = frozenset({served.model}), frozenset({served.candidate.model})
        version.candidate_share = served.candidate.share
    version.take_over(served)
    if served.shadow is not None:
        judge: Judge = judging(teacher)
        if version.candidate is not None and served.shadow.against == "candidate":
            judge = _scoring(version.candidate).score
        version.shadow = Shadow(_scoring(version), judge, served.shadow.share, compared)
    return version


def _scoring(version: Version) -> AsyncLLMEngine:
    """The version's engine, which gives distributions: no other backend is chosen beside a shadow."""
    from swiftkv_platform.engine import AsyncLLMEngine

    assert isinstance(version.engine, AsyncLLMEngine), f"a shadow beside backend {version.engine.backend}"
    return version.engine


async def _load_one(
    args: ReplicaArgs, served: Served, told: Callable[[str, Mapping[str, float]], None]
) -> tuple[Version, Any]:
    """A version by itself, and its teacher where that is to judge it."""
    loaded = await asyncio.to_thread(load, served)
    began = time.monotonic()
    await _lay_out_chats(loaded.engine, served)
    await _check_speaks(loaded.engine, served)
    seconds = {**loaded.seconds, "check": time.monotonic() - began}
    shown = {phase: round(value, 3) for phase, value in seconds.items()}
    told(served.model, seconds)
    get_logger().info(
        "model_loaded",
        model=served.model,
        manifest_digest=loaded.manifest_digest,
        backend=loaded.engine.backend,
        seconds=shown,
    )
    version = Version(loaded.engine, model_card(args, served, loaded, shown), created=int(time.time()))
    version.tool_call_parser = served.tool_call_parser
    return version, loaded.teacher


async def _lay_out_chats(engine: EngineFrontend, served: Served) -> None:
    """Give the model the deployment's chat template, if it has one. Raises `ModelError`, the engine closed."""
    if served.chat_template is None:
        return
    try:
        await asyncio.to_thread(set_template, engine.model.tokenizer, served.chat_template)
    except BaseException:
        await engine.aclose()
        raise


async def _check_speaks(engine: EngineFrontend, served: Served) -> None:
    """Raises `ModelError`, the engine closed, for a model whose first token is no number."""
    from swiftkv_platform.engine import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    try:
        *_, answer = [output async for output in await engine.submit([0], params, interval_s=math.inf)]
    except BaseException:
        await engine.aclose()
        raise
    logprobs = [logprob for entry in answer.logprobs or () for logprob in entry.values()]
    if answer.finish_reason == "error" or not all(map(math.isfinite, logprobs)):
        await engine.aclose()
        raise ModelError(
            f"model {served.model!r} cannot generate: {answer.error or 'its log-probabilities are no numbers'}",
            field="artifact_uri",
            value=served.artifact_uri,
        )


def model_card(args: ReplicaArgs, served: Served, loaded: Loaded, seconds: Mapping[str, float]) -> ModelCard:
    """Description of a replica's model, for `/health`; `seconds` by phase were needed to serve it."""
    config, swiftkv = loaded.engine.model.config, None
    if config.num_key_value_layers < config.num_hidden_layers:  # a dense model computes KV in all of them
        keys = ("num_hidden_layers", "num_key_value_layers", "key_value_group_size")
        swiftkv = {key: getattr(config, key) for key in keys}
    return ModelCard(
        deployment=args.id,
        model=served.model,
        manifest_digest=loaded.manifest_digest,
        swiftkv=swiftkv,
        max_model_len=loaded.engine.model.context_length,
        load_seconds=dict(seconds),
    )
