"""Stop requests from outside a training run. Imports no torch."""

from __future__ import annotations

from enum import IntEnum


class StopRequest(IntEnum):
    """Stop request from outside a run; the largest stop request of all workers counts."""

    NONE = 0
    SAVE = 1
    """A checkpoint now, out of turn."""
    LEAVE = 2
    """A checkpoint, then the end of these workers, one of which has to go; others take over from it."""
    STOP = 3
    """A checkpoint, then the end: the machines are taken away."""
    PAUSE = 4
    """A checkpoint, then the end: the job is to go on later."""
