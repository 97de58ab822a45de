"""Parser processes: each call reads a tenant's files in its own process, with bounded memory and CPU time.

In the event process, parsing would hold the GIL while other tenants wait. A parser process is forked from a server
process that has imported the parsers (milliseconds), and killed when its call ends, its client leaves, or the control
plane ends. So no file outlives its request, and none can affect another's.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from swiftkv_platform.errors import InvalidInputError, OverloadedError, SwiftKVError
from swiftkv_platform.limits import (
    CHECK_CPU_SECONDS,
    CHECK_SECONDS,
    CHECKS,
    IMPORTS,
    IMPORTS_OF_TENANT,
    MIB,
    PARSER_BYTES,
    UPLOAD_CHECKS,
    UPLOAD_CPU_SECONDS,
    UPLOAD_SECONDS,
    UPLOADS,
    UPLOADS_OF_KEY,
    UPLOADS_OF_TENANT,
)
from swiftkv_platform.web.limiters import Client, ConcurrencyLimiter, ConcurrencyLimits

_PARSER_NICENESS = 10
"""CPU priority of a parser process, below that of the control plane."""
_PARSER_OOM_SCORE = "1000"
"""`oom_score_adj` of parsers: the kernel kills them first if memory runs out."""


@dataclass(frozen=True)
class ParserLimits:
    """Limits of one parser process."""

    subject: str
    """Name of the parsed object, for messages."""
    cpu_seconds: int
    seconds: float
    """Max elapsed seconds, without waiting for a free process."""
    field: str | None = None
    """Field of the request, for messages."""
    memory: int = PARSER_BYTES.default
    """Max bytes of address space."""

    def make_exceeded_error(self, limit: str) -> InvalidInputError:
        """Return the error for a call that exceeds `limit`."""
        message = f"checking {self.subject} exceeds the limit of {limit}; use fewer or smaller files"
        return InvalidInputError(message, field=self.field)


def run_parser(sender: Connection, bounds: ParserLimits, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Entry point of a parser process: call the function, and send whether it returned, and its result or exception."""
    _apply_limits(bounds)
    try:
        outcome = True, function(*args, **kwargs)
    except SwiftKVError as error:
        outcome = False, error
    except MemoryError:
        outcome = False, bounds.make_exceeded_error(f"{bounds.memory // MIB} MiB of memory")
    except Exception:  # a bug, which the control plane logs; not every exception can be pickled
        outcome = False, RuntimeError(traceback.format_exc())
    sender.send(outcome)


def _apply_limits(bounds: ParserLimits) -> None:
    """Limit this process's resources, and end it with the control plane."""
    gc.freeze()  # collections would visit, and copy, what the server process shares with this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the control plane decides
    os.nice(_PARSER_NICENESS)
    for kind, amount in (
        (resource.RLIMIT_AS, bounds.memory),
        (resource.RLIMIT_CPU, bounds.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        soft = amount if most == resource.RLIM_INFINITY else min(amount, most)
        resource.setrlimit(kind, (soft, most))
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text(_PARSER_OOM_SCORE)
    threading.Thread(target=_exit_with_control_plane, daemon=True).start()


def _exit_with_control_plane() -> None:
    """End this process when the control plane has ended for any reason."""
    control_plane = multiprocessing.parent_process()
    assert control_plane is not None, "a parser process has a parent"
    control_plane.join()
    os._exit(1)


_PRELOADED_MODULES = (
    "swiftkv_platform.control_plane.parsing",
    "swiftkv_platform.control_plane.jobs.estimates",
    "swiftkv_platform.control_plane.models.imports",
    "swiftkv_platform.data.checks",
)
"""Modules that the server process imports before it forks."""
_EXIT_TIMEOUT_S = 5.0
"""Max seconds until a process ends after it has responded or was killed."""
_RETRY_AFTER_S = 5.0

_MAX_DIRECTORY_CHARS = 70
"""Max characters of a temporary directory, so that the path of a socket in it fits its 107 characters."""

_forkserver_context = multiprocessing.get_context("forkserver")

P = ParamSpec("P")
T = TypeVar("T")


class ParserPool:
    """Parser processes of one kind. `at_once`: max concurrent processes; further calls wait."""

    def __init__(self, bounds: ParserLimits, at_once: int) -> None:
        _forkserver_context.set_forkserver_preload(list(_PRELOADED_MODULES))
        _set_socket_directory()
        self._limits = bounds
        self._slots = threading.BoundedSemaphore(at_once)

    def run(self, client: Client, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a parser process, as long as `client` waits. Arguments and result are pickled.

        Raises what the function raises, and:

            InvalidInputError: it took more memory or CPU time than allowed.
            OverloadedError: no process was free in time, or it took too long.
            ClientDisconnect: the client has left.
        """
        if not self._slots.acquire(timeout=self._limits.seconds):
            raise self._make_overloaded_error("waited too long for a free parser process")
        try:
            return self._run_in_process(client, function, args, kwargs)
        finally:
            self._slots.release()

    def _run_in_process(self, client: Client, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        client.check_connected()
        # 1. fork the process  2. wait for its result, and kill it if the client disconnects  3. return or raise
        receiver, sender = _forkserver_context.Pipe(duplex=False)
        process = _forkserver_context.Process(
            target=run_parser, args=(sender, self._limits, function, args, kwargs), daemon=True, name="parser"
        )
        with receiver:
            with sender:  # open only in the process, so that its end is the end of the pipe
                process.start()
            try:
                with client.stop_on_disconnect(process.kill):
                    if not receiver.poll(self._limits.seconds):
                        raise self._make_overloaded_error(f"took more than {self._limits.seconds:g} s")
                    succeeded, result = receiver.recv()
                process.join(_EXIT_TIMEOUT_S)
            except EOFError:
                client.check_connected()
                process.join(_EXIT_TIMEOUT_S)
                self._raise_exit_error(process.exitcode)
            finally:
                process.kill()
                process.join(_EXIT_TIMEOUT_S)
        if succeeded:
            found: T = result
            return found
        raise result

    def _raise_exit_error(self, status: int | None) -> NoReturn:
        """Raise the error for a process that has ended without an answer."""
        if status is None or status >= 0:
            raise RuntimeError(f"a parser process has ended with status {status}; its error is in the log")
        if -status == signal.SIGXCPU:
            raise self._limits.make_exceeded_error(f"{self._limits.cpu_seconds} s of CPU time")
        if -status in (signal.SIGKILL, signal.SIGTERM):  # memory of the machine is short, or the server stops
            raise self._make_overloaded_error("was interrupted")
        message = f"{self._limits.subject} cannot be checked: its parser ended with {signal.Signals(-status).name}"
        raise InvalidInputError(message, field=self._limits.field)

    def _make_overloaded_error(self, why: str) -> OverloadedError:
        return OverloadedError(f"checking {self._limits.subject} {why}; try again later", retry_after_s=_RETRY_AFTER_S)


class LimitedParserPool(ParserPool):
    """Parser processes for long requests. `limiter`: limits these requests per key and tenant."""

    def __init__(self, bounds: ParserLimits, at_once: int, limiter: ConcurrencyLimiter) -> None:
        super().__init__(bounds, at_once)
        self.limiter = limiter


def _set_socket_directory() -> None:
    """Let the fork server listen below /tmp if the path of the temporary directory is too long for a socket, as
    Python does from 3.14 on."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # which 3.14 sets
    if config.get("tempdir") is None and len(tempfile.gettempdir()) > _MAX_DIRECTORY_CHARS:
        config["tempdir"] = directory = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)


def make_spec_parsers() -> ParserPool:
    return ParserPool(ParserLimits("the spec", CHECK_CPU_SECONDS.default, CHECK_SECONDS.default), CHECKS.default)


def make_upload_parsers() -> LimitedParserPool:
    bounds = ParserLimits("the upload", UPLOAD_CPU_SECONDS.default, UPLOAD_SECONDS.default, field="file")
    limits = ConcurrencyLimits(UPLOADS_OF_KEY.default, UPLOADS_OF_TENANT.default, UPLOADS.default)
    return LimitedParserPool(
        bounds, UPLOAD_CHECKS.default, ConcurrencyLimiter("uploads", limits, retry_after_s=_RETRY_AFTER_S)
    )


def make_import_parsers() -> LimitedParserPool:
    bounds = ParserLimits("the model", CHECK_CPU_SECONDS.default, CHECK_SECONDS.default, field="source")
    limits = ConcurrencyLimits(IMPORTS_OF_TENANT.default, IMPORTS_OF_TENANT.default, IMPORTS.default)
    return LimitedParserPool(
        bounds, limits.total, ConcurrencyLimiter("imports of models", limits, retry_after_s=_RETRY_AFTER_S)
    )
