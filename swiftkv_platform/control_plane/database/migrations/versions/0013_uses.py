"""Table of the files, models and jobs that a job reads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from swiftkv_platform.control_plane.jobs.uses import publication_of, uses_of

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_FINAL = ("succeeded", "failed", "cancelled")
_JOBS = sa.table("jobs", sa.column("id", sa.String()), sa.column("status", sa.String()), sa.column("spec", sa.JSON()))
_USES = sa.table("uses", sa.column("used", sa.String()), sa.column("job_id", sa.String()))


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
    """Note the uses of jobs that have not ended, and of others where they publish; the rest of theirs holds nothing."""
    for job_id, status in connection.execute(sa.select(_JOBS.c.id, _JOBS.c.status)).all():
        # One at a time: specs may be long.
        spec = connection.scalar(sa.select(_JOBS.c.spec).where(_JOBS.c.id == job_id))
        found = {publication_of(spec)} - {None} if status in _FINAL else uses_of(spec)
        if rows := [{"used": used, "job_id": job_id} for used in found]:
            connection.execute(sa.insert(_USES), rows)


def downgrade() -> None:
    op.drop_table("uses")
