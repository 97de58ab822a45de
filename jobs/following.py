"""Events of an attempt handed on as they are written. Knows no Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swiftkv_platform.attempts import AttemptEvent, AttemptRequest
from swiftkv_platform.storage.attempt_store import AttemptStore

_INTERVAL_S = 0.5


@contextmanager
def following(
    store: AttemptStore, request: AttemptRequest, on_event: Callable[[AttemptEvent], None] | None
) -> Iterator[None]:
    """Hand every event of the attempt to `on_event`, the last ones before the context ends."""
    if on_event is None:
        yield
        return
    ended, cursor = threading.Event(), dict[str, int]()

    def follow() -> None:
        while True:
            last_round = ended.wait(_INTERVAL_S)
            for stored in store.read_events(request.job_id, request.attempt, cursor):
                cursor[stored.writer] = stored.sequence
                on_event(stored.event)
            if last_round:
                return

    follower = threading.Thread(target=follow, name="events", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()
