"""Uses of uploaded files, models and other jobs' objects by jobs, written when a job is stored: nothing looks through
specs to know who uses a thing.
"""

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
"""Part of an object's address, wherever the store is."""
_PARENT = re.compile(r"(job_[0-9A-Za-z]{1,36}):")
"""Beginning of the name of a checkpoint that a job continues from."""


def uses_of(spec: Any) -> set[str]:
    """Ids of files, models and jobs that a spec names, as a document: one that this version cannot read names them
    too."""
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
    """Name of the place that a job publishes to, as long as an id; None where it publishes nowhere."""
    publish = spec.get("publish") if isinstance(spec, dict) else None
    place = publish.get("to") if isinstance(publish, dict) else None
    if not isinstance(place, str):
        return None
    place = place.rstrip("/")
    if place.startswith("hf://"):  # whose names differ in more than case
        place = place.lower()
    return f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}"


def check_publication(session: Session, spec: Any, tenant: str) -> None:
    """Raises `ConflictError` where jobs of another tenant publish: neither may write over the other's."""
    place = publication_of(spec)
    if place is None:
        return
    others = select(JobRow.id).join(UseRow, UseRow.job_id == JobRow.id)
    if session.scalar(others.where(UseRow.used == place, JobRow.tenant != tenant).limit(1)) is not None:
        to = spec["publish"]["to"]
        raise ConflictError(
            f"publish.to is {to!r}, where another tenant publishes; use another name", field="publish.to", value=to
        )


def live_users(session: Session, names: Sequence[str], *, limit: int, without: str = "") -> Sequence[str]:
    """Ids of jobs that have not ended and use one of these, the first ones. `without`: a job that does not count."""
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
