"""The process that vLLM's processes answer to. Imports neither torch nor vLLM.

vLLM's engine core does not notice that its frontend was killed: it would stay, with the model's memory, beside the
frontend that takes the old one's place.
"""

from __future__ import annotations

import os
import select
import threading

FRONTEND_PID = "SWIFTKV_VLLM_FRONTEND_PID"
"""Environment variable with the process whose end is the end of vLLM's; unset: vLLM's own ways."""
_WATCHER = "swiftkv-frontend"


def announce_frontend() -> None:
    """Make the processes that vLLM starts from here end with this one, however it ends."""
    os.environ[FRONTEND_PID] = str(os.getpid())


def follow_frontend() -> None:
    """End this process when the frontend has; a second call changes nothing. The frontend itself follows no process."""
    frontend = os.environ.get(FRONTEND_PID)
    if frontend in (None, str(os.getpid())) or any(thread.name == _WATCHER for thread in threading.enumerate()):
        return
    try:
        handle = os.pidfd_open(int(frontend or 0))
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_behind, args=(handle,), name=_WATCHER, daemon=True).start()


def _exit_behind(handle: int) -> None:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    waiting.poll()
    os._exit(1)
