"""A replica's way to what it is told to serve: load beside the old version, switch, drain. Knows no HTTP and no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.args import Served
from swiftkv_platform.serve.current import Current, SwapState, Version

_LONGEST_MESSAGE = 500


class Swaps:
    """Keeps `current` at the last wanted version.

    Requests choose their version once, so a switch between two of them is one assignment: new ones go to the new
    version, running ones finish on the old, whose engine is closed behind the last of them.

    Args:
        load: fetches, verifies, loads and tries a version; raises if it cannot be served.
    """

    def __init__(self, current: Current, load: Callable[[Served], Awaitable[Version]]) -> None:
        self._current = current
        self._load = load
        self._served: Served | None = None
        self._wanted: Mapping[str, Any] | None = None
        """The next document, while one is waiting; a later one takes its place."""
        self._catching_up: asyncio.Task[None] | None = None
        self._draining: set[asyncio.Task[None]] = set()

    async def want(self, document: Mapping[str, Any]) -> None:
        """Serve what `document` (`Served`) says.

        The first time this blocks until it is served, and raises as `load` does. Afterwards it returns at once: what
        cannot be served is refused, and the version before stays.
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
        except Exception as error:  # whatever it is, the version before serves on
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
        if before is not None:
            draining = asyncio.create_task(before.drain(), name="drain")
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)
