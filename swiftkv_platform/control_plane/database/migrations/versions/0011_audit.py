"""Last uses of keys, and the audit trail."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "key_uses",
        sa.Column("key_id", sa.String(40), nullable=False),
        sa.Column("last_used_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_key_uses"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.Column("actor", sa.String(200), nullable=True),
        sa.Column("credential", sa.String(300), nullable=True),
        sa.Column("tenant", sa.String(64), nullable=True),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("route", sa.String(200), nullable=False),
        sa.Column("object", sa.String(200), nullable=True),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("left_out", sa.Integer(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_created_at", "audit", ["created_at"])
    op.create_index("ix_audit_tenant_id", "audit", ["tenant", "id"])
    op.create_index("ix_audit_object_id", "audit", ["object", "id"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("key_uses")
