"""The adapters of a served model: loaded on demand into its engine, and unloaded for the memory of others. Knows no
HTTP, no Ray.

An adapter is a `ModelVersion` whose engine shares the weights, the KV cache and the queue of the served model's engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftkv_platform.errors import ModelError, ModelNotFoundError
from swiftkv_platform.logs import get_logger

if TYPE_CHECKING:
    from swiftkv_platform.serve.args import ServedConfig
    from swiftkv_platform.serve.replica_state import ModelVersion
    from swiftkv_platform.specs.deployment import ResolvedAdapter


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter whose files are on this machine."""

    num_bytes: int
    """Bytes of its weights."""
    load: Callable[[], Awaitable[ModelVersion]]
    """Loads the adapter and generates a token with it. Raises the errors of `load_version`."""


FetchAdapter = Callable[["ServedConfig", "ResolvedAdapter"], AbstractAsyncContextManager[FetchedAdapter]]
"""Function that fetches the files of a deployment's adapter, which exist within the context."""


class AdapterPool:
    """The adapters that a version serves."""

    def __init__(self, fetch: FetchAdapter, served: ServedConfig) -> None:
        self.served = served
        """The deployment's present settings."""
        self._fetch = fetch
        self._max_bytes = served.engine.max_adapter_bytes
        self._wanted: dict[str, ResolvedAdapter] = {}  # by model
        self._resident: OrderedDict[str, ModelVersion] = OrderedDict()  # least recently used first
        self._sizes: dict[ModelVersion, int] = {}  # of removed adapters too, until they are unloaded
        self._loading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._draining: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> list[str]:
        """Ids of all served adapters, resident or not."""
        return list(self._wanted)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of resident adapters."""
        return sum(self._sizes.values())

    def describe(self) -> list[dict[str, str | bool | None]]:
        """Return the served adapters for the health document."""
        return [
            {"model": each.model, "name": each.name, "resident": each.model in self._resident}
            for each in self._wanted.values()
        ]

    def find_model(self, name: str) -> str | None:
        """Return the id of the adapter that a request's `model` names; None if there is none."""
        return next((each.model for each in self._wanted.values() if name in (each.model, each.name)), None)

    def add_loaded(self, adapter: ResolvedAdapter, version: ModelVersion, num_bytes: int) -> None:
        """Serve an adapter that was loaded together with the model."""
        version.names = _get_names(adapter)
        self._wanted[adapter.model] = adapter
        self._resident[adapter.model], self._sizes[version] = version, num_bytes

    async def acquire(self, model: str) -> ModelVersion:
        """Return an adapter, after loading it if it is not resident. Loads run one after another. The caller holds the
        version open at once.

        Raises:
            ModelNotFoundError: the adapter was removed meanwhile. ModelError: it cannot be loaded, or is larger than
                `max_adapter_bytes`. Other errors as `load_version`.
        """
        while model not in self._resident:
            await asyncio.shield(self._start_load(model))  # a caller that leaves does not interrupt the others
        self._resident.move_to_end(model)
        version = self._resident[model]
        version.apply_request_settings(self.served)
        return version

    def apply_request_settings(self, served: ServedConfig) -> None:
        """Apply the settings of single requests to all adapters, which get them when they are acquired."""
        self.served = self.served.replace_request_settings(served)

    async def apply(self, served: ServedConfig) -> None:
        """Serve the adapters of a deployment's new settings: load the new ones, as far as the memory suffices, and
        unload those that are not listed any more after their running requests. If one cannot be loaded, nothing
        changes. Raises as `acquire`."""
        adapters = served.adapters or ()
        previous, before = (self.served, self._wanted), list(self._resident)
        added = [each for each in adapters if each.model not in self._wanted]
        self.served, self._wanted = served, {**self._wanted, **{each.model: each for each in adapters}}
        try:
            for adapter in added:
                async with self._loading:
                    await self._load(adapter.model, evicts=False)
        except BaseException:
            self.served, self._wanted = previous
            self._unload([model for model in self._resident if model not in before])
            raise
        self._wanted = {each.model: each for each in adapters}
        for model in self._resident:
            if model in self._wanted:
                self._resident[model].names = _get_names(self._wanted[model])
        self._unload([model for model in self._resident if model not in self._wanted])

    async def drain(self) -> None:
        """Wait until no request uses an adapter, and unload all."""
        self._wanted = {}
        async with self._loading:
            self._unload(list(self._resident))
        await asyncio.gather(*self._draining)

    def _start_load(self, model: str) -> asyncio.Task[None]:
        """Return the task that loads an adapter, which all requests for it share."""
        if model not in self._loads:

            async def load() -> None:
                try:
                    async with self._loading:
                        await self._load(model)
                finally:
                    del self._loads[model]

            self._loads[model] = task = asyncio.create_task(load(), name="load-adapter")
            task.add_done_callback(_log_failure)
        return self._loads[model]

    async def _load(self, model: str, *, evicts: bool = True) -> None:
        """Load an adapter unless it is resident, after unloading others for its memory. Without `evicts`, it stays
        unloaded if there is too little. The lock is held."""
        if model in self._resident:  # loaded while this call waited for the lock
            return
        if model not in self._wanted:
            raise ModelNotFoundError.for_field("model", model, ", which this deployment no longer serves")
        adapter = self._wanted[model]
        async with self._fetch(self.served, adapter) as fetched:
            if self._max_bytes is not None and fetched.num_bytes > self._max_bytes:
                raise ModelError.for_field(
                    "max_adapter_bytes",
                    self._max_bytes,
                    f", but adapter {model!r} has {fetched.num_bytes} bytes; raise the limit",
                )
            while self._max_bytes is not None and self.num_bytes + fetched.num_bytes > self._max_bytes:
                if not evicts:
                    return
                await self._evict()
            version = await fetched.load()
        if self._wanted.get(model) != adapter:  # removed, or replaced by another model of this id
            await version.drain()
            raise ModelNotFoundError.for_field("model", model, ", which this deployment no longer serves")
        self.add_loaded(adapter, version, fetched.num_bytes)

    async def _evict(self) -> None:
        """Unload the least recently used idle adapter. If none is idle, the least recently used one takes no more
        requests and is unloaded after its running ones. Removed adapters are waited for first."""
        if self._draining:
            await asyncio.wait(self._draining, return_when=asyncio.FIRST_COMPLETED)
            return
        idle = (model for model, version in self._resident.items() if version.is_idle)
        model = next(idle, next(iter(self._resident)))
        await self._retire(model)

    def _unload(self, models: Sequence[str]) -> None:
        for model in models:
            draining = asyncio.create_task(self._retire(model), name="drain-adapter")
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)

    async def _retire(self, model: str) -> None:
        """Send an adapter no more requests, and unload it after its running ones."""
        version = self._resident.pop(model)
        await version.drain()
        del self._sizes[version]
        get_logger().info("adapter_unloaded", model=model)


def _log_failure(loading: asyncio.Task[None]) -> None:
    """Log why an adapter was not loaded; the requests for it may have left."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        get_logger().warning("adapter_refused", error=f"{type(error).__name__}: {error}")


def _get_names(adapter: ResolvedAdapter) -> frozenset[str]:
    return frozenset() if adapter.name is None else frozenset({adapter.name})
