"""Last uses of API keys, noted at most once a minute each. Knows no route."""

from __future__ import annotations

import threading

from swiftkv_platform.database.key_uses import SqlKeyUses
from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.ports import Clock
from swiftkv_platform.security.keys import ApiKey
from swiftkv_platform.security.principals import Principal

_INTERVAL_S = 60.0


class KeyUses:
    """Uses that this control plane has seen; all control planes of a database together write one a minute and key."""

    def __init__(self, store: SqlKeyUses, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._noted: dict[str, float] = {}
        """Unix seconds by key id; as many as there are keys in the file."""
        self._lock = threading.Lock()

    def note(self, principal: Principal) -> None:
        """Store that a key was used now, unless that was done within the last minute.

        No request fails for it: a use that cannot be stored is logged, and stored a minute later.
        """
        if not isinstance(principal, ApiKey):
            return
        now = self._clock()
        with self._lock:
            if now - self._noted.get(principal.id, -_INTERVAL_S) < _INTERVAL_S:
                return
            self._noted[principal.id] = now
        try:
            self._store.note(principal.id, now, at_least_s=_INTERVAL_S)
        except DatabaseUnavailableError as error:
            get_logger().warning(
                "use of a key not stored", key=principal.name, key_id=principal.id, reason=error.message
            )
