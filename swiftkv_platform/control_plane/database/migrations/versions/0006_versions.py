"""Versions of deployments and aliases, so that concurrent changes can be told from each other."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_NUMBER_PROMOTIONS = """
UPDATE promotions SET version = (
    SELECT count(*) FROM promotions AS earlier
    WHERE earlier.tenant = promotions.tenant
      AND earlier.alias = promotions.alias
      AND earlier.sequence <= promotions.sequence
)
"""


def upgrade() -> None:
    op.add_column("deployments", sa.Column("version", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("promotions", sa.Column("version", sa.Integer(), nullable=False, server_default="0"))
    op.execute(_NUMBER_PROMOTIONS)
    op.create_index("ix_promotions_tenant_alias_version", "promotions", ["tenant", "alias", "version"], unique=True)


def downgrade() -> None:
    op.drop_index("ix_promotions_tenant_alias_version", table_name="promotions")
    op.drop_column("promotions", "version")
    op.drop_column("deployments", "version")
