"""Concurrent calls."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from swiftkv_platform.errors import SwiftKVError

MOST_THREADS = 25


def at_once(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make the calls in threads that start together; return each call's result or the error that it raised."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SwiftKVError as error:
            return error

    waiting = list(calls)
    threads = min(len(waiting), MOST_THREADS)
    with ThreadPoolExecutor(threads, initializer=threading.Barrier(threads).wait) as pool:
        return list(pool.map(outcome, waiting))
