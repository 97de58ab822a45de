"""Check of the clock against those that have to agree with it: S3 refuses signatures of another time, and control
planes take turns by the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import httpx

from swiftkv_platform.cli.doctor.database import session_on_server
from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line, worst
from swiftkv_platform.errors import SwiftKVError

_S3 = "https://s3.amazonaws.com"
_SIGNATURE_S = 15 * 60
"""Seconds by which the time of a signature may differ."""
_TURNS_S = 1.0
"""Seconds within which the clocks of control planes should agree."""
_NTP = "let the machine take its time from the network: timedatectl set-ntp true"


def examine_clock(surroundings: Surroundings) -> Finding:
    """Compare with the object store's and the database's clock, where they are other machines'."""
    found = list(_compared(surroundings))
    return worst(found) if found else Finding("ok", "Nothing on another machine has to agree with it.")


def _compared(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    if settings.resolved_storage_uri.startswith("s3://"):
        yield _of_store(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _S3)
    if settings.resolved_database_url.startswith("postgresql"):
        yield _of_database(settings.resolved_database_url, surroundings.timeout_s)


def _of_store(endpoint: str) -> Finding:
    try:
        stamp = httpx.head(endpoint, timeout=5.0).headers.get("Date")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return _unknown(f"{endpoint} does not answer: {one_line(error)}")
    if stamp is None:
        return Finding("ok", f"{endpoint} does not tell its time")
    return _judged(endpoint, time.time() - parsedate_to_datetime(stamp).timestamp(), 60.0, _SIGNATURE_S)


def _of_database(url: str, timeout_s: float) -> Finding:
    from sqlalchemy import make_url, text

    try:
        with session_on_server(make_url(url), timeout_s) as session:
            asked = time.time()
            theirs = float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
            middle = (asked + time.time()) / 2
    except SwiftKVError as error:
        return _unknown(one_line(error))
    return _judged("the database", middle - theirs, _TURNS_S, float("inf"))


def _judged(whose: str, difference: float, tolerated: float, most: float) -> Finding:
    message = f"This clock and that of {whose} differ by {abs(difference):.1f} s"
    if abs(difference) <= tolerated:
        return Finding("ok", message)
    return Finding("failed" if abs(difference) > most else "warning", message, _NTP)


def _unknown(why: str) -> Finding:
    """Where a server does not answer, another check has said so."""
    return Finding("ok", f"Not compared: {why}")
