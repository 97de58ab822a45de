"""Serve one model from this process: the routes of a replica without Ray and without a control plane."""

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
from swiftkv_platform.security.credentials import open_credentials
from swiftkv_platform.serve.args import ReplicaArgs, Served
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.proxy import is_probe
from swiftkv_platform.serve.tracing import make_observers
from swiftkv_platform.serve.versions import load_version
from swiftkv_platform.settings import Settings
from swiftkv_platform.web.middleware import Middleware
from swiftkv_platform.web.server import ConnectionLimits, make_server_options, tune_interpreter

_DRAIN_TIMEOUT_S = 5
"""Seconds that running requests have to finish after the server is told to stop."""


def serve(
    served: Served, args: ReplicaArgs, *, host: str, port: int, on_ready: Callable[[str], None] = lambda _: None
) -> None:
    """Load a model and serve it until SIGINT or SIGTERM. Blocks.

    Args:
        port: port to listen at; 0 takes a free one.
        on_ready: called with the URL once requests are answered; until then they wait, and `/health` is 503.

    Raises:
        InvalidInputError: the address is taken or not of this machine; raised before the model is loaded.
        SwiftKVError: as `load_version`.
    """
    with _listening(host, port) as listener:
        asyncio.run(_serve(served, args, listener, on_ready))


async def _serve(served: Served, args: ReplicaArgs, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    credentials = open_credentials(None if args.api_keys_file is None else Path(args.api_keys_file), None)
    current = Current(observers=make_observers(with_text=args.log_text))
    app = create_http_app(current, key_ring=credentials, allowed_hosts=args.allowed_hosts)
    over = asyncio.Event()
    app.add_middleware(Waiting, over=over)
    options = make_server_options(ConnectionLimits.from_settings(Settings()), shutdown_timeout_s=_DRAIN_TIMEOUT_S)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, **options))

    async def load() -> None:
        try:
            current.replace(await load_version(args, served))
            tune_interpreter()
            host, port = listener.getsockname()[:2]
            on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        finally:
            server.should_exit |= current.is_empty
            over.set()

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        yield
        loading.cancel()
        await asyncio.wait({loading})
        if not current.is_empty:
            await current.version.engine.aclose()

    app.router.lifespan_context = running
    loading = asyncio.create_task(load(), name="load")
    await server.serve(sockets=[listener])
    if not loading.cancelled():
        await loading


class Waiting(Middleware):
    """Holds requests until loading is `over`, but for probes: `/health` tells at once that a model is being loaded."""

    def __init__(self, app: ASGIApp, over: asyncio.Event) -> None:
        super().__init__(app)
        self._over = over

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_probe(scope):
            await self._over.wait()
        await self._app(scope, receive, send)


def _listening(host: str, port: int) -> socket.socket:
    """Open a listening socket; connections wait in its backlog until the model is loaded."""
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
