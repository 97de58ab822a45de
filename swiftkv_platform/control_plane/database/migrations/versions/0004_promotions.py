"""Promotions: the model of each alias, and its history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "promotions",
        sa.Column("sequence", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(32), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("model", sa.String(40), nullable=False),
        sa.Column("previous", sa.String(40), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("by", sa.String(200), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_promotions_model"),
        sa.PrimaryKeyConstraint("sequence", name="pk_promotions"),
    )
    op.create_index("ix_promotions_tenant_alias_sequence", "promotions", ["tenant", "alias", "sequence"])


def downgrade() -> None:
    op.drop_table("promotions")
