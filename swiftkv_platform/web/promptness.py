"""Interpreter settings for a process that answers requests while other threads compute."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, routing

SWITCH_INTERVAL_S = 0.0002
"""Seconds after which a computing thread must give up the GIL. A response takes the GIL about ten times, and an engine
step once per operator: with Python's default of 5 ms, waiting takes longer than the work itself."""


def answer_promptly() -> None:
    """Bound waits for the GIL, and exclude all present objects from garbage collections, which stop all threads (0.2 s
    for the objects of torch). Call it again after replacing large objects, so that the old ones are collected."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def answering_promptly(app: FastAPI) -> FastAPI:
    """Make `app` call `answer_promptly` once it has started, and return it. FastAPI builds its routes in the first
    request; they are built before that here, so that garbage collections skip them."""
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
