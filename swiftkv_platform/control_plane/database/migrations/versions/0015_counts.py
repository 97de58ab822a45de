"""Columns and indexes with which a tenant's deployments, models, files and deliveries are counted without reading
documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_DEPLOYMENTS = sa.table(
    "deployments",
    sa.column("id", sa.String()),
    sa.column("spec", sa.JSON()),
    sa.column("alias", sa.String()),
    sa.column("candidate", sa.String()),
    sa.column("replicas", sa.Integer()),
    sa.column("gpus", sa.Float()),
    sa.column("cpus", sa.Float()),
)
_INDEXES = {
    "ix_deployments_tenant_alias": ("deployments", ["tenant", "alias"]),
    "ix_deployments_candidate": ("deployments", ["candidate"]),
    "ix_deployments_demand": ("deployments", ["tenant", "id", "replicas", "gpus", "cpus"]),
    "ix_models_tenant_job_id_size": ("models", ["tenant", "job_id", "size"]),
    "ix_models_tenant_name": ("models", ["tenant", "name"]),
    "ix_files_tenant_size": ("files", ["tenant", "size"]),
    "ix_deletions_tenant_size": ("deletions", ["tenant", "size"]),
    "ix_deliveries_tenant_status": ("deliveries", ["tenant", "status"]),
    "ix_sessions_key_name_expires_at": ("sessions", ["key_name", "expires_at"]),
}


def upgrade() -> None:
    op.add_column("deployments", sa.Column("alias", sa.String(32), nullable=True))
    op.add_column("deployments", sa.Column("candidate", sa.String(40), nullable=True))
    op.add_column("deployments", sa.Column("replicas", sa.Integer(), nullable=False, server_default="0"))
    for name in ("gpus", "cpus"):
        op.add_column("deployments", sa.Column(name, sa.Float(53), nullable=False, server_default="0"))
    for table in ("deliveries", "deletions"):
        op.add_column(table, sa.Column("tenant", sa.String(64), nullable=True))
    op.add_column("deletions", sa.Column("size", sa.BigInteger(), nullable=False, server_default="0"))
    _fill(op.get_bind())
    for name, (table, columns) in _INDEXES.items():
        op.create_index(name, table, columns)


def _fill(connection: sa.Connection) -> None:
    """Store the columns of rows that can be read; the others keep the defaults."""
    for deployment_id in connection.scalars(sa.select(_DEPLOYMENTS.c.id)).all():
        # One at a time: specs may be long.
        found = _DEPLOYMENTS.c.id == deployment_id
        try:
            values = _parts(connection.scalar(sa.select(_DEPLOYMENTS.c.spec).where(found)))
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
        connection.execute(sa.update(_DEPLOYMENTS).where(found).values(**values))
    connection.execute(
        sa.text(
            "UPDATE deliveries SET tenant = (SELECT tenant FROM jobs WHERE jobs.id = deliveries.job_id) "
            "WHERE status = 'pending'"
        )
    )


def _parts(spec: Any) -> dict[str, Any]:
    """Return parts of a deployment's spec, by the rules and defaults of this revision."""
    engine, replicas, candidate = spec.get("engine", {}), int(spec.get("max_replicas", 1)), spec.get("candidate")
    ranks = _read_clamped(64, engine, "tensor_parallel_size")
    return {
        "alias": spec.get("alias"),
        "candidate": candidate and candidate["model"],
        "replicas": replicas,
        "gpus": float(replicas * ranks * (engine.get("device") == "cuda")),
        "cpus": float(replicas * ranks * _read_clamped(1024, engine, "num_threads")),
    }


def _read_clamped(most: int, engine: Mapping[str, Any], option: str) -> int:
    asked = engine.get(option)
    return min(max(asked, 1), most) if isinstance(asked, int) else 1


def downgrade() -> None:
    for name, (table, _) in _INDEXES.items():
        op.drop_index(name, table_name=table)
    op.drop_column("deletions", "size")
    for table in ("deletions", "deliveries"):
        op.drop_column(table, "tenant")
    for name in ("cpus", "gpus", "replicas", "candidate", "alias"):
        op.drop_column("deployments", name)
