"""Captured traffic in every kind of object store."""

import gzip
from collections.abc import Iterator, Sequence

import pytest
from pydantic import ValidationError

from swiftkv_platform.contract.traffic import (
    MAX_WRITE_DELAY_S,
    CapturedRequest,
    TrafficDeletion,
    format_utc_day,
    make_part_key,
    make_traffic_prefix,
    strip_response_id_prefix,
)
from swiftkv_platform.errors import InvalidInputError, OverloadedError, StorageError
from swiftkv_platform.storage import traffic as traffic_module
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.storage.traffic import WRITE_TOLERANCE_S, TrafficReader, TrafficStore, encode_row

PREFIX = make_traffic_prefix("acme", "dep_1")
DAY_S = 86400.0
NOON = 20_000 * DAY_S + DAY_S / 2
"""Noon of a day, in Unix seconds."""


class Clock:
    """Sets the creation time of new parts, in Unix seconds."""

    now = NOON


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ulid.time.time_ns", lambda: int(clock.now * 1e9))
    return clock


@pytest.fixture
def traffic(store: ObjectStore) -> TrafficStore:
    return TrafficStore(store, PREFIX)


def make_row(number: int, time: float, *, user: str | None = None) -> CapturedRequest:
    return CapturedRequest(
        id=f"r{number}",
        time=time,
        path="/v1/completions",
        model="mdl_1",
        user=user,
        prompt=f"prompt {number}",
        completion="Äpfel",
        finish_reason="stop",
        prompt_tokens=2,
        completion_tokens=3,
    )


def write_part(traffic: TrafficStore, clock: Clock, rows: Sequence[CapturedRequest], *, delay_s: float = 10.0) -> None:
    clock.now = rows[-1].time + delay_s
    traffic.write_part(map(encode_row, rows), name=make_part_key(format_utc_day(rows[-1].time)))


def list_ids(rows: Iterator[CapturedRequest]) -> list[str]:
    return [row.id for row in rows]


def read_all_pages(traffic: TrafficReader, limit: int, **filters: object) -> list[str]:
    ids: list[str] = []
    page = traffic.read_page(limit=limit, **filters)  # type: ignore[arg-type]
    while page.next is not None:
        ids += [row.id for row in page.rows]
        page = traffic.read_page(limit=limit, after=page.next, **filters)  # type: ignore[arg-type]
    return ids + [row.id for row in page.rows]


def test_rows_come_back_in_the_order_of_their_parts(traffic: TrafficStore, clock: Clock, store: ObjectStore) -> None:
    rows = [make_row(number, NOON + 3600.0 * number) for number in range(30)]  # until the next evening
    for first in range(0, 30, 4):
        for day in sorted({format_utc_day(row.time) for row in rows[first : first + 4]}):
            write_part(traffic, clock, [row for row in rows[first : first + 4] if format_utc_day(row.time) == day])
    TrafficStore(store, make_traffic_prefix("acme", "dep_10")).write_part(
        [encode_row(make_row(99, NOON))], name=make_part_key(format_utc_day(NOON))
    )
    assert [*traffic.iterate_rows()] == rows
    assert [*traffic.iterate_rows(since=rows[5].time, until=rows[20].time)] == rows[5:20]
    assert [*traffic.iterate_rows(since=rows[29].time + 1)] == []
    assert [day.day for day in traffic.list_days()] == [format_utc_day(NOON), format_utc_day(NOON + DAY_S)]
    assert sum(day.bytes for day in traffic.list_days()) == sum(info.size for info in store.list(PREFIX))


def test_a_window_reads_no_parts_that_can_have_no_rows_in_it(traffic: TrafficStore, clock: Clock) -> None:
    for number in range(24):
        write_part(traffic, clock, [make_row(number, NOON + 300.0 * number)], delay_s=MAX_WRITE_DELAY_S)
    since, until = NOON + 3000.0, NOON + 3600.0
    assert list_ids(traffic.iterate_rows(since=since, until=until)) == ["r10", "r11"]
    assert len([*traffic.list_parts(since=since, until=until)]) <= 4


def test_pages_show_the_newest_rows_first(traffic: TrafficStore, clock: Clock) -> None:
    rows = [make_row(number, NOON + 10_000.0 * (number // 3), user=f"u{number % 2}") for number in range(24)]
    assert traffic.read_page(limit=1).next is None
    for first in range(0, 24, 3):
        write_part(traffic, clock, rows[first : first + 3])
    newest = [row.id for row in sorted(rows, key=lambda row: (row.time, row.id), reverse=True)]
    for limit in (1, 2, 5, 24, 100):
        assert read_all_pages(traffic, limit) == newest
    assert read_all_pages(traffic, 2, user="u1") == [each for each in newest if int(each[1:]) % 2]
    assert read_all_pages(traffic, 2, since=rows[3].time, until=rows[9].time) == [
        each for each in newest if 3 <= int(each[1:]) < 9
    ]


def test_a_page_reads_a_bounded_number_of_parts(
    traffic: TrafficStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        write_part(traffic, clock, [make_row(number, NOON + number, user="a" if number == 0 else "b")])
    monkeypatch.setattr(traffic_module, "_MAX_PARTS_PER_PAGE", 3)
    first = traffic.read_page(limit=10, user="a")
    assert first.rows == []
    assert first.next is not None
    assert read_all_pages(traffic, 10, user="a") == ["r0"]
    monkeypatch.setattr(traffic_module, "_MAX_BYTES_PER_PAGE", 1)
    assert len(traffic.read_page(limit=10).rows) == 1
    assert read_all_pages(traffic, 10) == [f"r{number}" for number in reversed(range(7))]


@pytest.mark.parametrize("cursor", ["x", "", "2026-01-01", "2026-01-01/x", f"2026-01-01/{'0' * 26}.jsonl.gz/now/r1"])
def test_an_unknown_cursor_is_refused(traffic: TrafficStore, cursor: str) -> None:
    with pytest.raises(InvalidInputError, match="after is") as caught:
        traffic.read_page(limit=1, after=cursor)
    assert caught.value.field == "after"


def test_a_page_continues_after_any_id(traffic: TrafficStore, clock: Clock) -> None:
    ids = ["a/b", "a\nb", "a/1.5/é?&", "a"]
    rows = [make_row(0, NOON + number).model_copy(update={"id": each}) for number, each in enumerate(ids)]
    write_part(traffic, clock, rows)
    assert read_all_pages(traffic, 1) == ids[::-1]


def test_a_page_continues_after_rows_that_were_deleted_meanwhile(traffic: TrafficStore, clock: Clock) -> None:
    write_part(traffic, clock, [make_row(number, NOON + number) for number in range(6)])
    page = traffic.read_page(limit=2)
    traffic.delete(TrafficDeletion(requested_at=NOON + 100, request_id="r4"))
    assert sum(part.rows for part in traffic.apply_deletions(NOON + 1000)) == 1
    assert [row.id for row in traffic.read_page(limit=2, after=page.next).rows] == ["r3", "r2"]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ({"request_id": "r2"}, [0, 1, 3, 4, 5]),
        ({"user": "u1"}, [0, 2, 4]),
        ({"before": NOON + 3}, [3, 4, 5]),
        ({"user": "u1", "before": NOON + 3}, [0, 2, 3, 4, 5]),
        ({"request_id": "r2", "user": "u1"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_deletion_hides_rows_at_once_and_removes_them_later(
    traffic: TrafficStore, clock: Clock, store: ObjectStore, condition: dict[str, object], kept: list[int]
) -> None:
    rows = [make_row(number, NOON + number, user=f"u{number % 2}") for number in range(6)]
    write_part(traffic, clock, rows[:3])
    write_part(traffic, clock, rows[3:])
    expected = [f"r{number}" for number in kept]
    traffic.delete(TrafficDeletion.model_validate({"requested_at": NOON + 100, **condition}))
    assert list_ids(traffic.iterate_rows()) == expected
    assert read_all_pages(traffic, 4) == expected[::-1]
    # a replica may still write rows of earlier requests
    assert [*traffic.apply_deletions(NOON + 100 + MAX_WRITE_DELAY_S)] == []
    assert len(traffic.list_deletions()) == 1
    amounts = [*traffic.apply_deletions(NOON + 101 + MAX_WRITE_DELAY_S + WRITE_TOLERANCE_S)]
    assert sum(amount.rows for amount in amounts) == 6 - len(kept)
    assert traffic.list_deletions() == {}
    assert list_ids(traffic.iterate_rows()) == expected
    stored = b"".join(gzip.decompress(store.get_bytes(info.key)) for info in store.list(PREFIX))
    assert sorted(line.split(b'"')[3].decode() for line in stored.splitlines()) == expected


def test_a_deletion_also_removes_rows_that_are_stored_after_it(traffic: TrafficStore, clock: Clock) -> None:
    requested_at = NOON + 1
    traffic.delete(TrafficDeletion(requested_at=requested_at, user="u"))
    late = [make_row(1, NOON, user="u"), make_row(2, NOON + 2, user="u")]
    write_part(traffic, clock, late, delay_s=MAX_WRITE_DELAY_S)
    assert list_ids(traffic.iterate_rows()) == ["r2"]
    assert sum(part.rows for part in traffic.apply_deletions(NOON + 1000)) == 1
    assert list_ids(traffic.iterate_rows()) == ["r2"]


def test_a_deletion_by_id_also_removes_a_request_that_ends_later(traffic: TrafficStore, clock: Clock) -> None:
    """A stream tells its id first, and clocks differ."""
    traffic.delete(TrafficDeletion(requested_at=NOON, request_id="r1"))
    write_part(traffic, clock, [make_row(1, NOON + 5), make_row(2, NOON + 5)], delay_s=MAX_WRITE_DELAY_S)
    assert list_ids(traffic.iterate_rows()) == ["r2"]
    assert sum(part.rows for part in traffic.apply_deletions(NOON + 1000)) == 1
    assert list_ids(traffic.iterate_rows()) == ["r2"]


def test_an_id_of_nothing_but_a_prefix_names_no_other_request(traffic: TrafficStore, clock: Clock) -> None:
    rows = [make_row(number, NOON + number).model_copy(update={"id": each}) for number, each in enumerate("ab")]
    write_part(traffic, clock, rows)
    for response_id in ("chatcmpl-", "cmpl-", "resp_", "msg_", "gen_"):
        traffic.delete(TrafficDeletion(requested_at=NOON + 100, request_id=strip_response_id_prefix(response_id)))
    with pytest.raises(ValidationError, match="at least 1 character"):
        TrafficDeletion(requested_at=NOON + 100, request_id="")
    assert list_ids(traffic.iterate_rows()) == ["a", "b"]


def test_deleting_all_rows_of_a_part_removes_the_part(traffic: TrafficStore, clock: Clock, store: ObjectStore) -> None:
    write_part(traffic, clock, [make_row(1, NOON)])
    size = traffic.list_days()[0].bytes
    traffic.delete(TrafficDeletion(requested_at=NOON + 1, before=NOON + 1))
    assert sum(part.bytes for part in traffic.apply_deletions(NOON + 1000)) == size
    assert [*store.list(PREFIX)] == []


def test_an_interrupted_deletion_is_finished_by_the_next_run(traffic: TrafficStore, clock: Clock) -> None:
    for number in range(4):
        write_part(traffic, clock, [make_row(number, NOON + number, user="u"), make_row(9, NOON + number)])
    traffic.delete(TrafficDeletion(requested_at=NOON + 100, user="u"))
    steps = traffic.apply_deletions(NOON + 1000)
    assert next(steps).rows == next(steps).rows == 1
    steps.close()  # type: ignore[attr-defined]
    assert len(traffic.list_deletions()) == 1
    assert sum(part.rows for part in traffic.apply_deletions(NOON + 1000)) == 2
    assert list_ids(traffic.iterate_rows()) == ["r9"] * 4


def test_the_number_of_pending_deletions_is_bounded(traffic: TrafficStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "MAX_PENDING_DELETIONS", 2)
    for number in range(2):
        traffic.delete(TrafficDeletion(requested_at=NOON, request_id=f"r{number}"))
    with pytest.raises(OverloadedError, match="2 deletions of captured traffic are pending"):
        traffic.delete(TrafficDeletion(requested_at=NOON, request_id="r3"))


def test_old_days_and_then_the_oldest_parts_beyond_the_size_limit_expire(traffic: TrafficStore, clock: Clock) -> None:
    for number in range(10):
        write_part(traffic, clock, [make_row(number, NOON + number * DAY_S / 2)])
    parts = [*traffic.list_parts()]
    now = NOON + 5 * DAY_S
    total = sum(part.size for part in parts)
    expired = [*traffic.list_expired_parts(now=now, retention_days=2, max_bytes=total)]
    assert [part.day for part in expired] == [part.day for part in parts if part.day < format_utc_day(now - 2 * DAY_S)]
    assert 0 < len(expired) < 10
    assert [*traffic.list_expired_parts(now=now, retention_days=30, max_bytes=total)] == []
    kept_bytes = sum(part.size for part in parts[-3:])
    assert [*traffic.list_expired_parts(now=now, retention_days=30, max_bytes=kept_bytes)] == parts[:-3]
    assert [*traffic.list_expired_parts(now=now, retention_days=30, max_bytes=kept_bytes - 1)] == parts[:-2]


@pytest.mark.parametrize("fault", ["cut line", "cut gzip", "no gzip", "other row", "other name", "bit"])
def test_an_invalid_object_is_an_error_that_names_it(
    traffic: TrafficStore, clock: Clock, store: ObjectStore, fault: str
) -> None:
    write_part(traffic, clock, [make_row(number, NOON + number) for number in range(100)])
    [part] = traffic.list_parts()
    data = store.get_bytes(part.key)
    key = part.key.replace(".jsonl.gz", ".json") if fault == "other name" else part.key
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0xFF
    content = {
        "cut line": gzip.compress(gzip.decompress(data)[:-20]),
        "cut gzip": data[: len(data) // 2],
        "no gzip": b"plain text",
        "other row": gzip.compress(b'{"id": "r1", "time": "a secret"}\n'),
        "other name": data,
        "bit": bytes(flipped),
    }[fault]
    store.put_bytes(key, content)
    with pytest.raises(StorageError, match=key) as caught:
        [*traffic.iterate_rows()]
    assert "secret" not in caught.value.message
    with pytest.raises(StorageError, match=key):
        read_all_pages(traffic, 10)
    traffic.delete(TrafficDeletion(requested_at=NOON + 200, user="u"))
    with pytest.raises(StorageError, match=key):
        [*traffic.apply_deletions(NOON + 1000)]
    assert len(traffic.list_deletions()) == 1


def test_an_invalid_deletion_is_an_error_that_names_it(traffic: TrafficStore, store: ObjectStore) -> None:
    traffic.delete(TrafficDeletion(requested_at=NOON, user="u"))
    [key] = traffic.list_deletions()
    store.put_bytes(key, b"{}")
    with pytest.raises(StorageError, match=key):
        [*traffic.iterate_rows()]


def test_a_part_that_is_removed_while_it_is_read_has_no_rows(traffic: TrafficStore, clock: Clock) -> None:
    write_part(traffic, clock, [make_row(1, NOON)])
    write_part(traffic, clock, [make_row(2, NOON + 1)])
    rows = traffic.iterate_rows()
    assert next(rows).id == "r1"
    traffic.delete(TrafficDeletion(requested_at=NOON + 10, before=NOON + 10))
    assert sum(part.rows for part in traffic.apply_deletions(NOON + 1000)) == 2
    assert list_ids(rows) == []
