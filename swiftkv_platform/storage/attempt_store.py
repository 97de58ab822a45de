"""Requests, events, checkpoints and logs of attempts in an object store; `contract.attempts` has the layout.

Logs are written and read in pieces, the middle of a long one left out: `logs.txt` is the saved log, `logs.json` its
`LogLayout`, by which followers continue from their place in the original."""

from __future__ import annotations

import heapq
import math
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from swiftkv_platform.contract.attempts import (
    HELD_OUT_KL,
    AttemptId,
    AttemptRequest,
    Manifest,
    attempts_prefix,
    describe_unknown_field,
    trials_prefix,
)
from swiftkv_platform.contract.events import AttemptEvent, MessageEvent, parse_event
from swiftkv_platform.errors import ObjectNotFoundError, ProtocolError, StorageError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.limits import EVENT_BYTES
from swiftkv_platform.logs import redact
from swiftkv_platform.sources.untrusted_files import UnusableFileError
from swiftkv_platform.storage.artifacts import delete_directory, hash_manifest, is_complete, read_manifest
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, join_object_key, read_small_object

_BLOCK_BYTES = 1 << 16
_NOTICE_BYTES = 200
"""Bytes reserved for the line that reports the bytes left out."""


class LogLayout(FrozenBaseModel):
    """Which bytes of the original log are saved. All sizes in bytes."""

    size: int
    """Size of the original log."""
    head: int
    """Size of the saved head."""
    left_out: int = 0


def save_log(store: ObjectStore, key: str, pieces: Iterable[bytes], *, max_bytes: int) -> None:
    """Store a log at `key` and its layout next to it, leaving out the middle beyond `max_bytes`.

    Temporary files take up to 1.5 times `max_bytes`. Raises `StorageError`, also if the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="swiftkv-log-") as directory:
            path, capacity = Path(directory) / "log", max_bytes - _NOTICE_BYTES
            with path.open("wb") as file, (Path(directory) / "tail").open("w+b") as tail:
                layout = _write_log(file, pieces, capacity // 2, _RingBufferFile(tail, capacity - capacity // 2))
            # layout first, so that every stored log has one
            store.put_bytes(_get_layout_key(key), layout.model_dump_json().encode())
            store.upload_file(path, key)
    except OSError as error:
        raise StorageError(f"cannot save the log {key}: {error}", field="key", value=key) from error


@dataclass(frozen=True)
class SavedLog:
    """A log in the store, streamed on demand."""

    store: ObjectStore
    key: str
    size: int
    """Number of stored bytes, including the line that reports how many were left out."""
    layout: LogLayout

    def stream(self, start: int = 0) -> Iterator[bytes]:
        """Stream the saved log from byte `start` on."""
        return self.store.stream(self.key, _BLOCK_BYTES, start=start)

    def stream_after(self, sent: int) -> Iterator[bytes]:
        """Stream the saved part of the original log after its first `sent` bytes."""
        tail_start = self.layout.head + self.layout.left_out
        if not self.layout.left_out or sent <= self.layout.head:
            return self.stream(sent)
        if sent < tail_start:
            return self.stream(self.layout.head)
        return self.stream(self.size - (self.layout.size - sent))

    def stream_tail(self, lines: int) -> Iterator[bytes]:
        """Stream the last `lines` lines."""
        start = self.size
        while start > 0:
            begin = max(start - _BLOCK_BYTES, 0)
            block = self._read_block(begin, start - begin)
            # skip the newline of the last line
            ends = len(block) - 1 if start == self.size else len(block)
            while (ends := block.rfind(b"\n", 0, ends)) != -1:
                lines -= 1
                if lines == 0:
                    return self.stream(begin + ends + 1)
            start = begin
        return self.stream()

    def _read_block(self, start: int, size: int) -> bytes:
        with closing(self.store.stream(self.key, size, start=start)) as pieces:  # type: ignore[type-var]
            return next(pieces, b"")


def open_log(store: ObjectStore, key: str) -> SavedLog | None:
    """Return the log at `key`; None if there is none."""
    info = store.head(key)
    if info is None:
        return None
    whole = LogLayout(size=info.size, head=info.size)
    try:
        layout = LogLayout.model_validate_json(store.get_bytes(_get_layout_key(key)))
    except (ObjectNotFoundError, ValidationError):
        layout = whole  # saved by a version without layouts
    return SavedLog(store, key, info.size, layout)


def _get_layout_key(key: str) -> str:
    return f"{key.removesuffix('.txt')}.json"


class _RingBufferFile:
    """Keeps the last `capacity` bytes added, in a file that is used as a ring buffer."""

    def __init__(self, file: IO[bytes], capacity: int) -> None:
        self._file = file
        self.capacity = capacity
        self.num_added = 0

    def add(self, piece: bytes) -> None:
        while piece:
            at = self.num_added % self.capacity
            part = piece[: self.capacity - at]
            self._file.seek(at)
            self._file.write(part)
            self.num_added += len(part)
            piece = piece[len(part) :]

    def iterate_blocks(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of at most `_BLOCK_BYTES`."""
        begin, end = max(self.num_added - self.capacity, 0), self.num_added
        while begin < end:
            at = begin % self.capacity
            self._file.seek(at)
            block = self._file.read(min(_BLOCK_BYTES, end - begin, self.capacity - at))
            begin += len(block)
            yield block


def _write_log(file: IO[bytes], pieces: Iterable[bytes], max_head: int, tail: _RingBufferFile) -> LogLayout:
    """Write the head, then a line on the bytes left out, if any, then the tail, which `tail` buffers meanwhile."""
    head = 0
    for piece in pieces:
        to_head = piece[: max_head - head]
        file.write(to_head)
        head += len(to_head)
        tail.add(piece[len(to_head) :])
    iterate_blocks = tail.iterate_blocks()
    first = next(iterate_blocks, b"")
    left_out = max(tail.num_added - tail.capacity, 0)
    kept = tail.num_added - left_out
    if left_out:
        head, cut = _trim_to_lines(file, head, first)
        first, kept = first[cut:], kept - cut
        left_out = tail.num_added - kept + (max_head - head)
        file.write(f"[... {left_out} bytes of this log are left out here ...]\n".encode())
    file.writelines(chain([first], iterate_blocks))
    return LogLayout(size=head + left_out + kept, head=head, left_out=left_out)


def _trim_to_lines(file: IO[bytes], head: int, tail: bytes) -> tuple[int, int]:
    """Cut the head after its last whole line, unless that is longer than `_BLOCK_BYTES`. Returns (size of the
    head, bytes to drop from the beginning of `tail` so that `tail` begins with a whole line)."""
    file.flush()
    with Path(file.name).open("rb") as written:
        written.seek(max(head - _BLOCK_BYTES, 0))
        end = written.read().rfind(b"\n")
    if end != -1:
        head = max(head - _BLOCK_BYTES, 0) + end + 1
        file.truncate(head)
        file.seek(head)
    return head, tail.find(b"\n") + 1


_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(?!\d)")
_EVENT_NAME = re.compile(r"(\d{8,})\.json")
_NUM_READERS = 16
_KEYS_PER_LIST = 1000
"""Keys in one page of S3's list."""
_MAX_READ_EVENTS_PER_PART = 800
"""Max already read events per part, so that a page of the list also has new ones."""


@dataclass(frozen=True)
class StoredEvent:
    """An event, the writer that stored it, and its number in the writer's stream."""

    writer: str
    sequence: int
    event: AttemptEvent


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint."""

    attempt: int
    step: int
    key: str
    """Key of the directory in the object store."""
    size: int
    """Bytes of all files."""
    sha256: str
    """SHA-256 digest of the manifest."""
    created_at: float
    """Unix seconds."""
    held_out_kl: float | None = None
    """Held-out KL of the checkpoint, in nats; None if it was not measured."""


MAX_LOG_BYTES = 16 << 20


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A checkpoint's directory; sorts by step, then attempt."""

    step: int
    attempt: int
    key: str


class AttemptStore:
    """Objects of attempts, by job and attempt. Every method raises `StorageError` if the store fails. `max_log_bytes`:
    size of a saved log, of which the middle is left out."""

    def __init__(self, store: ObjectStore, *, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._store = store
        self._max_log_bytes = max_log_bytes

    def write_request(self, request: AttemptRequest) -> None:
        """Write an attempt's request, replacing an earlier one."""
        self._store.put_bytes(request.attempt_id.request_key, request.to_json())

    def read_request(self, attempt: AttemptId) -> AttemptRequest:
        """Return an attempt's request. Raises `ObjectNotFoundError`, or `ProtocolError` for an incompatible version."""
        data = self._store.get_bytes(attempt.request_key)
        try:
            return AttemptRequest.model_validate_json(data)
        except ValidationError as error:
            field, message = describe_unknown_field(error)
            raise ProtocolError(message, field=field) from error

    def request_pause(self, attempt: AttemptId) -> None:
        """Request a checkpoint and the end of the attempt. Idempotent."""
        self._store.put_bytes(attempt.pause_key, b"{}")

    def is_pause_requested(self, attempt: AttemptId) -> bool:
        """Whether `request_pause` was called for the attempt."""
        return self._store.head(attempt.pause_key) is not None

    def announce_preemption(self, attempt: AttemptId) -> None:
        """Request a checkpoint and the end of the attempt's workers before their machines are preempted."""
        self._store.put_bytes(attempt.preempt_key, b"{}")

    def is_preemption_announced(self, attempt: AttemptId) -> bool:
        """Whether `announce_preemption` was called for the attempt."""
        return self._store.head(attempt.preempt_key) is not None

    def read_events(
        self, attempt: AttemptId, cursor: Mapping[str, int], max_events: int | None = None, poll: int | None = None
    ) -> list[StoredEvent]:
        """Return events after `cursor` (writer -> last sequence read), merged by time, in each writer's order.

        A writer's events are returned up to the first missing number. An invalid event becomes a warning.

        Args:
            max_events: max events to read; writers that sort first come first.
            poll: number of the poll. A poll lists one page, which is enough for most attempts. For others, polls list
                different parts, every second poll that of the busiest writer. None: list everything.
        """
        parts, listed = _split_unread_keys(attempt, cursor), None
        if poll is not None:
            parts, listed = [_choose_key_range(parts, poll)], _KEYS_PER_LIST
        keys: dict[str, list[str]] = {}
        left = max_events
        for part in parts:
            for writer, key in islice(_list_unread_events(self._store, attempt, part, cursor, listed), left):
                keys.setdefault(writer, []).append(key)
            left = None if max_events is None else max_events - sum(map(len, keys.values()))
        return self._read_and_merge(keys, cursor)

    def _read_and_merge(self, keys: Mapping[str, Sequence[str]], cursor: Mapping[str, int]) -> list[StoredEvent]:
        """Read the events at these keys (by writer) in parallel, and merge them by time."""
        flat = [key for own in keys.values() for key in own]
        events = map(self._read_event, flat) if len(flat) < 2 else self._readers.map(self._read_event, flat)
        streams = [
            [StoredEvent(writer, number, next(events)) for number, _ in enumerate(own, cursor.get(writer, 0) + 1)]
            for writer, own in keys.items()
        ]
        return list(heapq.merge(*streams, key=lambda stored: stored.event.time))

    def _read_event(self, key: str) -> AttemptEvent:
        try:
            data = read_small_object(self._store, key, EVENT_BYTES.default)
        except UnusableFileError as error:
            return MessageEvent(time=time.time(), level="warn", message=f"event {key!r} {error}")
        return parse_event(data, name=key, now=time.time())

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="events")

    def discard_inputs(self, job_id: str) -> None:
        """Delete prepared rows, teacher answers, calibrated starts and partial evaluations of an ended job."""
        for attempt in self._list_attempts(job_id):
            delete_directory(self._store, attempt.data_prefix)
            self._store.delete_prefix(attempt.answers_prefix)
            self._store.delete_prefix(attempt.starts_prefix)
            self._store.delete_prefix(attempt.evaluation_prefix)

    def discard_trial_checkpoints(self, job_id: str) -> None:
        """Delete all checkpoints of a sweep's trials, after its model is published; reports stay."""
        for trial, attempt in self._list_trial_attempts(job_id):
            self._store.delete_prefix(f"{trial}/{attempt.checkpoints_prefix}")

    def _list_trial_attempts(self, job_id: str) -> Iterator[tuple[str, AttemptId]]:
        """Yield (prefix of a trial, attempt that ran it) of a sweep."""
        for name in self._store.list_directories(trials_prefix(job_id)):
            trial = f"{trials_prefix(job_id)}/{name}"
            for number in self._store.list_directories(f"{trial}/{attempts_prefix(job_id)}"):
                yield trial, AttemptId(job_id, int(number))

    def list_checkpoints(self, job_id: str) -> list[StoredCheckpoint]:
        """Return the complete checkpoints of all attempts, ordered by step, then attempt."""
        return self.read_checkpoints(self.list_checkpoint_names(job_id))

    def read_checkpoints(self, names: Iterable[CheckpointName], limit: int | None = None) -> list[StoredCheckpoint]:
        """Return the first `limit` complete checkpoints of these."""
        return list(islice(filter(None, map(self._read_checkpoint, names)), limit))

    def _read_checkpoint(self, name: CheckpointName) -> StoredCheckpoint | None:
        try:
            manifest = read_manifest(self._store, name.key)
        except ObjectNotFoundError:
            return None  # incomplete, or deleted meanwhile
        return StoredCheckpoint(
            attempt=name.attempt,
            step=name.step,
            key=name.key,
            size=manifest.size,
            sha256=hash_manifest(manifest),
            created_at=manifest.created_at,
            held_out_kl=_read_held_out_kl(manifest, name.step),
        )

    def find_newest_checkpoint(self, job_id: str, before_attempt: int | None = None) -> str | None:
        """Return the key of the complete checkpoint with the largest step (and attempt), or None. `before_attempt`:
        only of earlier attempts."""
        return next(self.iterate_complete_checkpoints(job_id, before_attempt), None)

    def iterate_complete_checkpoints(self, job_id: str, before_attempt: int | None = None) -> Iterator[str]:
        """Yield the keys of complete checkpoints, newest first; see `find_newest_checkpoint`."""
        for name in reversed(self.list_checkpoint_names(job_id)):
            if (before_attempt is None or name.attempt < before_attempt) and is_complete(self._store, name.key):
                yield name.key

    def is_superseded(self, attempt: AttemptId) -> bool:
        """Whether a later attempt of the job exists in the store."""
        return any(later.number > attempt.number for later in self._list_attempts(attempt.job_id))

    def list_checkpoint_names(self, job_id: str) -> list[CheckpointName]:
        """Return the checkpoint directories of all attempts in ascending order, complete or not."""
        names: list[CheckpointName] = []
        for attempt in self._list_attempts(job_id):
            prefix = attempt.checkpoints_prefix
            for name in self._store.list_directories(prefix):
                match = _CHECKPOINT_NAME.match(name)
                if match:
                    names.append(CheckpointName(int(match.group(1)), attempt.number, join_object_key(prefix, name)))
        return sorted(names)

    def _list_attempts(self, job_id: str) -> list[AttemptId]:
        """Return the job's attempts with objects in the store."""
        names = self._store.list_directories(attempts_prefix(job_id))
        return [AttemptId(job_id, int(name)) for name in names if name.isdecimal()]

    def list_tracking_files(self, job_id: str) -> dict[str, ObjectInfo]:
        """Return the tracking files of all attempts and trials, by path below `jobs/{id}/`."""
        prefixes = [attempt.tracking_prefix for attempt in self._list_attempts(job_id)]
        prefixes += [f"{trial}/{attempt.tracking_prefix}" for trial, attempt in self._list_trial_attempts(job_id)]
        found = [file for prefix in prefixes for file in self._store.list(prefix)]
        return {file.key.removeprefix(f"jobs/{job_id}/"): file for file in found}

    def read_artifact_manifest(self, attempt: AttemptId) -> Manifest | None:
        """Return the manifest of the attempt's model; None while it is incomplete."""
        return self.read_manifest_at(attempt.artifact_prefix)

    def read_manifest_at(self, prefix: str) -> Manifest | None:
        """Return the manifest of the directory at `prefix`; None while it is incomplete."""
        try:
            return read_manifest(self._store, prefix)
        except ObjectNotFoundError:
            return None

    def get_artifact_uri(self, attempt: AttemptId) -> str:
        """Return the URI of the attempt's model; `fetch_directory(open_store(uri), "", destination)` fetches it."""
        return join_object_key(self._store.uri, attempt.artifact_prefix)

    def save_logs(self, attempt: AttemptId, pieces: Iterable[bytes]) -> None:
        """Save the log of an ended attempt, without its middle if it exceeds `max_log_bytes`."""
        save_log(self._store, attempt.logs_key, pieces, max_bytes=self._max_log_bytes)

    def open_saved_logs(self, attempt: AttemptId) -> SavedLog | None:
        """Return the log saved by `save_logs`; None if there is none."""
        return open_log(self._store, attempt.logs_key)


class EventWriter:
    """Writes the numbered events of one writer of an attempt.

    Only one process at a time may use a writer's name; its successor continues after the last number. If two processes
    use one name, `write` raises `ConflictError` in one of them (on servers with conditional writes; see
    `bucket_store`)."""

    def __init__(self, store: ObjectStore, attempt: AttemptId, writer: str) -> None:
        self._store = store
        self._attempt = attempt
        self._writer = writer
        self._last: int | None = None

    def write(self, event: AttemptEvent) -> int:
        """Store `event` under the next number, with credentials redacted, and return the number."""
        if self._last is None:
            names = (
                info.key.rpartition("/")[2]
                for info in self._store.list(f"{self._attempt.events_prefix}/{self._writer}")
            )
            self._last = max((int(match[1]) for match in map(_EVENT_NAME.fullmatch, names) if match), default=0)
        sequence, self._last = (
            self._last + 1,
            None,
        )  # None: list again after a failure, since the write may have succeeded
        key = self._attempt.event_key(self._writer, sequence)
        self._store.put_bytes(key, redact(event.model_dump_json()).encode(), if_absent=True)
        self._last = sequence
        return sequence


@dataclass(frozen=True)
class _KeyRange:
    """Range of keys with unread events and few read ones."""

    after: str | None = None
    """Key before the first one; None: from the start."""
    before: str | None = None
    """Prefix after the last key; None: to the end."""
    num_read: int = 0
    """Number of already read events of the writer with most events."""


def _split_unread_keys(attempt: AttemptId, cursor: Mapping[str, int]) -> list[_KeyRange]:
    """Split the keys into ranges of about one page that cover all unread events, also of new writers."""
    parts, known = [_KeyRange()], 0
    for writer in sorted(cursor, key=lambda name: f"{name}/"):
        num_read = cursor[writer]
        if known + num_read > _MAX_READ_EVENTS_PER_PART:
            parts[-1] = replace(parts[-1], before=f"{attempt.events_prefix}/{writer}/")
            parts.append(_KeyRange(after=attempt.event_key(writer, num_read)))
            known = 0
        else:
            known += num_read
        parts[-1] = replace(parts[-1], num_read=max(parts[-1].num_read, num_read))
    return parts


def _choose_key_range(parts: Sequence[_KeyRange], poll: int) -> _KeyRange:
    """Return the key range of this poll: for even numbers the range with most events, else the others in rotation."""
    busiest = max(parts, key=lambda part: part.num_read)
    others = [part for part in parts if part is not busiest]
    return busiest if poll % 2 == 0 or not others else others[poll // 2 % len(others)]


def _list_unread_events(
    store: ObjectStore, attempt: AttemptId, part: _KeyRange, cursor: Mapping[str, int], listed: int | None
) -> Iterator[tuple[str, str]]:
    """Yield (writer, key) of the range's events after the cursor, per writer in order up to the first gap. `listed`:
    max keys to list; None: all."""
    seen = dict(cursor)
    start = len(attempt.events_prefix) + 1
    for info in islice(store.list(attempt.events_prefix, start_after=part.after), listed):
        if part.before is not None and info.key >= part.before:
            return
        writer, _, name = info.key[start:].rpartition("/")
        match = _EVENT_NAME.fullmatch(name)
        if match and int(match.group(1)) == seen.get(writer, 0) + 1:
            seen[writer] = seen.get(writer, 0) + 1
            yield writer, info.key


def _read_held_out_kl(manifest: Manifest, step: int) -> float | None:
    """Return a checkpoint's held-out KL; earlier versions stored it only for the best checkpoint."""
    lineage = manifest.lineage
    kl = lineage.get(HELD_OUT_KL, lineage.get("best_kl") if lineage.get("best_step") == step else None)
    return float(kl) if isinstance(kl, int | float) and math.isfinite(kl) else None
