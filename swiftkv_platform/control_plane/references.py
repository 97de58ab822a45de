"""References from jobs to uploaded files, models and other jobs' objects. They are stored with the job, so that finding
the jobs that use an object does not search specs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.attempts import is_file_id
from swiftkv_platform.control_plane.database.tables import JobReferenceRow, JobRow
from swiftkv_platform.control_plane.jobs.job import LIVE_STATUSES, JobStatus
from swiftkv_platform.errors import ConflictError

_TARGET_HOLDING_STATUSES = [*LIVE_STATUSES, JobStatus.SUCCEEDED.value]
"""Statuses of jobs whose publish target no other tenant may use."""
_OBJECT_ADDRESS = re.compile(r"(?:^|/)(?:jobs/(job_[0-9A-Za-z]{1,36})|models/(mdl_[0-9A-Za-z]{1,36}))(?=/|$)")
"""Part of the address, in any store, of the objects of a job or of an imported model."""
_PARENT_REFERENCE = re.compile(r"(mdl_[0-9A-Za-z]{1,36})$|(job_[0-9A-Za-z]{1,36}):")
"""`training.from`: a model, or the beginning of the name of a checkpoint."""


def find_references(spec: Any) -> set[str]:
    """Return the ids of files, models and jobs that a spec names as its parent, sources or publish target.

    Ids in other text, such as `metadata`, do not count. The spec is a plain document, which this version need not be
    able to parse.
    """
    found: set[str] = set()
    for name in _list_source_names(spec):
        if is_file_id(name):
            found.add(name)
        found.update(job or model for job, model in _OBJECT_ADDRESS.findall(name))
    parent = _get_part(spec, "training", "from")
    if isinstance(parent, str) and (match := _PARENT_REFERENCE.match(parent)):
        found.add(match[1] or match[2])
    if (place := hash_publish_target(spec)) is not None:
        found.add(place)
    return found


def hash_publish_target(spec: Any) -> str | None:
    """Return a digest, as long as an id, of the target that a job publishes to; None without a target."""
    place = _get_part(spec, "publish", "to")
    if not isinstance(place, str):
        return None
    place = place.rstrip("/")
    if place.startswith("hf://"):  # names on the hub are not case-sensitive
        place = place.lower()
    return f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}"


def check_publication(session: Session, spec: Any, tenant: str) -> None:
    """Raise `ConflictError` if a job of another tenant publishes, or has published, to the same target: neither may
    overwrite the other's. A job that failed or was cancelled holds no target."""
    place = hash_publish_target(spec)
    if place is None:
        return
    others = select(JobRow.id).join(JobReferenceRow, JobReferenceRow.job_id == JobRow.id)
    others = others.where(
        JobReferenceRow.used == place, JobRow.tenant != tenant, JobRow.status.in_(_TARGET_HOLDING_STATUSES)
    )
    if session.scalar(others.limit(1)) is not None:
        to = spec["publish"]["to"]
        raise ConflictError.for_field("publish.to", to, ", where another tenant publishes; use another name")


def find_referencing_jobs(
    session: Session, names: Sequence[str], *, tenant: str, limit: int, without: str = ""
) -> Sequence[str]:
    """Return the first `limit` ids of the tenant's unfinished jobs that use one of these objects of the tenant.

    `without`: a job that does not count.
    """
    named = select(JobReferenceRow.job_id).where(JobReferenceRow.used.in_(names))
    jobs = select(JobRow.id).where(
        JobRow.id.in_(named), JobRow.tenant == tenant, JobRow.status.in_(LIVE_STATUSES), JobRow.id != without
    )

    def references_object(job_id: str) -> bool:
        # Rows of earlier versions also name ids that other text of a spec holds, so the spec decides.
        spec = session.scalar(select(JobRow.spec).where(JobRow.id == job_id))
        return not find_references(spec).isdisjoint(names)

    return list(islice(filter(references_object, session.scalars(jobs.order_by(JobRow.id)).all()), limit))


def _list_source_names(spec: Any) -> Iterator[str]:
    """Yield the names of the models, data sets and tasks that a spec reads."""
    yield from _filter_strings(_get_part(spec, "model", "name_or_path"))
    for source in _as_list(_get_part(spec, "data", "sources")):
        yield from _filter_strings(source.get("name_or_path") if isinstance(source, dict) else None)
    for task in _as_list(_get_part(spec, "evaluation", "tasks")):
        yield from _filter_strings(*((task.get("name"), task.get("data_dir")) if isinstance(task, dict) else (task,)))


def _get_part(spec: Any, section: str, name: str) -> Any:
    found = spec.get(section) if isinstance(spec, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _filter_strings(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))
