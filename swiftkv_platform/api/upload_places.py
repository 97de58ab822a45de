"""Room for uploads: few at a time, since each takes disk of the control plane while it is read. Knows no route."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from swiftkv_platform.errors import OverloadedError

MOST = 8
"""Uploads that a control plane reads at a time."""
MOST_OF_A_TENANT = 2
_RETRY_AFTER_S = 5.0


class UploadPlaces:
    """Places of uploads under way, by tenant."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place. Raises `OverloadedError` where none is free."""
        with self._lock:
            if self._taken.total() >= MOST or self._taken[tenant] >= MOST_OF_A_TENANT:
                raise OverloadedError(
                    f"{self._taken[tenant]} uploads of tenant {tenant!r} are under way, {self._taken.total()} in all; "
                    f"at most {MOST_OF_A_TENANT} of a tenant and {MOST} in all are read at a time",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._taken[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant] -= 1
                self._taken += Counter()  # forgets tenants without any
