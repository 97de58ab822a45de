"""Parts of an attempt's evaluation in the object store: what one that was cut off has measured, the next one takes.
Knows no measurement.
"""

from __future__ import annotations

import hashlib
import time

from jobs.attempt.events import Reporter
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.errors import ObjectNotFoundError
from swiftkv_platform.storage.object_store import ObjectStore

PROGRESS_INTERVAL_S = 30.0
"""Seconds between events of one part's progress."""


class StoredParts:
    """The `Parts` of an attempt. They belong to the checkpoint that is measured: another's are not taken for them."""

    def __init__(self, store: ObjectStore, request: AttemptRequest, checkpoint: str) -> None:
        self._store = store
        self._attempt = request.attempt_id
        self._digest = hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
        self._reporter = Reporter(store, request.attempt_id, "evaluation")
        self._began: dict[str, float] = {}
        self._told = 0.0

    def get(self, name: str) -> bytes | None:
        for attempt in reversed(self._attempt.so_far()):
            try:
                return self._store.get_bytes(attempt.evaluation_key(self._digest, name))
            except ObjectNotFoundError:
                continue
        self._began[name] = time.monotonic()
        return None

    def put(self, name: str, data: bytes) -> None:
        self._store.put_bytes(self._attempt.evaluation_key(self._digest, name), data)

    def progress(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now < self._told + PROGRESS_INTERVAL_S:
            return
        self._told = now
        elapsed = now - self._began.setdefault(name, now)
        eta = elapsed * (total - done) / done if done else None
        self._reporter.progress("evaluate", name, done=done, total=total, eta_s=eta)
