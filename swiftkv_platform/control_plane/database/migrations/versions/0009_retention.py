"""End times of jobs and what retention has swept of them; deleted prefixes that still have objects in the store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_JOBS = sa.table("jobs", sa.column("finished_at", sa.BigInteger()), sa.column("state", sa.JSON()))


def upgrade() -> None:
    op.add_column("jobs", sa.Column("finished_at", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("swept", sa.Integer(), nullable=False, server_default="0"))
    op.execute(sa.update(_JOBS).values(finished_at=_JOBS.c.state["finished_at"].as_integer()))
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"])
    op.create_table(
        "deletions",
        sa.Column("prefix", sa.String(200), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("prefix", name="pk_deletions"),
    )


def downgrade() -> None:
    op.drop_table("deletions")
    op.drop_index("ix_jobs_finished_at", table_name="jobs")
    op.drop_column("jobs", "swept")
    op.drop_column("jobs", "finished_at")
