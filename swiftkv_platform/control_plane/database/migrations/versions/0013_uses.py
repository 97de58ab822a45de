"""Table of the files, models and jobs that a job reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_FINAL = ("succeeded", "failed", "cancelled")
_JOBS = sa.table("jobs", sa.column("id", sa.String()), sa.column("status", sa.String()), sa.column("spec", sa.JSON()))
_USES = sa.table("uses", sa.column("used", sa.String()), sa.column("job_id", sa.String()))
_NAMED = re.compile(r"mdl_[0-9A-Za-z]{1,36}|(?<=jobs/)job_[0-9A-Za-z]{1,36}(?=/)|\Afile-[0-7][0-9A-HJKMNP-TV-Z]{25}\Z")
"""Models, jobs by the addresses of their objects, and uploaded files, as specs named them at this revision."""
_PARENT = re.compile(r"(job_[0-9A-Za-z]{1,36}):")


def upgrade() -> None:
    op.create_table(
        "uses",
        sa.Column("used", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_uses_job_id"),
        sa.PrimaryKeyConstraint("used", "job_id", name="pk_uses"),
    )
    op.create_index("ix_uses_job_id", "uses", ["job_id"])
    _fill(op.get_bind())


def _fill(connection: sa.Connection) -> None:
    """Store the uses of unfinished jobs, and the publication of finished ones, whose other uses protect nothing."""
    for job_id, status in connection.execute(sa.select(_JOBS.c.id, _JOBS.c.status)).all():
        # One at a time: specs may be long.
        spec = connection.scalar(sa.select(_JOBS.c.spec).where(_JOBS.c.id == job_id))
        found = _publication(spec) if status in _FINAL else _uses(spec)
        if rows := [{"used": used, "job_id": job_id} for used in found]:
            connection.execute(sa.insert(_USES), rows)


def _uses(spec: Any) -> set[str]:
    """Return the ids in a spec, which need not be valid in any version."""
    found = _publication(spec).union(*(_NAMED.findall(text) for text in _texts(spec)))
    parent = _part(spec, "training", "from")
    if isinstance(parent, str) and (match := _PARENT.match(parent)):
        found.add(match[1])
    return found


def _publication(spec: Any) -> set[str]:
    place = _part(spec, "publish", "to")
    if not isinstance(place, str):
        return set()
    place = place.rstrip("/")
    place = place.lower() if place.startswith("hf://") else place
    return {f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}"}


def _part(spec: Any, section: str, name: str) -> Any:
    found = spec.get(section) if isinstance(spec, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list):
            pending += item.values() if isinstance(item, dict) else item


def downgrade() -> None:
    op.drop_table("uses")
