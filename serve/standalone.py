"""Serving of one model in this process: a replica's routes without Ray and control plane."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.security.keys import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.serve.tracing import make_request_observers
from swiftkv_platform.serve.versions import load_version
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.middleware import Middleware, is_probe
from swiftkv_platform.web.server import ConnectionLimits, make_server_options, tune_interpreter

_DRAIN_TIMEOUT_S = 5
"""Max seconds for running requests to finish after a signal to stop."""


def serve_model(
    served: ServedConfig, args: ReplicaArgs, *, host: str, port: int, on_ready: Callable[[str], None] = lambda _: None
) -> None:
    """Load a model and serve it until SIGINT or SIGTERM. Blocks.

    Args:
        port: 0 selects a free one.
        on_ready: called with the URL when the model is loaded; until then requests wait, and `/health` is 503.

    Raises:
        InvalidInputError: cannot listen on the address; raised before the model is loaded.
        SwiftKVError: as `load_version`.
    """
    with _open_listener(host, port) as listener:
        asyncio.run(_run(served, args, listener, on_ready))


async def _run(
    served: ServedConfig, args: ReplicaArgs, listener: socket.socket, on_ready: Callable[[str], None]
) -> None:
    credentials = open_credentials(None if args.api_keys_file is None else Path(args.api_keys_file), None)
    state = ReplicaState(observers=make_request_observers(with_text=args.log_text))
    app = create_http_app(state, key_ring=credentials, allowed_hosts=args.allowed_hosts)
    loaded = asyncio.Event()
    app.add_middleware(LoadingMiddleware, loaded=loaded)
    options = make_server_options(ConnectionLimits.from_settings(Settings()), shutdown_timeout_s=_DRAIN_TIMEOUT_S)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))
    host, port = listener.getsockname()[:2]  # before the server closes the listener

    async def load() -> None:
        try:
            state.replace_version(await load_version(args, served))
            tune_interpreter()
            if not server.should_exit:
                on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        finally:
            server.should_exit |= state.has_no_model
            loaded.set()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        loading.cancel()
        await asyncio.wait({loading})
        if not state.has_no_model:
            await state.version.engine.aclose()

    app.router.lifespan_context = lifespan
    loading = asyncio.create_task(load(), name="load")
    await server.serve(sockets=[listener])
    if not loading.cancelled():
        await loading


class LoadingMiddleware(Middleware):
    """Delays requests until the model is `loaded`, except probes: `/health` reports at once that a model is loading."""

    def __init__(self, app: ASGIApp, loaded: asyncio.Event) -> None:
        super().__init__(app)
        self._over = loaded

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_probe(scope):
            await self._over.wait()
        await self._app(scope, receive, send)


def _open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket, in whose backlog connections wait until the model is loaded."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise InvalidInputError(
            f"cannot listen on {host}:{port} ({os.strerror(error.errno or 0)}); use another --port, or 0 for any "
            "free one",
            field="port",
            value=port,
        ) from error
