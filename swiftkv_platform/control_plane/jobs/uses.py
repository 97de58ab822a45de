"""Uses of uploaded files, models and other jobs' objects by jobs. They are stored with the job, so that finding the
users of an object does not search specs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.attempts import is_file_id
from swiftkv_platform.control_plane.database.tables import JobRow, UseRow
from swiftkv_platform.control_plane.jobs.job import LIVE
from swiftkv_platform.errors import ConflictError

_MODEL = re.compile(r"mdl_[0-9A-Za-z]{1,36}")
_OBJECT = re.compile(r"jobs/(job_[0-9A-Za-z]{1,36})/")
"""Part of an object's address, in any store."""
_PARENT = re.compile(r"(job_[0-9A-Za-z]{1,36}):")
"""Beginning of the name of a checkpoint that a job continues from."""


def uses_of(spec: Any) -> set[str]:
    """Return the ids of files, models and jobs that a spec names. The spec is a plain document, which this version need
    not be able to parse."""
    found: set[str] = set()
    for text in _texts(spec):
        if is_file_id(text):
            found.add(text)
        found.update(_MODEL.findall(text))
        found.update(_OBJECT.findall(text))
    training = spec.get("training") if isinstance(spec, dict) else None
    if (place := publication_of(spec)) is not None:
        found.add(place)
    parent = training.get("from") if isinstance(training, dict) else None
    if isinstance(parent, str) and (match := _PARENT.match(parent)):
        found.add(match[1])
    return found


def publication_of(spec: Any) -> str | None:
    """Return a digest of the target that a job publishes to, as long as an id; None if it publishes nowhere."""
    publish = spec.get("publish") if isinstance(spec, dict) else None
    place = publish.get("to") if isinstance(publish, dict) else None
    if not isinstance(place, str):
        return None
    place = place.rstrip("/")
    if place.startswith("hf://"):  # names on the hub are not case-sensitive
        place = place.lower()
    return f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}"


def check_publication(session: Session, spec: Any, tenant: str) -> None:
    """Raise `ConflictError` if a job of another tenant publishes to the same target: neither may overwrite the
    other's."""
    place = publication_of(spec)
    if place is None:
        return
    others = select(JobRow.id).join(UseRow, UseRow.job_id == JobRow.id)
    if session.scalar(others.where(UseRow.used == place, JobRow.tenant != tenant).limit(1)) is not None:
        to = spec["publish"]["to"]
        raise ConflictError.of("publish.to", to, ", where another tenant publishes; use another name")


def live_users(session: Session, names: Sequence[str], *, limit: int, without: str = "") -> Sequence[str]:
    """Return the first `limit` ids of unfinished jobs that use one of these. `without`: a job that does not count."""
    users = select(JobRow.id).join(UseRow, UseRow.job_id == JobRow.id)
    users = users.where(UseRow.used.in_(names), JobRow.status.in_(LIVE), JobRow.id != without)
    return session.scalars(users.distinct().order_by(JobRow.id).limit(limit)).all()


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
