"""Parts of an attempt's evaluation in the object store: what one that was cut off has measured, the next one takes.
Progress of phases that are not counted in steps. Knows no measurement.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.errors import ObjectNotFoundError
from swiftkv_platform.jobs.attempt.events import Reporter
from swiftkv_platform.storage.object_store import ObjectStore

PROGRESS_INTERVAL_S = 30.0
"""Seconds between events of one part's progress."""


def newest_bytes(store: ObjectStore, attempt: AttemptId, key: Callable[[AttemptId], str]) -> bytes | None:
    """Return what an attempt, else the newest one before it, has stored at its `key`; None where none has."""
    for one in reversed(attempt.so_far()):
        with suppress(ObjectNotFoundError):
            return store.get_bytes(key(one))
    return None


class PhaseProgress:
    """Events that tell how far the parts of a phase are, and how long they will take at the pace so far."""

    def __init__(self, reporter: Reporter, phase: str) -> None:
        self._reporter = reporter
        self._phase = phase
        self._began: dict[str, tuple[float, int]] = {}
        self._told = 0.0

    def begin(self, part: str, done: int = 0) -> None:
        """Start the part's clock, `done` of its pieces having been done before."""
        self._began[part] = time.monotonic(), done

    def tell(self, part: str, done: int, total: int) -> None:
        """Write an event, unless the last one was written a moment ago and the part is not at its end."""
        now = time.monotonic()
        if done < total and now < self._told + PROGRESS_INTERVAL_S:
            return
        self._told = now
        began, before = self._began.setdefault(part, (now, done))
        eta = (now - began) * (total - done) / (done - before) if done > before else None
        self._reporter.progress(self._phase, part, done=done, total=total, eta_s=eta)


class StoredParts:
    """The `Parts` of an attempt. They belong to the checkpoint that is measured: another's are not taken for them."""

    def __init__(self, store: ObjectStore, request: AttemptRequest, checkpoint: str) -> None:
        self._store = store
        self._attempt = request.attempt_id
        self._digest = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
        self._progress = PhaseProgress(Reporter(store, request.attempt_id, "evaluation"), "evaluate")

    def get(self, name: str) -> bytes | None:
        kept = newest_bytes(self._store, self._attempt, lambda attempt: attempt.evaluation_key(self._digest, name))
        if kept is None:
            self._progress.begin(name)
        return kept

    def put(self, name: str, data: bytes) -> None:
        self._store.put_bytes(self._attempt.evaluation_key(self._digest, name), data)

    def progress(self, name: str, done: int, total: int) -> None:
        self._progress.tell(name, done, total)
