"""An index for every foreign key: each row that retention removes is looked for in the tables that refer to it."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

_INDEXES = (
    ("deliveries", "event_id"),
    ("deployments", "model"),
    ("idempotency_keys", "job_id"),
    ("promotions", "model"),
)


def upgrade() -> None:
    for table, column in _INDEXES:
        op.create_index(f"ix_{table}_{column}", table, [column])


def downgrade() -> None:
    for table, column in _INDEXES:
        op.drop_index(f"ix_{table}_{column}", table_name=table)
