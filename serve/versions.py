"""Load versions (a tested model with its candidate), and swap a replica from one to the next. Knows no HTTP and no Ray.

Loading a model fetches and verifies its files and starts the engine that suits it, this project's own or vLLM. A swap
loads the new version next to the old one, switches and drains. Ray imports this module to build the application too, so
the engine, and torch with it, is imported on loading only.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.families import is_served_by_vllm
from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.args import HUB_PREFIX, ReplicaArgs, Served
from swiftkv_platform.serve.chat import set_template
from swiftkv_platform.serve.current import Current, ModelCard, SwapState, Version
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs.engine import Backend, EngineConfig
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifact_cache import ArtifactCache
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.downloads import download_model
from swiftkv_platform.student_shape import StudentShape
from swiftkv_platform.web.server import tune_interpreter

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
        yield fetch_model_directory(name, field="artifact_uri", pickles=True), None  # vLLM reads them
        return
    settings = Settings()
    cache = ArtifactCache(settings.home / "models", settings.model_cache_bytes)
    with ExitStack() as stack:
        try:
            directory, manifest = stack.enter_context(cache.open_copy(open_store(served.artifact_uri), ""))
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
    from swiftkv_platform.configs.adapter import ADAPTER_FILE

    if not (directory / ADAPTER_FILE).is_file():
        yield directory
        return
    from swiftkv_platform.model.weights.adapters import open_merged_model
    from swiftkv_platform.model.weights.bases import resolve_model_directory

    access = Access(served.base_access.roots, served.base_access.hub_organizations)
    with tempfile.TemporaryDirectory(prefix="swiftkv-base-") as workspace:

        def download(uri: str) -> Path:
            return download_model(uri, Path(workspace), access=access, field=_BASE)

        def find(base: BaseModelReference) -> str:
            return resolve_model_directory(
                base.name_or_path, base.revision, access=access, download=download, field=_BASE
            )

        with open_merged_model(directory, find_base=find) as (whole, _):
            yield Path(whole)


def _load_engine(directory: Path, served: Served) -> EngineFrontend:
    import torch

    from swiftkv_platform.engine import AsyncLLMEngine, LLMEngine
    from swiftkv_platform.engine.loading import read_served_config

    device: str = served.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config, has_vllm = read_served_config(directory, served.engine), find_spec("vllm") is not None
    if choose_backend(served.engine, config, device=device, has_vllm=has_vllm) == "vllm":
        from swiftkv_platform.serve.vllm_engine import load_vllm

        return load_vllm(directory, served.engine)
    return AsyncLLMEngine(LLMEngine.from_pretrained(directory, served.engine.model_copy(update={"backend": "native"})))


def choose_backend(options: EngineConfig, config: Any, *, device: str, has_vllm: bool) -> Backend:
    """Choose the engine for a version. `auto`: vLLM on a GPU if it supports all that the version needs, else native. A
    named backend is always chosen; loading fails if it cannot serve the model.

    Args:
        config: the model's configuration.
        device: `cpu` or `cuda`.
        has_vllm: whether the replica's environment has vLLM.
    """
    if options.backend != "auto":
        return options.backend
    shape = StudentShape.from_config(config)
    suits_vllm = (
        device == "cuda"
        and has_vllm
        and is_served_by_vllm(config.model_type)
        and not shape.has_exit_head
        and shape.num_key_value_heads_swiftkv in (None, getattr(config, "num_key_value_heads", None))
        and not shape.has_bypassed_layers
        and not options.native_only_options
    )
    return "vllm" if suits_vllm else "native"


_LONGEST_MESSAGE = 500


async def load_version(
    args: ReplicaArgs,
    served: Served,
    loaded: Callable[[str, Mapping[str, float]], None] = lambda _model, _seconds: None,
) -> Version:
    """Load the model of `served` with its candidate, ready to answer. `loaded`: called with each model and its seconds
    by phase: `fetch`, `load` and `check`. Raises as `load`."""
    version = await _load_one(args, served, loaded)
    if served.candidate is not None:
        update = {**served.candidate.model_dump(exclude={"share"}), "candidate": None}
        version.candidate = await _load_one(args, served.model_copy(update=update), loaded)
        version.candidate.names, version.names = frozenset({served.model}), frozenset({served.candidate.model})
        version.candidate_share = served.candidate.share
    version.take_over(served)
    return version


async def _load_one(args: ReplicaArgs, served: Served, told: Callable[[str, Mapping[str, float]], None]) -> Version:
    loaded = await asyncio.to_thread(load, served)
    began = time.monotonic()
    try:
        await _check_speaks(loaded.engine, served)
    except BaseException:
        await loaded.engine.aclose()
        raise
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
    return version


async def _check_speaks(engine: EngineFrontend, served: Served) -> None:
    """Set the deployment's chat template, if any, and generate a token. Raises `ModelError` if the template is not
    valid or log-probabilities are not finite."""
    from swiftkv_platform.engine import SamplingParams

    if served.chat_template is not None:
        await asyncio.to_thread(set_template, engine.model.tokenizer, served.chat_template)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
    *_, answer = [output async for output in await engine.submit([0], params, interval_s=math.inf)]
    logprobs = [logprob for entry in answer.logprobs or () for logprob in entry.values()]
    if answer.finish_reason == "error" or not all(map(math.isfinite, logprobs)):
        raise ModelError(
            f"model {served.model!r} cannot generate: {answer.error or 'its log-probabilities are no numbers'}",
            field="artifact_uri",
            value=served.artifact_uri,
        )


def model_card(args: ReplicaArgs, served: Served, loaded: Loaded, seconds: Mapping[str, float]) -> ModelCard:
    """Return the description of a replica's model, for `/health`. `seconds`: by phase, needed to serve it."""
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


class Swaps:
    """Keeps `current` at the version that was requested last.

    A request chooses its version once, so a switch is one assignment: new requests go to the new version, running ones
    finish on the old one, whose engine is closed after the last of them.

    Args:
        load: fetches, verifies, loads and tests a version; raises if it cannot be served.
    """

    def __init__(self, current: Current, load: Callable[[Served], Awaitable[Version]]) -> None:
        self._current = current
        self._load = load
        self._served: Served | None = None
        self._wanted: Mapping[str, Any] | None = None
        """Document waiting to be loaded; a later one replaces it."""
        self._catching_up: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    async def want(self, document: Mapping[str, Any]) -> None:
        """Serve the models of `document` (see `Served`).

        The first call blocks until they are served, and raises as `load`. Later calls return at once; a version that
        cannot be served is refused, and the previous one stays.
        """
        if self._current.is_empty:
            wanted = Served.model_validate(document)
            self._switch(wanted, await self._load(wanted))
            return
        self._wanted = document
        self._current.swap = SwapState(status="loading", revision=str(document.get("revision", "")))
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up(), name="swap")

    async def _catch_up(self) -> None:
        while self._wanted is not None:
            document, self._wanted = self._wanted, None
            await self._swap(document)

    async def _swap(self, document: Mapping[str, Any]) -> None:
        log = get_logger(model=document.get("model"), revision=document.get("revision"))
        try:
            wanted = Served.model_validate(document)
            if self._served is not None and wanted.loads_the_same_as(self._served):
                self._current.version.take_over(wanted)
                self._served = wanted
                self._current.swap = SwapState(revision=wanted.revision)
                return
            log.info("swap_loading")
            version = await self._load(wanted)
        except Exception as error:  # of any kind; the previous version continues to serve
            log.exception("swap_refused")
            self._current.metrics.swapped("refused")
            if self._wanted is None:
                message = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
                revision = str(document.get("revision", ""))
                self._current.swap = SwapState(status="refused", revision=revision, message=message)
            return
        if self._wanted is not None:
            log.info("swap_superseded")
            self._current.metrics.swapped("superseded")
            await version.drain()
            return
        self._switch(wanted, version)
        self._current.metrics.swapped("succeeded")
        log.info("swap_done")

    def _switch(self, served: Served, version: Version) -> None:
        before = self._current.replace(version)
        self._served = served
        self._current.swap = SwapState(revision=served.revision)
        if before is None:
            tune_interpreter()
        else:
            draining = asyncio.create_task(before.drain(), name="drain")
            self._draining.add(draining)
            draining.add_done_callback(self._drained)

    def _drained(self, draining: asyncio.Task[None]) -> None:
        self._draining.discard(draining)
        tune_interpreter()
