"""Parser processes: each call reads a tenant's files in a process of its own, with bounded memory and CPU time.

In the event process, parsing would hold the GIL while other tenants wait. A parser process is forked from a server
process that has imported the parsers (milliseconds), and killed when its call ends, its client leaves, or the control
plane ends. So no file outlives its request, and none can affect another's.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

from swiftkv_platform.control_plane.http.clients import Client
from swiftkv_platform.control_plane.parser_process import Bounds, work
from swiftkv_platform.errors import InvalidInputError, OverloadedError
from swiftkv_platform.limits import (
    CHECK_CPU_SECONDS,
    CHECK_SECONDS,
    CHECKS,
    IMPORTS,
    UPLOAD_CHECKS,
    UPLOAD_CPU_SECONDS,
    UPLOAD_SECONDS,
)

_PARSERS = (
    "swiftkv_platform.control_plane.parser_process",
    "swiftkv_platform.control_plane.jobs.validation",
    "swiftkv_platform.control_plane.models.imports",
    "swiftkv_platform.data.uploads",
)
"""Modules that the server process imports before it forks."""
_END_S = 5.0
"""Seconds within which a process that has answered, or is killed, ends."""
_RETRY_AFTER_S = 5.0

_LONGEST_DIRECTORY = 70
"""Characters of a directory for temporary files that leave room for the name of a socket, of 107 in all."""

_processes = multiprocessing.get_context("forkserver")

P = ParamSpec("P")
T = TypeVar("T")


class Run(Protocol):
    """Calls a function, in this process or another."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


def run_here(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in this process."""
    return function(*args, **kwargs)


class Parsers:
    """Parser processes of one kind. `at_once`: most that run at a time; further calls wait for one to end."""

    def __init__(self, bounds: Bounds, at_once: int) -> None:
        _processes.set_forkserver_preload(list(_PARSERS))
        _choose_socket_directory()
        self._bounds = bounds
        self._slots = threading.BoundedSemaphore(at_once)

    def run_for(self, client: Client) -> Run:
        """Return a function that calls another in a parser process, as long as `client` waits.

        Arguments and result are pickled. The call raises what the function raises, and:

            InvalidInputError: it took more memory or CPU time than allowed.
            OverloadedError: no process was free in time, or it took too long.
            ClientDisconnect: the client has left.
        """
        return partial(self._run, client)

    def _run(self, client: Client, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._slots.acquire(timeout=self._bounds.seconds):
            raise self._overloaded("waited too long for others'")
        try:
            return self._in_process(client, function, args, kwargs)
        finally:
            self._slots.release()

    def _in_process(self, client: Client, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        client.check_present()
        answers, answer = _processes.Pipe(duplex=False)
        process = _processes.Process(
            target=work, args=(answer, self._bounds, function, args, kwargs), daemon=True, name="parser"
        )
        with answers:
            with answer:  # open only in the process, so that its end is the end of the pipe
                process.start()
            try:
                with client.stopping(process.kill):
                    if not answers.poll(self._bounds.seconds):
                        raise self._overloaded(f"took more than {self._bounds.seconds:g} s")
                    succeeded, result = answers.recv()
                process.join(_END_S)
            except EOFError:
                client.check_present()
                process.join(_END_S)
                self._explain(process.exitcode)
            finally:
                process.kill()
                process.join(_END_S)
        if succeeded:
            found: T = result
            return found
        raise result

    def _explain(self, status: int | None) -> NoReturn:
        """Raise the error for a process that has ended without an answer."""
        if status is None or status >= 0:
            raise RuntimeError(f"a parser process has ended with status {status}; its error is in the log")
        if -status == signal.SIGXCPU:
            raise self._bounds.exceeded(f"{self._bounds.cpu_seconds} s of CPU time")
        if -status in (signal.SIGKILL, signal.SIGTERM):  # memory of the machine is short, or the server stops
            raise self._overloaded("was interrupted")
        message = f"{self._bounds.what} cannot be checked: the parser ended with {signal.Signals(-status).name}"
        raise InvalidInputError(message, field=self._bounds.field)

    def _overloaded(self, why: str) -> OverloadedError:
        return OverloadedError(f"checking {self._bounds.what} {why}; try again later", retry_after_s=_RETRY_AFTER_S)


def _choose_socket_directory() -> None:
    """Let the server process listen below /tmp if the path of the directory for temporary files is too long for a
    socket, as Python does itself from 3.14 on."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # which 3.14 sets
    if config.get("tempdir") is None and len(tempfile.gettempdir()) > _LONGEST_DIRECTORY:
        config["tempdir"] = directory = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)


def spec_parsers() -> Parsers:
    """Make the limit of specs that are checked at a time."""
    return Parsers(Bounds("the spec", CHECK_CPU_SECONDS.default, CHECK_SECONDS.default), CHECKS.default)


def upload_parsers() -> Parsers:
    """Make the limit of uploads that are checked at a time."""
    bounds = Bounds("the upload", UPLOAD_CPU_SECONDS.default, UPLOAD_SECONDS.default, field="file")
    return Parsers(bounds, UPLOAD_CHECKS.default)


def import_parsers() -> Parsers:
    """Make the limit of imported models whose small files are checked at a time."""
    bounds = Bounds("the model", CHECK_CPU_SECONDS.default, CHECK_SECONDS.default, field="source")
    return Parsers(bounds, IMPORTS.default)
