"""Serve an ASGI application on a real socket, for clients that need one."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(app: ASGIApp, **options: Any) -> Iterator[str]:
    """Run the application on a free port in this process, and yield its address. `options`: of uvicorn."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chosen = {**options, "host": "127.0.0.1", "port": port, "log_level": "warning", "lifespan": "on"}
    server = uvicorn.Server(uvicorn.Config(app, **chosen))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.001)  # a busy loop would slow the thread that it waits for
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
