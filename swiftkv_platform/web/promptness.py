"""Settings of the interpreter for a process that answers requests while other threads compute."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, routing

SWITCH_INTERVAL_S = 0.0002
"""Most that a thread waits for Python's lock while another computes. An answer takes it some ten times, and a step of
the engine in each operator: with Python's own 5 ms, that is longer than the work itself."""


def answer_promptly() -> None:
    """Bound the waits for Python's lock, and take what is in memory now out of garbage collections, which stop all
    threads: 0.2 s for the objects of torch. Call it again once what was replaced is gone."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def answering_promptly(app: FastAPI) -> FastAPI:
    """Return `app`, which does so once it has started. FastAPI builds its routes in the first request: they are built
    before, and belong to what collections leave alone."""
    start = app.router.lifespan_context

    @asynccontextmanager
    async def started(app: FastAPI) -> AsyncIterator[Any]:
        async with start(app) as state:
            # The older FastAPI that vLLM 0.32 asks for has no such function: there they are built already.
            for _ in getattr(routing, "iter_route_contexts", iter)(app.routes):
                pass
            answer_promptly()
            yield state

    app.router.lifespan_context = started
    return app
