"""Contract of a database for leases: SQLite and PostgreSQL alike."""

from __future__ import annotations

import threading

from swiftkv_platform.database.leases import SqlLeases
from swiftkv_platform.database.session import Database


def test_a_lease_is_held_by_one_until_it_runs_out_or_is_given_up(database: Database) -> None:
    leases = SqlLeases(database)
    assert leases.take("jobs", "a", now=100.0, until=105.0)
    assert leases.take("deployments", "b", now=100.0, until=105.0)
    assert not leases.take("jobs", "b", now=104.0, until=109.0)
    assert leases.take("jobs", "a", now=104.0, until=109.0), "renewed"
    assert not leases.take("jobs", "b", now=108.0, until=113.0)
    assert leases.take("jobs", "b", now=109.0, until=114.0), "run out"
    leases.give_up("jobs", "a")
    assert not leases.take("jobs", "a", now=110.0, until=115.0), "not its own to give up"
    leases.give_up("jobs", "b")
    assert leases.take("jobs", "a", now=110.0, until=115.0)


def test_of_many_who_want_a_lease_at_once_one_gets_it(database: Database) -> None:
    leases, start_line = SqlLeases(database), threading.Barrier(8)
    taken: list[str] = []

    def take(holder: str) -> None:
        start_line.wait()
        if leases.take("jobs", holder, now=100.0, until=105.0):
            taken.append(holder)

    threads = [threading.Thread(target=take, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
