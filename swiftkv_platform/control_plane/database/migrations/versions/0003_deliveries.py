"""Deliveries: the webhooks' outbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"

_DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "deliveries",
        sa.Column("sequence", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("event_id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("webhook", _DOCUMENT, nullable=False),
        sa.Column("url", sa.String(500), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("not_before", sa.Float(53), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("delivered_at", sa.Float(53), nullable=True),
        sa.ForeignKeyConstraint(["event_id"], ["events.id"], name="fk_deliveries_event_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deliveries_job_id"),
        sa.PrimaryKeyConstraint("sequence", name="pk_deliveries"),
    )
    op.create_index("ix_deliveries_status_not_before", "deliveries", ["status", "not_before"])
    op.create_index("ix_deliveries_job_id_sequence", "deliveries", ["job_id", "sequence"])


def downgrade() -> None:
    op.drop_table("deliveries")
