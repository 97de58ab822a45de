"""Columns for deciding the queue in SQL, for watched jobs, and for tokens of leases."""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_PRIORITIES = {"high": 0, "normal": 1, "low": 2}
_SWEPT = ("num_key_value_layers", "key_value_group_size", "learning_rate")
_FINAL = ("succeeded", "failed", "cancelled")
_JOBS = sa.table(
    "jobs",
    sa.column("id", sa.String()),
    sa.column("status", sa.String()),
    sa.column("spec", sa.JSON()),
    sa.column("state", sa.JSON()),
    sa.column("priority", sa.Integer()),
    sa.column("not_before", sa.Float()),
    sa.column("gpus", sa.Float()),
    sa.column("cpus", sa.Float()),
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="1"))
    for name in ("not_before", "gpus", "cpus", "watched_until"):
        op.add_column("jobs", sa.Column(name, sa.Float(53), nullable=False, server_default="0"))
    op.add_column("leases", sa.Column("token", sa.BigInteger(), nullable=False, server_default="1"))
    _fill(op.get_bind())
    columns = ["status", "tenant", "priority", "id", "not_before", "gpus", "cpus"]
    op.create_index("ix_jobs_queue", "jobs", columns)


def _fill(connection: sa.Connection) -> None:
    """Fill the columns of jobs that have not ended. A row that cannot be read keeps the defaults."""
    live = sa.select(_JOBS.c.id, _JOBS.c.spec, _JOBS.c.state).where(_JOBS.c.status.not_in(_FINAL))
    for row in connection.execute(live).all():
        try:
            values = {**_asked(row.spec), "not_before": float(row.state.get("not_before", 0.0))}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == row.id).values(**values))


def _asked(spec: Any) -> dict[str, float]:
    """Return rank and resources of a job, by the rules and defaults of this revision."""
    resources, sweep = spec.get("resources", {}), spec.get("sweep")
    workers = resources.get("num_workers", 2)
    workers = workers["max"] if isinstance(workers, dict) else int(workers)
    if sweep is not None:
        workers *= min(sweep.get("max_concurrent", 1), math.prod(len(sweep.get(name) or [0]) for name in _SWEPT))
    return {
        "priority": _PRIORITIES[spec.get("limits", {}).get("priority", "normal")],
        "gpus": float(workers * resources.get("gpus_per_worker", 0)),
        "cpus": float(workers * max(resources.get("cpus_per_worker", 1), 1)),
    }


def downgrade() -> None:
    op.drop_index("ix_jobs_queue", table_name="jobs")
    op.drop_column("leases", "token")
    for name in ("watched_until", "cpus", "gpus", "not_before", "priority"):
        op.drop_column("jobs", name)
