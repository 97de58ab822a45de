"""Models without a job, which are imported. Earlier versions still work, but cannot list a tenant's models once it has
an imported one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    _let_be_null(True)


def downgrade() -> None:
    """Make `job_id` required again; the database refuses while there are imported models, which must be deleted
    first."""
    _let_be_null(False)


def _let_be_null(nullable: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.alter_column("models", "job_id", existing_type=sa.String(40), nullable=nullable)
        return
    # SQLite cannot change a column. Foreign keys are checked again only when the transaction ends.
    connection = op.get_bind()
    table = sa.Table("models", sa.MetaData(), autoload_with=connection, resolve_fks=False)
    connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
    connection.exec_driver_sql("CREATE TEMPORARY TABLE models_before AS SELECT * FROM models")
    table.drop(connection)
    table.c.job_id.nullable = nullable
    sa.Table("jobs", table.metadata, sa.Column("id", sa.String(40), primary_key=True))
    table.create(connection)
    connection.exec_driver_sql("INSERT INTO models SELECT * FROM models_before")
    connection.exec_driver_sql("DROP TABLE models_before")
