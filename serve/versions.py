"""Loading of model versions (a tested model with its candidate), and swaps of a replica's version. Knows no HTTP, no
Ray.

Loading fetches and verifies a model's files and starts its engine, this project's or vLLM. A swap loads the new version
next to the old one, switches to it and drains the old one. Ray also imports this module to build the application, so
the engine and torch are imported only when a model is loaded.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ulid import ULID

from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.families import is_served_by_vllm
from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.adapters import AdapterPool, FetchedAdapter
from swiftkv_platform.serve.args import HUB_PREFIX, ReplicaArgs, ServedConfig
from swiftkv_platform.serve.chat import set_chat_template
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState, ServedModelInfo, SwapState
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs.deployment import ResolvedAdapter
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.storage.artifacts import hash_manifest
from swiftkv_platform.storage.downloads import ArtifactCache, make_model_download
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.student_shape import StudentShape
from swiftkv_platform.web.server import tune_interpreter

if TYPE_CHECKING:
    from swiftkv_platform.configs.adapter import BaseModelReference
    from swiftkv_platform.engine.frontend import EngineFrontend
    from swiftkv_platform.model.weights.adapters import FindBase


_BASE_MODEL_FIELD = "base.name_or_path"


@dataclass(frozen=True)
class LoadedModel:
    engine: EngineFrontend
    manifest_digest: str | None
    """SHA-256 of the verified manifest; None for an unverified model."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `fetch` (from the store or this machine's cache) and `load`."""
    adapters: Mapping[str, FetchedArtifact] = field(default_factory=dict)
    """Loaded adapters by model."""


@dataclass(frozen=True)
class FetchedArtifact:
    """An artifact on this machine."""

    directory: Path
    manifest_digest: str | None
    """As in `LoadedModel`."""
    num_bytes: int
    """Bytes of its weights."""

    @classmethod
    def from_directory(cls, directory: Path, manifest_digest: str | None) -> Self:
        num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        return cls(directory, manifest_digest, num_bytes)


def load_model(served: ServedConfig) -> LoadedModel:
    """Fetch the artifact, check its files against the manifest, and load it, with the adapters that
    `max_adapter_bytes` admits. Blocks.

    Raises:
        ModelError: no manifest, a missing or different base model of an adapter, or a model that the backend cannot
            load. InvalidInputError: an engine too small for any request. ArtifactCorruptError: a file differs from the
            manifest. StorageError: the object store is unavailable.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        artifact = stack.enter_context(_fetch_artifact(served))
        find_base = stack.enter_context(_open_base_finder(served))
        weights = stack.enter_context(_merge_adapter(artifact.directory, find_base))
        adapters, left = dict[str, FetchedArtifact](), served.engine.max_adapter_bytes
        for adapter in served.adapters or ():
            fetched_adapter = stack.enter_context(_fetch_artifact(_select_adapter(served, adapter)))
            if left is None or fetched_adapter.num_bytes <= left:
                adapters[adapter.model] = fetched_adapter
                left = None if left is None else left - fetched_adapter.num_bytes
        fetched = time.monotonic()
        engine = _load_engine(artifact.directory, weights, served, adapters, find_base)
        seconds = {"fetch": fetched - started, "load": time.monotonic() - fetched}
        return LoadedModel(engine, artifact.manifest_digest, seconds, adapters)


def _select_adapter(served: ServedConfig, adapter: ResolvedAdapter) -> ServedConfig:
    """Return the configuration that serves an adapter alone."""
    update = {"model": adapter.model, "artifact_uri": adapter.artifact_uri, "candidate": None, "adapters": None}
    return served.model_copy(update=update)


@contextmanager
def _fetch_artifact(served: ServedConfig) -> Iterator[FetchedArtifact]:
    """Yield the artifact. Its directory exists within the context."""
    if not served.verify:
        name = served.artifact_uri.removeprefix(HUB_PREFIX)
        # vLLM reads pickles
        yield FetchedArtifact.from_directory(fetch_model_directory(name, field="artifact_uri", pickles=True), None)
        return
    settings = Settings()
    cache = ArtifactCache(settings.home / "models", settings.model_cache_bytes)
    with ExitStack() as stack:
        try:
            directory, manifest = stack.enter_context(cache.open_copy(open_store(served.artifact_uri), ""))
        except ObjectNotFoundError as error:
            raise ModelError(
                f"artifact_uri {served.artifact_uri!r} has no manifest.json; use verify: false for a Hugging Face "
                "directory, or publish the artifact again",
                field="artifact_uri",
                value=served.artifact_uri,
            ) from error
        yield FetchedArtifact.from_directory(directory, hash_manifest(manifest))


@contextmanager
def _merge_adapter(directory: Path, find_base: FindBase) -> Iterator[Path | None]:
    """Yield the directory with the weights of an adapter and its base, available within the context; None for other
    models."""
    from swiftkv_platform.configs.adapter import ADAPTER_FILE

    if not (directory / ADAPTER_FILE).is_file():
        yield None
        return
    from swiftkv_platform.model.weights.adapters import open_merged_model

    with open_merged_model(directory, find_base=find_base) as (whole, _):
        yield Path(whole)


@contextmanager
def _open_base_finder(served: ServedConfig) -> Iterator[FindBase]:
    """Yield a function that finds an adapter's base as a job's teacher is found, by the tenant's rules. A base that it
    downloads exists within the context."""
    access = Access(served.base_access.roots, served.base_access.hub_organizations)
    with tempfile.TemporaryDirectory(prefix="swiftkv-base-") as workspace:
        download = make_model_download(Path(workspace), access=access, field=_BASE_MODEL_FIELD)

        def find_base(base: BaseModelReference) -> str:
            from swiftkv_platform.model.weights.bases import resolve_model_directory

            return resolve_model_directory(
                base.name_or_path, base.revision, access=access, download=download, field=_BASE_MODEL_FIELD
            )

        yield find_base


def _load_engine(
    directory: Path,
    weights: Path | None,
    served: ServedConfig,
    adapters: Mapping[str, FetchedArtifact],
    find_base: FindBase,
) -> EngineFrontend:
    """Load the model in `directory`, whose weights may be in another directory, and its adapters."""
    import torch

    from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine
    from swiftkv_platform.engine.loading import read_served_config

    device: str = served.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config, has_vllm = read_served_config(weights or directory, served.engine), find_spec("vllm") is not None
    backend = (
        "native"
        if served.adapters is not None
        else choose_backend(served.engine, config, device=device, has_vllm=has_vllm)
    )
    if backend == "vllm":
        from swiftkv_platform.serve.vllm_engine import load_vllm

        return load_vllm(weights or directory, served.engine)
    engine = LLMEngine.from_pretrained(
        directory,
        served.engine.model_copy(update={"backend": "native"}),
        weights=weights,
        adapters=None if served.adapters is None else {name: each.directory for name, each in adapters.items()},
        find_base=find_base,
    )
    return AsyncLLMEngine(engine)


def choose_backend(options: EngineConfig, config: Any, *, device: str, has_vllm: bool) -> Backend:
    """Choose the engine for a version. `auto`: vLLM on a GPU if it supports the model and the options, else native. A
    named backend is always chosen; loading fails if it does not support the model.

    Args:
        config: the model's configuration.
        device: `cpu` or `cuda`.
        has_vllm: whether the replica's environment has vLLM.
    """
    if options.backend != "auto":
        return options.backend
    shape = StudentShape.from_config(config)
    is_supported_by_vllm = (
        device == "cuda"
        and has_vllm
        and is_served_by_vllm(config.model_type)
        and not shape.has_exit_head
        and shape.num_key_value_heads_swiftkv in (None, getattr(config, "num_key_value_heads", None))
        and not options.native_only_options
    )
    return "vllm" if is_supported_by_vllm else "native"


_MAX_MESSAGE_LENGTH = 500


async def load_version(
    args: ReplicaArgs,
    served: ServedConfig,
    on_loaded: Callable[[str, Mapping[str, float]], None] = lambda _model, _seconds: None,
) -> ModelVersion:
    """Load and test the models of `served`. `on_loaded`: called with each model and its seconds by phase: `fetch`,
    `load` and `check`. Raises as `load_model`."""
    version = await _load_model_version(args, served, on_loaded)
    if served.candidate is not None:
        update = {**served.candidate.model_dump(exclude={"share"}), "candidate": None, "adapters": None}
        version.candidate = await _load_model_version(args, served.model_copy(update=update), on_loaded)
        version.candidate.names, version.names = frozenset({served.model}), frozenset({served.candidate.model})
        version.candidate_share = served.candidate.share
    version.apply_settings(served)
    return version


async def _load_model_version(
    args: ReplicaArgs, served: ServedConfig, on_loaded: Callable[[str, Mapping[str, float]], None]
) -> ModelVersion:
    loaded = await asyncio.to_thread(load_model, served)
    version = await _make_version(args, served, loaded, on_loaded)
    if served.adapters is not None:
        try:
            version.adapters = await _make_adapter_pool(args, served, loaded, on_loaded)
        except BaseException:
            await loaded.engine.aclose()
            raise
    return version


async def _make_adapter_pool(
    args: ReplicaArgs,
    served: ServedConfig,
    loaded: LoadedModel,
    on_loaded: Callable[[str, Mapping[str, float]], None],
) -> AdapterPool:
    """Return the adapters of a loaded model, after testing those that were loaded with it. Raises as `load_model`."""
    from swiftkv_platform.engine import AsyncLLMEngine

    engine = loaded.engine
    assert isinstance(engine, AsyncLLMEngine), "only the native engine takes adapters"

    @asynccontextmanager
    async def fetch(present: ServedConfig, adapter: ResolvedAdapter) -> AsyncIterator[FetchedAdapter]:
        alone, started, stack = _select_adapter(present, adapter), time.monotonic(), ExitStack()
        try:
            artifact = await asyncio.to_thread(stack.enter_context, _fetch_artifact(alone))
            find_base = await asyncio.to_thread(stack.enter_context, _open_base_finder(alone))

            async def load() -> ModelVersion:
                fetched = time.monotonic()
                # Until a removed adapter's requests have ended, its name is in use.
                frontend = await engine.load_adapter(f"{adapter.model}/{ULID()}", artifact.directory, find_base)
                seconds = {"fetch": fetched - started, "load": time.monotonic() - fetched}
                one = LoadedModel(frontend, artifact.manifest_digest, seconds)
                return await _make_version(args, alone, one, on_loaded)

            yield FetchedAdapter(artifact.num_bytes, load)
        finally:
            await asyncio.to_thread(stack.close)

    pool = AdapterPool(fetch, served)
    for adapter in served.adapters or ():
        if (artifact := loaded.adapters.get(adapter.model)) is not None:
            one = LoadedModel(engine.get_adapter(adapter.model), artifact.manifest_digest)
            version = await _make_version(args, _select_adapter(served, adapter), one, on_loaded)
            pool.add_loaded(adapter, version, artifact.num_bytes)
    await pool.apply(served)
    return pool


async def _make_version(
    args: ReplicaArgs,
    served: ServedConfig,
    loaded: LoadedModel,
    on_loaded: Callable[[str, Mapping[str, float]], None],
) -> ModelVersion:
    """Test a loaded model and return its version. Raises as `_check_generation`, after closing the engine."""
    started = time.monotonic()
    try:
        await _check_generation(loaded.engine, served)
    except BaseException:
        await loaded.engine.aclose()
        raise
    seconds = {**loaded.phase_seconds, "check": time.monotonic() - started}
    rounded = {phase: round(value, 3) for phase, value in seconds.items()}
    on_loaded(served.model, seconds)
    get_logger().info(
        "model_loaded",
        model=served.model,
        manifest_digest=loaded.manifest_digest,
        backend=loaded.engine.backend,
        seconds=rounded,
    )
    version = ModelVersion(
        loaded.engine, make_served_model_info(args, served, loaded, rounded), created=int(time.time())
    )
    version.tool_call_parser = served.tool_call_parser
    return version


async def _check_generation(engine: EngineFrontend, served: ServedConfig) -> None:
    """Set the deployment's chat template, if any, and generate a token. Raises `ModelError` for an invalid template or
    log-probabilities that are not finite."""
    from swiftkv_platform.engine import SamplingParams

    if served.chat_template is not None:
        await asyncio.to_thread(set_chat_template, engine.model.tokenizer, served.chat_template)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    *_, output = [each async for each in await engine.submit([0], params, interval_s=math.inf)]
    logprobs = [logprob for entry in output.logprobs or () for logprob in entry.values()]
    if output.finish_reason == "error" or not all(map(math.isfinite, logprobs)):
        raise ModelError(
            f"model {served.model!r} cannot generate: {output.error or 'its log-probabilities are not finite'}",
            field="artifact_uri",
            value=served.artifact_uri,
        )


def make_served_model_info(
    args: ReplicaArgs, served: ServedConfig, loaded: LoadedModel, seconds: Mapping[str, float]
) -> ServedModelInfo:
    """Return the description of the model. `seconds`: by phase of its loading."""
    config, swiftkv = loaded.engine.model.config, None
    if config.num_key_value_layers < config.num_hidden_layers:  # a dense model computes KV in all of them
        keys = ("num_hidden_layers", "num_key_value_layers", "key_value_group_size")
        swiftkv = {key: getattr(config, key) for key in keys}
    return ServedModelInfo(
        deployment=args.id,
        model=served.model,
        manifest_digest=loaded.manifest_digest,
        swiftkv=swiftkv,
        max_model_len=loaded.engine.model.context_length,
        load_seconds=dict(seconds),
    )


class VersionSwapper:
    """Swaps a replica's version for the last requested one.

    New requests go to the new version. Running ones finish on the old version, whose engine is closed after them.

    Args:
        load: fetches, verifies, loads and tests a version; raises if that fails.
    """

    def __init__(self, state: ReplicaState, load: Callable[[ServedConfig], Awaitable[ModelVersion]]) -> None:
        self._state = state
        self._load = load
        self._served: ServedConfig | None = None
        self._requested: Mapping[str, Any] | None = None
        """Document of the next version to load; a later document replaces it."""
        self._processing: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    async def request_version(self, document: Mapping[str, Any]) -> None:
        """Serve the models of `document` (see `ServedConfig`).

        The first call returns when they are loaded, and raises as `load`. Later calls return at once; if loading fails,
        the previous version stays.
        """
        if self._state.has_no_model:
            served = ServedConfig.model_validate(document)
            self._switch_version(served, await self._load(served))
            return
        self._requested = document
        self._state.swap = SwapState(status="loading", revision=str(document.get("revision", "")))
        if self._processing is None or self._processing.done():
            self._processing = asyncio.create_task(self._process_requests(), name="swap")

    async def _process_requests(self) -> None:
        while self._requested is not None:
            document, self._requested = self._requested, None
            await self._swap_version(document)

    async def _swap_version(self, document: Mapping[str, Any]) -> None:
        log = get_logger(model=document.get("model"), revision=document.get("revision"))
        # 1. apply the settings of requests, then others of the same models, or load the new version
        try:
            served = ServedConfig.model_validate(document)
            self._state.version.apply_request_settings(served)  # also if the models are refused
            if self._served is not None and served.loads_same_models(self._served):
                if self._state.version.adapters is not None:
                    await self._state.version.adapters.apply(served)
                self._state.version.apply_settings(served)
                self._served = served
                self._state.swap = SwapState(revision=served.revision)
                return
            log.info("swap_loading")
            version = await self._load(served)
        except Exception as error:  # of any kind; the previous version stays
            log.exception("swap_refused")
            self._state.metrics.count_swap("refused")
            if self._requested is None:
                message = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_LENGTH]
                revision = str(document.get("revision", ""))
                self._state.swap = SwapState(status="refused", revision=revision, message=message)
            return
        # 2. drop it if a later version was requested meanwhile
        if self._requested is not None:
            log.info("swap_superseded")
            self._state.metrics.count_swap("superseded")
            await version.drain()
            return
        # 3. switch
        self._switch_version(served, version)
        self._state.metrics.count_swap("succeeded")
        log.info("swap_done")

    def _switch_version(self, served: ServedConfig, version: ModelVersion) -> None:
        previous = self._state.replace_version(version)
        self._served = served
        self._state.swap = SwapState(revision=served.revision)
        if previous is None:
            tune_interpreter()
        else:
            draining = asyncio.create_task(previous.drain(), name="drain")
            self._draining.add(draining)
            draining.add_done_callback(self._finish_draining)

    def _finish_draining(self, draining: asyncio.Task[None]) -> None:
        self._draining.discard(draining)
        tune_interpreter()
