"""Load a model: fetch and verify its files, and start the engine that suits it, this project's own or vLLM.

Ray imports this module to build the application too, so the engine, and torch with it, is imported on loading only.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.families import is_served_by_vllm
from swiftkv_platform.serve.args import HUB_PREFIX, Served
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.model_directories import local_directory
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifact_cache import ArtifactCache
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.downloads import download_model

if TYPE_CHECKING:
    from swiftkv_platform.configs.adapter import BaseModelReference
    from swiftkv_platform.engine.frontend import EngineFrontend

_BASE = "base.name_or_path"


@dataclass(frozen=True)
class Loaded:
    """A loaded model and what it was loaded from."""

    engine: EngineFrontend
    manifest_digest: str | None
    """SHA-256 of the manifest that the model was verified against; None if it was not verified."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: `fetch` (from the store or this machine's cache) and `load`."""


def load(served: Served) -> Loaded:
    """Fetch the artifact, check every byte against its manifest, and load it. Blocks.

    Raises:
        ModelError: no manifest, an adapter whose base is missing or a different model, or a model that cannot be loaded
            (by the requested backend).
        InvalidInputError: an engine too small for any request.
        ArtifactCorruptError: a file differs from the manifest.
        StorageError: the object store does not answer.
    """
    began = time.monotonic()
    with _fetched(served) as (adapted, digest), _whole(adapted, served) as directory:
        fetched = time.monotonic()
        engine = _load_engine(directory, served)
        seconds = {"fetch": fetched - began, "load": time.monotonic() - fetched}
        return Loaded(engine, digest, seconds)


@contextmanager
def _fetched(served: Served) -> Iterator[tuple[Path, str | None]]:
    """Yield (directory of the model, digest of its manifest), available within the context."""
    if not served.verify:
        name = served.artifact_uri.removeprefix(HUB_PREFIX)
        yield local_directory(name, field="artifact_uri", pickles=True), None  # vLLM reads them
        return
    settings = Settings()
    cache = ArtifactCache(settings.home / "models", settings.model_cache_bytes)
    with ExitStack() as stack:
        try:
            directory, manifest = stack.enter_context(cache.held(open_store(served.artifact_uri), ""))
        except ObjectNotFoundError as error:
            raise ModelError(
                f"artifact_uri {served.artifact_uri!r} has no manifest.json: it is incomplete, or a plain Hugging Face "
                "directory, which is served with verify: false",
                field="artifact_uri",
                value=served.artifact_uri,
            ) from error
        yield directory, manifest_digest(manifest)


@contextmanager
def _whole(directory: Path, served: Served) -> Iterator[Path]:
    """Yield the directory of the whole model, available within the context. For an adapter it includes the base, which
    is found like a job's teacher, under the tenant's rules."""
    from swiftkv_platform.configs.adapter import ADAPTER

    if not (directory / ADAPTER).is_file():
        yield directory
        return
    from swiftkv_platform.model.adapters import whole_model
    from swiftkv_platform.model.bases import model_directory

    access = Access(served.base_access.roots, served.base_access.hub_organizations)
    with tempfile.TemporaryDirectory(prefix="swiftkv-base-") as workspace:

        def download(uri: str) -> Path:
            return download_model(uri, Path(workspace), access=access, field=_BASE)

        def find(base: BaseModelReference) -> str:
            return model_directory(base.name_or_path, base.revision, access=access, download=download, field=_BASE)

        with whole_model(directory, find_base=find) as (whole, _):
            yield Path(whole)


def _load_engine(directory: Path, served: Served) -> EngineFrontend:
    """Start the engine that `choose_backend` selects on the model."""
    if choose_backend(served.engine, _surroundings(directory, served)) == "vllm":
        from swiftkv_platform.serve.vllm_engine import load_vllm

        return load_vllm(directory, served.engine)
    from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine

    return AsyncLLMEngine(LLMEngine.from_pretrained(directory, served.engine.model_copy(update={"backend": "native"})))


def _surroundings(directory: Path, served: Served) -> Surroundings:
    import torch

    from swiftkv_platform.engine.loading import read_served_config

    config, has_cuda = read_served_config(directory, served.engine), torch.cuda.is_available()
    heads = getattr(config, "num_key_value_heads_swiftkv", None)
    return Surroundings(
        device=("cuda" if has_cuda else "cpu") if served.engine.device == "auto" else served.engine.device,
        has_vllm=find_spec("vllm") is not None,
        model_type=config.model_type,
        has_exit_head=bool(getattr(config, "early_exit", False)),
        has_own_head_count=heads not in (None, getattr(config, "num_key_value_heads", None)),
        bypasses_layers=bool(getattr(config, "swiftkv_prefill_layers", None) and config.layer_map.bypassed),
    )


@dataclass(frozen=True)
class Surroundings:
    """Facts, apart from the engine options, that decide which engine can run a version."""

    device: str
    """`cpu` or `cuda`: the device for the version."""
    has_vllm: bool
    """Whether the replica's environment has vLLM."""
    model_type: str
    """Model type in the artifact's `config.json`."""
    has_exit_head: bool
    """Whether requests may ask for an early exit."""
    has_own_head_count: bool = False
    """Whether the student's upper layers have another number of key-value heads than its teacher's."""
    bypasses_layers: bool = False
    """Whether the student's prompts bypass layers below l."""


def choose_backend(config: EngineConfig, around: Surroundings) -> Backend:
    """Choose the engine for a version. `auto`: vLLM on a GPU if it supports all that the version needs, else native. A
    named backend is always chosen; loading fails if it cannot serve the model."""
    if config.backend != "auto":
        return config.backend
    suits_vllm = (
        around.device == "cuda"
        and around.has_vllm
        and is_served_by_vllm(around.model_type)
        and not around.has_exit_head
        and not around.has_own_head_count
        and not around.bypasses_layers
        and not config.native_only
    )
    return "vllm" if suits_vllm else "native"
