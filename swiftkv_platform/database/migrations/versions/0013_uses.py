"""Table of the files, models and jobs that a job reads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from swiftkv_platform.database.uses import uses_of

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
    """Note the uses of jobs that have not ended; those of others hold nothing."""
    ids = connection.scalars(sa.select(_JOBS.c.id).where(_JOBS.c.status.not_in(_FINAL))).all()
    for job_id in ids:  # one at a time: specs may be long
        spec = connection.scalar(sa.select(_JOBS.c.spec).where(_JOBS.c.id == job_id))
        if rows := [{"used": used, "job_id": job_id} for used in sorted(uses_of(spec))]:
            connection.execute(sa.insert(_USES), rows)


def downgrade() -> None:
    op.drop_table("uses")
