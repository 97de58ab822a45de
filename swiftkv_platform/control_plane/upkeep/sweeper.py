"""Removal of data that is kept no longer, in bounded steps, and counts of what is stored.

First a row records the removal, then the objects are removed, then the row: each step may be repeated, by this process
after a crash or by another one at the same time.

    ended jobs: the data of a kind ─▶ the job's mark
    deleted jobs and models: their rows, replaced by a `deletions` row ─▶ their objects ─▶ the `deletions` row
    interrupted imports: a `deletions` row that is due in a day, unless the model is registered ─▶ as above
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice

from swiftkv_platform.contract.attempts import MANIFEST, attempts_prefix, trials_prefix
from swiftkv_platform.control_plane.base import Clock, is_due
from swiftkv_platform.control_plane.models.model import IMPORTED
from swiftkv_platform.control_plane.upkeep.rows import Kind, RetainedRows
from swiftkv_platform.errors import ConflictError, NotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.settings import Settings
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


@dataclass(frozen=True)
class Swept:
    """Amount of one kind of data that was removed, or would be."""

    kind: str
    rows: int = 0
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Swept) -> Swept:
        return Swept(self.kind, self.rows + other.rows, self.objects + other.objects, self.bytes + other.bytes)


@dataclass(frozen=True)
class Counts:
    """Size of database and store when they were last counted."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """By table."""
    objects: Mapping[str, int] = field(default_factory=dict)
    """By kind of object."""
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectBatch:
    """Totals of a batch of objects below a prefix."""

    objects: int
    bytes: int
    next: str | None
    """Key to continue after; None if there are no more."""


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


DAY_S = 86400.0
SWEEPER = "retention"
"""Author of deletions that no request caused."""
_PAGE = 100
"""Jobs or models per query."""
_ROWS = 2000
"""Most rows that one transaction removes."""
_OBJECTS = 500
"""Most objects that one step removes."""
_COUNTED = 2000
"""Most objects that one step counts."""
_DELETIONS_S = 60.0
"""Seconds between two removals of deleted objects."""
_TICK_S = 1.0
"""Seconds after which a tick begins no further step."""
_MOST_FAILURES = 3
"""Failures of the store in a row after which a round ends."""


@dataclass
class Sweeper:
    """Removes what is kept no longer, in rounds; each tick does a bounded part of a round."""

    rows: RetainedRows
    objects: RetainedObjects
    settings: Settings
    """Says how long what is kept: 0 days for ever."""
    clock: Clock
    _: KW_ONLY
    monotonic: Callable[[], float] = time.monotonic
    """Clock by which a tick's time is limited."""
    counts: Counts = field(default=Counts(), init=False)
    """Empty until this process has counted."""
    swept: dict[str, Swept] = field(default_factory=dict, init=False)
    """Amounts that this process has removed, by kind."""
    _round: Iterator[Swept] | None = field(default=None, init=False)
    _next_round: float = field(default=0.0, init=False)
    _next_deletions: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)

    def tick(self) -> None:
        """Continue the round for about a second. Raises `DatabaseUnavailableError` and `StorageError`."""
        if self._round is None:
            now = self.clock()
            if is_due(self._next_round, now, within=self.settings.sweep_interval_s):
                self._round = self._whole_round()
            elif is_due(self._next_deletions, now, within=_DELETIONS_S):
                self._round = self._between_rounds()
            else:
                return
        until = self.monotonic() + _TICK_S
        try:
            for swept in self._round:
                self.swept[swept.kind] = self.swept.get(swept.kind, Swept(swept.kind)) + swept
                if self.monotonic() >= until:
                    return
        except Exception:
            self._round = None  # a generator that has raised is finished; the next tick starts a new round
            raise
        self._round = None

    def _whole_round(self) -> Iterator[Swept]:
        yield from self.round()
        yield from self._count()
        self._next_round = self.clock() + self.settings.sweep_interval_s

    def _between_rounds(self) -> Iterator[Swept]:
        """Remove the objects of what was deleted since: their tenant's quota counts them until then."""
        self._failures = 0
        yield from self._deleted(dry_run=False)
        self._next_deletions = self.clock() + _DELETIONS_S

    def round(self, *, dry_run: bool = False) -> Iterator[Swept]:
        """Remove everything that is kept no longer, in steps of bounded size, and yield what each has removed.
        `dry_run`: remove nothing, and yield what a round would remove. Raises `DatabaseUnavailableError`, and
        `StorageError` if the store fails several times in a row."""
        now, rows = self.clock(), self.rows
        self._failures = 0
        yield from self._deleted(dry_run=dry_run)
        for kind in Kind:
            if (before := self._due_before(kind, now)) is not None:
                yield from self._of_ended_jobs(kind, before, dry_run=dry_run)
        yield from self._old_rows(now, dry_run=dry_run)
        if (before := self._due_before("models", now)) is not None:
            superseded = _all(partial(rows.superseded_models, before=before))
            yield from self._unused("model", superseded, rows.foresee_model, rows.delete_model, dry_run=dry_run)
        if (before := self._due_before("jobs", now)) is not None:
            expired = _all(partial(rows.expired_jobs, before=before))
            yield from self._unused("job", expired, rows.foresee_job, rows.delete_job, dry_run=dry_run)
        if not dry_run:
            yield from self._deleted(dry_run=False)

    def _due_before(self, kind: str, now: float) -> float | None:
        """Return the time until which rows or objects of this kind are due; None if they are kept for ever."""
        days: float = getattr(self.settings, f"retention_{kind}_days")
        return now - days * DAY_S if days else None

    def _of_ended_jobs(self, kind: Kind, before: float, *, dry_run: bool) -> Iterator[Swept]:
        for job_id in _all(partial(self.rows.ended_jobs, kind, before=before)):
            try:
                yield from self._of_job(job_id, kind, dry_run=dry_run)
            except StorageError as error:
                self._note_failure(job_id, error)
                continue
            self._failures = 0
            if not dry_run:
                self.rows.mark_swept(job_id, kind)
            yield Swept(kind)

    def _of_job(self, job_id: str, kind: Kind, *, dry_run: bool) -> Iterator[Swept]:
        if kind is Kind.EVENTS:
            yield from self._events(job_id, dry_run=dry_run)
        elif kind is Kind.METRICS:
            yield from self._points(job_id, dry_run=dry_run)
        else:
            for place in self.objects.places(job_id, kind):
                yield from self._at(place, kind, dry_run=dry_run)

    def _events(self, job_id: str, *, dry_run: bool) -> Iterator[Swept]:
        if dry_run:
            yield Swept(Kind.EVENTS, rows=self.rows.count_events(job_id))
            return
        while gone := self.rows.remove_events(job_id, limit=_ROWS):
            yield Swept(Kind.EVENTS, rows=gone)

    def _points(self, job_id: str, *, dry_run: bool) -> Iterator[Swept]:
        most = self.settings.retention_metric_points
        if dry_run:
            yield Swept(Kind.METRICS, rows=max(self.rows.count_points(job_id) - most, 0))
            return
        while gone := self.rows.thin_points(job_id, most=most, limit=_ROWS):
            yield Swept(Kind.METRICS, rows=gone)

    def _at(self, place: str, kind: str, *, dry_run: bool) -> Iterator[Swept]:
        after: str | None = None
        while True:
            if dry_run:
                batch = self.objects.measure(place, limit=_OBJECTS, after=after)
            else:
                batch = self.objects.remove(place, limit=_OBJECTS)
            yield Swept(kind, objects=batch.objects, bytes=batch.bytes)
            after = batch.next
            if after is None:
                return

    def _old_rows(self, now: float, *, dry_run: bool) -> Iterator[Swept]:
        """Remove old rows, page by page. Sessions have an end of their own."""
        trim = partial(self.rows.trim_promotions, keep=self.settings.retention_rollbacks)
        removals: dict[str, Callable[..., int]] = {"promotions": trim}
        for kind in ("sessions", "deliveries", "idempotency_keys", "audit"):
            removals[kind] = partial(self.rows.remove_old, kind, limit=_ROWS)
        for kind, remove in removals.items():
            before = now if kind == "sessions" else self._due_before(kind, now)
            while before is not None and (gone := remove(before=before, dry_run=dry_run)):
                yield Swept(kind, rows=gone)
                if dry_run:
                    break

    def _unused(
        self,
        what: str,
        ids: Iterator[str],
        foresee: Callable[[str], tuple[int, str]],
        remove: Callable[..., int],
        *,
        dry_run: bool,
    ) -> Iterator[Swept]:
        """Remove those of these jobs or models that nothing uses."""
        kind = f"{what}s"
        for each in ids:
            try:
                if dry_run:
                    number, prefix = foresee(each)
                    yield Swept(kind, rows=number)
                    yield from self._at(prefix, kind, dry_run=True)
                else:
                    yield Swept(kind, rows=remove(each, by=SWEEPER, now=self.clock()))
            except (ConflictError, NotFoundError) as error:
                get_logger(loop=SWEEPER).debug(f"{what} stays", **{f"{what}_id": each}, reason=error.message)

    def _deleted(self, *, dry_run: bool) -> Iterator[Swept]:
        """Remove the objects of deleted jobs and models. A prefix whose objects cannot be removed is tried again in the
        next round."""
        for prefix in _all(partial(self.rows.deletions, now=self.clock())):
            try:
                yield from self._at(prefix, "deleted", dry_run=dry_run)
            except StorageError as error:
                self._note_failure(prefix, error)
                continue
            self._failures = 0
            if not dry_run:
                self.rows.forget_deletion(prefix)

    def _note_failure(self, subject: str, error: StorageError) -> None:
        """Log a failure of the store; raise it if the store has failed several times in a row."""
        self._failures += 1
        get_logger(loop=SWEEPER).warning("not swept", subject=subject, reason=error.message)
        if self._failures >= _MOST_FAILURES:
            raise error

    def _count(self) -> Iterator[Swept]:
        rows = self.rows.count_rows()
        objects: dict[str, int] = {}
        sizes: dict[str, int] = {}
        after: str | None = None
        while True:
            found, after = self.objects.count(limit=_COUNTED, after=after)
            for kind, (number, size) in found.items():
                objects[kind] = objects.get(kind, 0) + number
                sizes[kind] = sizes.get(kind, 0) + size
            if after is None:
                break
            yield Swept("counted")
        self.counts = Counts(rows, objects, sizes)


def _all(page: Callable[..., Sequence[str]]) -> Iterator[str]:
    """Ids of all pages."""
    after: str | None = None
    while ids := page(limit=_PAGE, after=after):
        yield from ids
        after = ids[-1]
