"""Captured traffic of a deployment in an object store: parts, pages of rows, deletions, and what exceeds retention.
Layout and rows: `contract/traffic.py`."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Self

from pydantic import ValidationError
from ulid import ULID

from swiftkv_platform.contract.traffic import (
    MAX_WRITE_DELAY_S,
    PART_SUFFIX,
    CapturedRequest,
    TrafficDeletion,
    format_utc_day,
    make_deletion_key,
)
from swiftkv_platform.errors import InvalidInputError, ObjectNotFoundError, OverloadedError, StorageError
from swiftkv_platform.storage.object_store import ObjectStore, join_object_key

MAX_ROW_BYTES = 16 << 20
"""Max bytes of a row as JSON; longer ones are not stored."""
MAX_PENDING_DELETIONS = 1000
"""Max deletions of a deployment that are not applied yet; readers read them all."""
WRITE_TOLERANCE_S = 300.0
"""Max seconds by which the clocks of two machines differ, and for which a write may take."""
_DELETION_DELAY_S = MAX_WRITE_DELAY_S + WRITE_TOLERANCE_S
"""Seconds after a deletion until no replica writes rows of earlier requests."""
_DAY_S = 86400.0
_ULID_RESOLUTION_S = 1e-3
_COMPRESSION_LEVEL = 4
_DELETIONS = "deletions"
_PART = re.compile(rf"(\d{{4}}-\d\d-\d\d)/([0-9A-HJKMNP-TV-Z]{{26}}){re.escape(PART_SUFFIX)}")
_CURSOR = re.compile(rf"({_PART.pattern})(?:/(?P<time>\d+\.\d+)/(?P<id>.+))?", re.DOTALL)
_MAX_PARTS_PER_PAGE = 200
_MAX_BYTES_PER_PAGE = 16 << 20
"""Compressed bytes; a page that has read more ends, with fewer rows than its limit."""


@dataclass(frozen=True)
class TrafficPart:
    """An object with rows of one day, in the order in which the requests ended at one replica."""

    key: str
    name: str
    """Key without the prefix, which sorts by day and creation time."""
    day: str
    created_at: float
    """Unix seconds, by the clock of the replica that wrote it; no row is later."""
    size: int
    """Compressed bytes."""

    @property
    def earliest(self) -> float:
        """Unix seconds before which no row of the part has ended."""
        return self.created_at - MAX_WRITE_DELAY_S - WRITE_TOLERANCE_S


@dataclass(frozen=True)
class TrafficDay:
    """Captured traffic of a UTC day."""

    day: str
    parts: int
    bytes: int
    """Compressed bytes."""


@dataclass(frozen=True)
class TrafficPage:
    """Rows, newest part first."""

    rows: list[CapturedRequest]
    next: str | None
    """Cursor of the next page; None at the end. A page with `next` may have few rows, or none."""


class TrafficReader:
    """Reads the captured traffic below a prefix. Rows of deletions are left out as soon as these are stored. Every
    method raises `StorageError`, also for an object that is not valid, which it names.

    Args:
        prefix: key prefix of the deployment's traffic, or "" for the whole store; see `make_traffic_prefix`.
    """

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix

    def iterate_rows(self, *, since: float | None = None, until: float | None = None) -> Iterator[CapturedRequest]:
        """Yield the rows of requests that ended within [since, until), in Unix seconds: days in order, and their parts
        by creation time. Holds one part in memory."""
        # Deletions first: those that are applied, and removed, after this line are in this list.
        deletions = [*self.list_deletions().values()]
        for part in self.list_parts(since=since, until=until):
            for row in self._read_rows(part):
                if _is_within(row, since, until) and not _is_deleted(row, deletions):
                    yield row

    def read_page(
        self,
        *,
        limit: int,
        after: str | None = None,
        since: float | None = None,
        until: float | None = None,
        user: str | None = None,
        max_bytes: int | None = None,
    ) -> TrafficPage:
        """Return at most `limit` rows of requests that ended within [since, until), newest part first. Reads a bounded
        number of parts.

        Args:
            after: `next` of the previous page.
            user: only rows of this end user.
            max_bytes: max bytes of the rows as JSON, if the page has several.

        Raises `InvalidInputError` for a cursor that no page has returned.
        """
        deletions = [*self.list_deletions().values()]
        cursor = None if after is None else _Cursor.parse(after)
        rows: list[CapturedRequest] = []
        num_parts = num_bytes = num_row_bytes = 0
        last = ""
        for part in self._list_newest_parts(cursor, since, until):
            if num_parts == _MAX_PARTS_PER_PAGE or num_bytes >= _MAX_BYTES_PER_PAGE:
                return TrafficPage(rows, str(_Cursor(part.name)))
            num_parts, num_bytes = num_parts + 1, num_bytes + part.size
            for row in sorted(self._read_rows(part), key=_get_order, reverse=True):
                is_read = cursor is not None and cursor.name == part.name and _get_order(row) >= cursor.order
                is_wanted = _is_within(row, since, until) and user in (None, row.user)
                if is_read or not is_wanted or _is_deleted(row, deletions):
                    continue
                num_row_bytes += 0 if max_bytes is None else len(encode_row(row))
                if rows and (len(rows) == limit or num_row_bytes > (max_bytes or num_row_bytes)):
                    return TrafficPage(rows, last)
                rows.append(row)
                last = str(_Cursor(part.name, row.time, row.id))
        return TrafficPage(rows, None)

    def list_days(self) -> list[TrafficDay]:
        """Return the days with captured traffic, in order. Rows of pending deletions count."""
        days: dict[str, TrafficDay] = {}
        for part in self.list_parts():
            known = days.get(part.day, TrafficDay(part.day, 0, 0))
            days[part.day] = TrafficDay(part.day, known.parts + 1, known.bytes + part.size)
        return [*days.values()]

    def list_parts(self, *, since: float | None = None, until: float | None = None) -> Iterator[TrafficPart]:
        """Yield the parts that may have rows of requests that ended within [since, until): days in order, and within a
        day by creation time."""
        # Some servers leave out a directory after its own name.
        first_day = None if since is None else join_object_key(self._prefix, f"{format_utc_day(since)}/0")
        last_day = None if until is None else format_utc_day(until)
        for part in self._list_parts(self._prefix, start_after=first_day):
            if last_day is not None and part.day > last_day:
                return
            if _may_have_rows(part, since, until):
                yield part

    def list_deletions(self) -> dict[str, TrafficDeletion]:
        """Return the pending deletions by their keys, oldest first."""
        found = {}
        for info in self._store.list(join_object_key(self._prefix, _DELETIONS)):
            try:
                found[info.key] = TrafficDeletion.model_validate_json(self._store.get_bytes(info.key))
            except ObjectNotFoundError:  # applied meanwhile
                continue
            except ValidationError as error:
                raise self._make_error(info.key, f"is no deletion of captured traffic: {_describe(error)}") from error
        return found

    def _list_newest_parts(
        self, cursor: _Cursor | None, since: float | None, until: float | None
    ) -> Iterator[TrafficPart]:
        """Yield the parts that may have such rows, newest first, from the cursor's part on."""
        for day in reversed(self._store.list_directories(self._prefix)):
            is_outside = (since is not None and day < format_utc_day(since)) or (
                until is not None and day > format_utc_day(until)
            )
            if day == _DELETIONS or is_outside or (cursor is not None and day > cursor.name.partition("/")[0]):
                continue
            for part in reversed([*self._list_parts(join_object_key(self._prefix, day))]):
                if (cursor is None or part.name <= cursor.name) and _may_have_rows(part, since, until):
                    yield part

    def _list_parts(self, directory: str, *, start_after: str | None = None) -> Iterator[TrafficPart]:
        for info in self._store.list(directory, start_after=start_after):
            name = info.key[len(self._prefix) :].removeprefix("/")
            if name.startswith(f"{_DELETIONS}/"):
                continue
            match = _PART.fullmatch(name)
            if match is None:
                raise self._make_error(info.key, "is no part of captured traffic")
            yield TrafficPart(info.key, name, match[1], ULID.from_str(match[2]).timestamp, info.size)

    def _read_rows(self, part: TrafficPart) -> Iterator[CapturedRequest]:
        """Yield the rows of a part; none if it was removed after it was listed."""
        try:
            data = self._store.get_bytes(part.key)
        except ObjectNotFoundError:
            return
        number = 0
        try:
            with gzip.open(BytesIO(data)) as lines:
                while line := lines.readline(MAX_ROW_BYTES + 1):
                    number += 1
                    yield _parse_row(line)
        except (OSError, EOFError, zlib.error, ValidationError) as error:
            why = f"cannot be read at line {number or 1}: {_describe(error)}"
            raise self._make_error(part.key, why) from error

    def _make_error(self, key: str, why: str) -> StorageError:
        return StorageError(f"object {key!r} in {self._store.uri} {why}; delete the object", field="key", value=key)


class TrafficStore(TrafficReader):
    """Captured traffic that its owner also writes, deletes and removes."""

    def write_part(self, lines: Iterable[bytes], *, name: str) -> None:
        """Store rows of one day, as `encode_row` returns them, as the part `name` (see `make_part_key`)."""
        self._store.put_bytes(join_object_key(self._prefix, name), _compress_rows(lines))

    def delete(self, deletion: TrafficDeletion) -> None:
        """Store a deletion, which hides its rows at once; `apply_deletions` then removes them. Raises `OverloadedError`
        if too many are pending."""
        directory = join_object_key(self._prefix, _DELETIONS)
        if sum(1 for _ in self._store.list(directory)) >= MAX_PENDING_DELETIONS:
            raise OverloadedError(
                f"{MAX_PENDING_DELETIONS} deletions of captured traffic are pending; retry in some minutes",
                retry_after_s=_DELETION_DELAY_S,
            )
        self._store.put_bytes(
            join_object_key(self._prefix, make_deletion_key()), deletion.model_dump_json(exclude_none=True).encode()
        )

    def apply_deletions(self, now: float) -> Iterator[RewrittenPart]:
        """Rewrite the parts without the rows of deletions for which no replica can write rows any more, then remove
        these deletions. Yields after each part; may be repeated after a crash.

        Args:
            now: Unix seconds.
        """
        found = self.list_deletions()
        due = {key: item for key, item in found.items() if item.requested_at + _DELETION_DELAY_S <= now}
        if not due:
            return
        for part in self.list_parts(until=max(item.requested_at for item in due.values()) + 1e-3):
            yield self._rewrite_part(part, [*due.values()])
        self._store.delete_many([*due])

    def _rewrite_part(self, part: TrafficPart, deletions: Collection[TrafficDeletion]) -> RewrittenPart:
        rows = [*self._read_rows(part)]
        kept = [row for row in rows if not _is_deleted(row, deletions)]
        if len(kept) == len(rows):
            return RewrittenPart()
        data = _compress_rows(map(encode_row, kept))
        if kept:
            self._store.put_bytes(part.key, data)
        else:
            self._store.delete(part.key)
        return RewrittenPart(len(rows) - len(kept), part.size - (len(data) if kept else 0))

    def list_expired_parts(self, *, now: float, retention_days: int, max_bytes: int) -> Iterator[TrafficPart]:
        """Yield the parts of days that ended more than `retention_days` ago, and then the oldest ones by which all
        others exceed `max_bytes`."""
        excess = sum(part.size for part in self.list_parts()) - max_bytes
        oldest_day = format_utc_day(now - retention_days * _DAY_S)
        for part in self.list_parts():
            if part.day >= oldest_day and excess <= 0:
                return
            excess -= part.size
            yield part


@dataclass(frozen=True)
class RewrittenPart:
    """What a part has lost by deletions."""

    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class _Cursor:
    """Position in the rows of a deployment, newest part first: before a part's rows, or after one of them."""

    name: str
    time: float = math.inf
    id: str = ""

    @property
    def order(self) -> tuple[float, str]:
        return self.time, self.id

    def __str__(self) -> str:
        return self.name if self.time == math.inf else f"{self.name}/{self.time!r}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `str(cursor)`. Raises `InvalidInputError`."""
        match = _CURSOR.fullmatch(text)
        if match is None:
            message = f"after is {text!r}; use the position that the previous page returned, or leave it out"
            raise InvalidInputError(message, field="after", value=text)
        return cls(match[1]) if match["time"] is None else cls(match[1], float(match["time"]), match["id"])


def encode_row(row: CapturedRequest) -> bytes:
    """Return the row's line. Raises `ValueError` for text that UTF-8 cannot encode."""
    return row.model_dump_json(exclude_defaults=True).encode() + b"\n"


def _parse_row(line: bytes) -> CapturedRequest:
    """Parse `encode_row(row)`. Raises `EOFError` for a line without its end, and `ValidationError`."""
    if not line.endswith(b"\n"):
        raise EOFError("a line is cut off")
    return CapturedRequest.model_validate_json(line)


def _compress_rows(lines: Iterable[bytes]) -> bytes:
    """Return a part with these lines."""
    buffer = BytesIO()
    with gzip.open(buffer, "wb", compresslevel=_COMPRESSION_LEVEL) as file:
        file.writelines(lines)
    return buffer.getvalue()


def _describe(error: Exception) -> str:
    """Return an error's reason without the values of the row, which are confidential."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _may_have_rows(part: TrafficPart, since: float | None, until: float | None) -> bool:
    return (since is None or part.created_at + _ULID_RESOLUTION_S >= since) and (until is None or part.earliest < until)


def _is_within(row: CapturedRequest, since: float | None, until: float | None) -> bool:
    return (since is None or row.time >= since) and (until is None or row.time < until)


def _is_deleted(row: CapturedRequest, deletions: Collection[TrafficDeletion]) -> bool:
    return any(deletion.matches(row) for deletion in deletions)


def _get_order(row: CapturedRequest) -> tuple[float, str]:
    return row.time, row.id
