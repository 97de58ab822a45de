"""A replica: one engine on one verified model, behind HTTP. Knows Ray Serve's lifecycle, no routes.

Building the application imports this module too, so the engine, and torch with it, is imported where it is loaded.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve as ray_serve

from serve.args import HUB_PREFIX, ReplicaArgs
from serve.http import ModelCard, create_http_app
from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.logs import configure_logging, get_logger
from swiftkv_platform.storage.artifacts import fetch_directory, manifest_digest
from swiftkv_platform.storage.object_store import open_store

if TYPE_CHECKING:
    from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine


@ray_serve.ingress()
class Replica:
    """What Ray Serve starts, asks for its health and drains. `args`: see `ReplicaArgs`."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = ReplicaArgs.model_validate(args)
        self._engine: AsyncLLMEngine | None = None
        configure_logging(deployment=self._args.id)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called once by Serve, after the constructor; a replica is ready when it returns."""
        served = await asyncio.to_thread(load, self._args)
        from swiftkv_platform.engine import AsyncLLMEngine

        self._engine = AsyncLLMEngine(served.engine)
        get_logger().info("model_loaded", model=self._args.model, manifest_digest=served.manifest_digest)
        return create_http_app(self._engine, model_card(self._args, served))

    def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine's loop has failed; Serve then replaces the replica."""
        if self._engine is not None:
            self._engine.check_health()


@dataclass(frozen=True)
class Served:
    """A loaded model and what it was loaded from."""

    engine: LLMEngine
    manifest_digest: str | None
    """None: not verified."""


def load(args: ReplicaArgs) -> Served:
    """Fetch the artifact, check every byte against its manifest, load it. Blocks.

    Raises:
        ModelError: no manifest, or a model that cannot be loaded.
        ArtifactCorruptError: a file differs from the manifest.
        StorageError: the object store does not answer.
    """
    if not args.verify:
        return Served(_load_engine(args.artifact_uri.removeprefix(HUB_PREFIX), args), None)
    with tempfile.TemporaryDirectory(prefix="swiftkv-model-") as workspace:
        directory = Path(workspace) / "model"
        try:
            manifest = fetch_directory(open_store(args.artifact_uri), "", directory)
        except ObjectNotFoundError as error:
            raise ModelError(
                f"artifact_uri {args.artifact_uri!r} has no manifest.json: it is incomplete, or a plain Hugging Face "
                "directory, which is served with verify: false",
                field="artifact_uri",
                value=args.artifact_uri,
            ) from error
        return Served(_load_engine(directory, args), manifest_digest(manifest))


def _load_engine(path: str | Path, args: ReplicaArgs) -> LLMEngine:
    from swiftkv_platform.engine import LLMEngine

    return LLMEngine.from_pretrained(path, args.engine)


def model_card(args: ReplicaArgs, served: Served) -> ModelCard:
    """What `/health` says of a replica."""
    config = served.engine.model_config
    swiftkv = None
    if getattr(config, "swiftkv", False):
        keys = ("num_hidden_layers", "num_key_value_layers", "key_value_group_size")
        swiftkv = {key: getattr(config, key) for key in keys}
    return ModelCard(
        deployment=args.id,
        model=args.model,
        manifest_digest=served.manifest_digest,
        swiftkv=swiftkv,
        max_model_len=served.engine.max_model_len,
    )
