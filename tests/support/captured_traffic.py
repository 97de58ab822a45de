"""Captured traffic in a real object store, for tests of the jobs that train on it."""

import gzip
from typing import Any

from ulid import ULID

from swiftkv_platform.contract.traffic import (
    PART_SUFFIX,
    CapturedRequest,
    TrafficDeletion,
    format_utc_day,
    make_traffic_prefix,
)
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.names import CapturedTraffic
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key
from swiftkv_platform.storage.traffic import TrafficStore, encode_row
from tests.support.training_text import turns

DEPLOYMENT = "dep_01JZ8Q4M7W3X5N6P9R2S1T0VAB"
SOURCE = f"traffic:{DEPLOYMENT}"
NOON = 20_000.5 * 86400.0
"""2024-10-04T12:00:00Z."""


class Traffic:
    """Captured traffic of a deployment. Each request is in a part of its own, which is stored when the request ends."""

    def __init__(self, store: ObjectStore, *, tenant: str = "acme", deployment_id: str = DEPLOYMENT) -> None:
        self._store = store
        self._deployment_id = deployment_id
        self.prefix = make_traffic_prefix(tenant, deployment_id)
        self._count = 0

    @property
    def access(self) -> Access:
        """Access of an attempt to this traffic."""
        return Access(traffic={self._deployment_id: CapturedTraffic(f"{self._store.uri}/{self.prefix}")})

    def chat(self, *contents: str, system: str | None = None, **fields: Any) -> None:
        """Store a request with messages of the user and the assistant, in turn."""
        start = [] if system is None else [{"role": "system", "content": system}]
        self.store(path="/v1/chat/completions", **{"messages": start + turns(*contents), **fields})

    def text(self, prompt: str, completion: str, **fields: Any) -> None:
        self.store(path="/v1/completions", prompt=prompt, completion=completion, **fields)

    def store(self, *, time: float | None = None, **fields: Any) -> None:
        """Store a request. `time`: its end; by default a second after the one before, from noon on."""
        self._count += 1
        time = NOON + self._count if time is None else time
        defaults = {"model": "mdl", "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        row = CapturedRequest.model_validate({"id": f"r{self._count}", "time": time, **defaults, **fields})
        name = f"{format_utc_day(time)}/{ULID.from_timestamp(time)}{PART_SUFFIX}"
        self._store.put_bytes(join_object_key(self.prefix, name), gzip.compress(encode_row(row)))

    def delete(self, **condition: Any) -> None:
        deletion = TrafficDeletion.model_validate({"requested_at": NOON + 86400.0, **condition})
        TrafficStore(self._store, self.prefix).delete(deletion)
