"""An index for a tenant's jobs by status: filtered lists, and the count that a quota needs at every submission."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_index("ix_jobs_tenant_status_id", "jobs", ["tenant", "status", "id"])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_status_id", table_name="jobs")
