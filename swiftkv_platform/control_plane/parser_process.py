"""Program of a parser process: one call, within bounds. Imports no HTTP, so that it starts within milliseconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.limits import MIB, PARSER_BYTES

_NICENESS = 10
"""CPU priority of a parser process, below that of the control plane."""
_FIRST_VICTIM = "1000"
"""`oom_score_adj` of the process that the kernel kills first if memory runs out."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of one parser process."""

    what: str
    """Name of the parsed thing, in messages."""
    cpu_seconds: int
    seconds: float
    """Elapsed time, waiting for a free parser not included."""
    field: str | None = None
    """Field of the request that messages name."""
    memory: int = PARSER_BYTES.default
    """Bytes of address space."""

    def exceeded(self, limit: str) -> InvalidInputError:
        """Return the error for a call that exceeds `limit`."""
        message = f"checking {self.what} takes more than {limit}, which is the limit; use fewer or smaller files"
        return InvalidInputError(message, field=self.field)


def work(answer: Connection, bounds: Bounds, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Run in a parser process: call the function, send whether it returned, and its result or exception."""
    _confine(bounds)
    try:
        outcome = True, function(*args, **kwargs)
    except SwiftKVError as error:
        outcome = False, error
    except MemoryError:
        outcome = False, bounds.exceeded(f"{bounds.memory // MIB} MiB of memory")
    except Exception:  # a bug, which the control plane logs; not every exception can be pickled
        outcome = False, RuntimeError(traceback.format_exc())
    answer.send(outcome)


def _confine(bounds: Bounds) -> None:
    """Bound this process, and end it with the control plane."""
    gc.freeze()  # collections would visit, and copy, what the server process shares with this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the control plane decides
    os.nice(_NICENESS)
    for kind, amount in (
        (resource.RLIMIT_AS, bounds.memory),
        (resource.RLIMIT_CPU, bounds.cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        soft = amount if most == resource.RLIM_INFINITY else min(amount, most)
        resource.setrlimit(kind, (soft, most))
    if sys.platform == "linux":
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
    threading.Thread(target=_end_with_control_plane, daemon=True).start()


def _end_with_control_plane() -> None:
    """End this process when the control plane has ended, however that ended."""
    control_plane = multiprocessing.parent_process()
    assert control_plane is not None, "a parser process has a parent"
    control_plane.join()
    os._exit(1)
