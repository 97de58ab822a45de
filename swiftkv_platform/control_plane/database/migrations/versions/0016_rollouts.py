"""Rollouts of jobs' models to deployments."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", name="fk_rollouts_job_id"), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("deployment", sa.String(40), nullable=False),
        sa.Column("model", sa.String(40), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("state", sa.JSON().with_variant(JSONB(), "postgresql"), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_status", "rollouts", ["status"])
    op.create_index("ix_rollouts_tenant_deployment_job_id", "rollouts", ["tenant", "deployment", "job_id"])


def downgrade() -> None:
    op.drop_table("rollouts")
