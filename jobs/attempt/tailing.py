"""Tail the events of an attempt as they are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.errors import StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.attempt_store import AttemptStore

_INTERVAL_S = 0.5
_LAST_ROUNDS = 3
"""Attempts to read the last events if the store fails."""


@contextmanager
def following(
    store: AttemptStore, request: AttemptRequest, on_event: Callable[[AttemptEvent], None] | None
) -> Iterator[None]:
    """Call `on_event` with every event of the attempt, the last ones before the context ends.

    If the store fails, or `on_event` raises a `StorageError`, the remaining events are delivered later. If `on_event`
    raises another error, it is logged and the event skipped.
    """
    if on_event is None:
        yield
        return
    ended, cursor = threading.Event(), dict[str, int]()

    def look() -> bool:
        """Deliver new events; return whether all were delivered."""
        try:
            for stored in store.read_events(request.attempt_id, cursor):
                _tell(on_event, stored.event)
                cursor[stored.writer] = stored.sequence
        except StorageError as error:
            get_logger().warning("events_delayed", error=error.message)
            return False
        return True

    def follow() -> None:
        while not ended.wait(_INTERVAL_S):
            look()
        for last in range(1, _LAST_ROUNDS + 1):
            if look():
                return
            if last < _LAST_ROUNDS:
                time.sleep(_INTERVAL_S)
        get_logger().error("events_not_followed", after=cursor)

    follower = threading.Thread(target=copy_context().run, args=(follow,), name="events", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _tell(on_event: Callable[[AttemptEvent], None], event: AttemptEvent) -> None:
    try:
        on_event(event)
    except StorageError:
        raise
    except Exception:
        get_logger().exception("event_not_handled", type=event.type, message=event.message)
