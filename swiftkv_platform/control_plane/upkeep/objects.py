"""Objects that retention counts and removes, in batches. Knows a job's layout, not how long its objects are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice

from swiftkv_platform.contract.attempt_id import attempts_prefix, trials_prefix
from swiftkv_platform.contract.attempts import MANIFEST
from swiftkv_platform.control_plane.models.model import IMPORTED
from swiftkv_platform.control_plane.upkeep.retention import Kind, ObjectBatch
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, join_key

_PLACES: Mapping[Kind, Sequence[str]] = {
    Kind.EVENT_OBJECTS: ("events", "control"),
    Kind.PREPARED_DATA: ("data", "answers", "starts", "evaluation"),
    Kind.CHECKPOINTS: ("checkpoints",),
    Kind.LOGS: ("logs.txt", "logs.json"),
    Kind.TRACKING: ("tracking",),
}
"""Names below an attempt's prefix."""
_KIND_OF_NAME = {name: kind for kind, names in _PLACES.items() for name in names}
_OF_ATTEMPT = re.compile(r"jobs/[^/]+/(?:trials/[^/]+/jobs/[^/]+/)?attempts/\d+/([^/]+)")


class RetainedObjects:
    """Objects that retention removes. Every method raises `StorageError`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def places(self, job_id: str, kind: Kind) -> Sequence[str]:
        """Return prefixes and keys of one kind of a job's data, including a sweep's trials, which have stores of their
        own."""
        own, trials = attempts_prefix(job_id), trials_prefix(job_id)
        roots = [own, *(f"{trials}/{name}/{own}" for name in self._store.list_directories(trials))]
        attempts = [f"{root}/{number}" for root in roots for number in self._store.list_directories(root)]
        return [f"{attempt}/{name}" for attempt in attempts for name in _PLACES[kind]]

    def remove(self, place: str, *, limit: int) -> ObjectBatch:
        """Remove at most `limit` objects at a place: manifests first, so that no directory looks complete."""
        if (itself := self._store.head(place)) is not None:
            self._store.delete(place)
            return ObjectBatch(1, itself.size, None)
        found = list(islice(self._store.list(place), limit + 1))
        if not found:
            self._store.delete_prefix(place)  # with what a process that died was writing there, which is not listed
            return ObjectBatch(0, 0, None)
        self._hide(place)
        if len(found) <= limit:
            self._store.delete_prefix(place)
            return ObjectBatch(len(found), _size(found), None)
        self._store.delete_many([info.key for info in found[:limit]])
        return ObjectBatch(limit, _size(found[:limit]), found[limit - 1].key)

    def _hide(self, place: str) -> None:
        """Remove the manifests of the directory and of those in it, so that none looks complete while its files go."""
        directories = [place, *(join_key(place, name) for name in self._store.list_directories(place))]
        for directory in directories:
            self._store.delete(join_key(directory, MANIFEST))

    def measure(self, place: str, *, limit: int, after: str | None) -> ObjectBatch:
        """Count the objects that `remove` would remove."""
        if after is None and (itself := self._store.head(place)) is not None:
            return ObjectBatch(1, itself.size, None)
        found, last = self._part(place, limit, after)
        return ObjectBatch(len(found), _size(found), last)

    def count(self, *, limit: int, after: str | None) -> tuple[Mapping[str, tuple[int, int]], str | None]:
        """Return number and bytes of a batch of all objects, by kind, and the key to continue after; None at the
        end."""
        found, last = self._part("", limit, after)
        counted: dict[str, tuple[int, int]] = {}
        for info in found:
            kind = _kind(info.key)
            number, size = counted.get(kind, (0, 0))
            counted[kind] = number + 1, size + info.size
        return counted, last

    def _part(self, prefix: str, limit: int, after: str | None) -> tuple[list[ObjectInfo], str | None]:
        """At most `limit` objects, and the key of the last one if there are more."""
        found = list(islice(self._store.list(prefix, start_after=after), limit + 1))
        return (found, None) if len(found) <= limit else (found[:limit], found[limit - 1].key)


def _size(found: Sequence[ObjectInfo]) -> int:
    return sum(info.size for info in found)


def _kind(key: str) -> str:
    if key.startswith(f"{IMPORTED}/"):
        return "artifacts"
    match = _OF_ATTEMPT.match(key)
    if match is None:
        return "other"
    name = match.group(1)
    return _KIND_OF_NAME.get(name, "artifacts" if name == "artifact" else "other")
