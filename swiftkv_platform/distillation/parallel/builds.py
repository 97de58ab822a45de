"""Locks of the extensions that DeepSpeed compiles at its first use on a machine. Knows files alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from swiftkv_platform.logs import get_logger

LONGEST_BUILD_S = 600.0
"""Age from which a lock is that of a process which died; a build takes a minute or two."""


def remove_abandoned_locks() -> None:
    """Remove the locks of builds that were cut off: every later process on the machine would wait for them for ever."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob("**/lock"):
        try:
            abandoned = time.time() - lock.stat().st_mtime > LONGEST_BUILD_S
        except FileNotFoundError:  # its build has just ended
            continue
        if abandoned:
            lock.unlink(missing_ok=True)
            get_logger().warning("abandoned_build_lock_removed", path=str(lock))
