"""All changes from release 0.1.0 to revision 0015. Adds only what is missing: databases of the revisions in
between have part of the changes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0015"
down_revision = "0005"

_required = partial(sa.Column, nullable=False)
_DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
_SCHEMA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_NEW_TABLES = (
    sa.Table(
        "sessions",
        _SCHEMA,
        _required("id_sha256", sa.String(64), primary_key=True),
        _required("key_name", sa.String(64)),
        _required("sealed_key", sa.String()),
        _required("created_at", sa.Float(53)),
        _required("expires_at", sa.Float(53), index=True),
    ),
    sa.Table(
        "deletions",
        _SCHEMA,
        _required("prefix", sa.String(200), primary_key=True),
        _required("created_at", sa.BigInteger()),
        _required("by", sa.String(200)),
    ),
    sa.Table(
        "files",
        _SCHEMA,
        _required("id", sa.String(40), primary_key=True),
        _required("tenant", sa.String(64)),
        _required("created_by", sa.String(200)),
        _required("created_at", sa.BigInteger()),
        _required("filename", sa.String(255)),
        _required("purpose", sa.String(32)),
        _required("size", sa.BigInteger()),
        _required("rows", sa.BigInteger()),
        _required("sha256", sa.String(64)),
        _required("format", sa.String(32)),
        _required("columns", _DOCUMENT),
        sa.Column("expires_at", sa.BigInteger(), index=True),
        sa.Index(None, "tenant", "id"),
    ),
    sa.Table(
        "key_uses",
        _SCHEMA,
        _required("key_id", sa.String(40), primary_key=True),
        _required("last_used_at", sa.BigInteger()),
    ),
    sa.Table(
        "audit",
        _SCHEMA,
        _required("id", sa.String(40), primary_key=True),
        _required("created_at", sa.Float(53), index=True),
        _required("request_id", sa.String(40)),
        sa.Column("actor", sa.String(200)),
        sa.Column("credential", sa.String(300)),
        sa.Column("tenant", sa.String(64)),
        _required("address", sa.String(64)),
        _required("method", sa.String(16)),
        _required("route", sa.String(200)),
        sa.Column("object", sa.String(200)),
        _required("status", sa.Integer()),
        _required("left_out", sa.Integer(), server_default="0"),
        sa.Index(None, "tenant", "id"),
        sa.Index(None, "object", "id"),
    ),
    sa.Table(
        "uses",
        _SCHEMA,
        _required("used", sa.String(40), primary_key=True),
        _required("job_id", sa.ForeignKey("jobs.id"), primary_key=True, index=True),
    ),
)
sa.Table("jobs", _SCHEMA, _required("id", sa.String(40), primary_key=True))  # which `uses` refers to
_NEW_COLUMNS = {
    "deployments": (
        _required("version", sa.Integer(), server_default="1"),
        sa.Column("alias", sa.String(32)),
        sa.Column("candidate", sa.String(40)),
        _required("replicas", sa.Integer(), server_default="0"),
        _required("gpus", sa.Float(53), server_default="0"),
        _required("cpus", sa.Float(53), server_default="0"),
    ),
    "promotions": (_required("version", sa.Integer(), server_default="0"),),
    "jobs": (
        _required("priority", sa.Integer(), server_default="1"),
        _required("not_before", sa.Float(53), server_default="0"),
        _required("gpus", sa.Float(53), server_default="0"),
        _required("cpus", sa.Float(53), server_default="0"),
        _required("watched_until", sa.Float(53), server_default="0"),
        sa.Column("finished_at", sa.BigInteger()),
        _required("swept", sa.Integer(), server_default="0"),
    ),
    "leases": (_required("token", sa.BigInteger(), server_default="1"),),
    "deliveries": (sa.Column("tenant", sa.String(64)),),
    "deletions": (
        sa.Column("tenant", sa.String(64)),
        _required("size", sa.BigInteger(), server_default="0"),
    ),
}
_NEW_INDEXES = {
    "ix_promotions_tenant_alias_version": ("promotions", ["tenant", "alias", "version"]),
    "ix_jobs_queue": ("jobs", ["status", "tenant", "priority", "id", "not_before", "gpus", "cpus"]),
    "ix_jobs_finished_at": ("jobs", ["finished_at"]),
    "ix_deliveries_event_id": ("deliveries", ["event_id"]),
    "ix_deployments_model": ("deployments", ["model"]),
    "ix_idempotency_keys_job_id": ("idempotency_keys", ["job_id"]),
    "ix_promotions_model": ("promotions", ["model"]),
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
_UNIQUE = ("ix_promotions_tenant_alias_version",)

_NUMBER_PROMOTIONS = """
UPDATE promotions SET version = (
    SELECT count(*) FROM promotions AS earlier
    WHERE earlier.tenant = promotions.tenant
      AND earlier.alias = promotions.alias
      AND earlier.sequence <= promotions.sequence
)
"""
_NAME_TENANTS = """
UPDATE deliveries SET tenant = (SELECT tenant FROM jobs WHERE jobs.id = deliveries.job_id) WHERE status = 'pending'
"""
_PRIORITIES = {"high": 0, "normal": 1, "low": 2}
_SWEPT = ("num_key_value_layers", "key_value_group_size", "learning_rate")
_FINAL = ("succeeded", "failed", "cancelled")
_ID = re.compile(r"(?:mdl|job)_[0-9A-Za-z]{1,36}|file-[0-7][0-9A-HJKMNP-TV-Z]{25}")
"""Ids of models, jobs and files."""
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors while parsing a document that another version has written, or a damaged one."""


_JOBS = sa.table(
    "jobs",
    *map(sa.column, ("id", "status", "finished_at", "priority", "not_before", "gpus", "cpus")),
    *(sa.column(name, sa.JSON()) for name in ("spec", "state")),
)
_DEPLOYMENTS = sa.table(
    "deployments",
    *map(sa.column, ("id", "alias", "candidate", "replicas", "gpus", "cpus")),
    sa.column("spec", sa.JSON()),
)


def upgrade() -> None:
    connection = op.get_bind()
    present = set(sa.inspect(connection).get_table_names())
    _SCHEMA.create_all(connection, tables=_NEW_TABLES)
    added = _add_columns()
    if "promotions.version" in added:
        op.execute(_NUMBER_PROMOTIONS)
    if "jobs.priority" in added:
        _fill_queue(connection)
    if "jobs.finished_at" in added:
        op.execute(sa.update(_JOBS).values(finished_at=_JOBS.c.state["finished_at"].as_integer()))
    if "deployments.alias" in added:
        _fill_deployments(connection)
    if "deliveries.tenant" in added:
        op.execute(_NAME_TENANTS)
    if "uses" not in present:
        _fill_uses(connection)
    _set_model_job_nullable(True)
    for name, (table, columns) in _NEW_INDEXES.items():
        op.create_index(name, table, columns, unique=name in _UNIQUE, if_not_exists=True)


def _add_columns() -> set[str]:
    """Add the missing columns; return their names as `table.column`."""
    inspector, added = sa.inspect(op.get_bind()), set()
    for table, columns in _NEW_COLUMNS.items():
        present = {column["name"] for column in inspector.get_columns(table)}
        for column in columns:
            if column.name not in present:
                op.add_column(table, column)
                added.add(f"{table}.{column.name}")
    return added


def _fill_queue(connection: sa.Connection) -> None:
    """Fill the queue's columns of jobs that have not ended. A job that cannot be read keeps the defaults."""
    live = sa.select(_JOBS.c.id, _JOBS.c.spec, _JOBS.c.state).where(_JOBS.c.status.not_in(_FINAL))
    for row in connection.execute(live).all():
        try:
            values = {**_read_demand(row.spec), "not_before": float(row.state.get("not_before", 0.0))}
        except _UNREADABLE:
            continue
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == row.id).values(**values))


def _read_demand(spec: Any) -> dict[str, float]:
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


def _fill_deployments(connection: sa.Connection) -> None:
    """Fill the columns of deployments. One that cannot be read keeps the defaults."""
    for deployment_id in connection.scalars(sa.select(_DEPLOYMENTS.c.id)).all():
        # One at a time: specs may be long.
        found = _DEPLOYMENTS.c.id == deployment_id
        try:
            values = _read_deployment_columns(connection.scalar(sa.select(_DEPLOYMENTS.c.spec).where(found)))
        except _UNREADABLE:
            continue
        connection.execute(sa.update(_DEPLOYMENTS).where(found).values(**values))


def _read_deployment_columns(spec: Any) -> dict[str, Any]:
    """Return the columns of a deployment's spec, by the rules and defaults of this revision."""
    engine, replicas, candidate = spec.get("engine", {}), int(spec.get("max_replicas", 1)), spec.get("candidate")
    ranks = _read_limited_option(64, engine, "tensor_parallel_size")
    return {
        "alias": spec.get("alias"),
        "candidate": candidate and candidate["model"],
        "replicas": replicas,
        "gpus": float(replicas * ranks * (engine.get("device") == "cuda")),
        "cpus": float(replicas * ranks * _read_limited_option(1024, engine, "num_threads")),
    }


def _read_limited_option(most: int, engine: Mapping[str, Any], option: str) -> int:
    asked = engine.get(option)
    return min(max(asked, 1), most) if isinstance(asked, int) else 1


def _fill_uses(connection: sa.Connection) -> None:
    """Store all ids in the specs of jobs, also those in texts that use nothing, and where jobs publish."""
    for job_id in connection.scalars(sa.select(_JOBS.c.id)).all():
        # One at a time: specs may be long.
        spec: Any = connection.scalar(sa.select(_JOBS.c.spec).where(_JOBS.c.id == job_id))
        used = {*_ID.findall(json.dumps(spec))}
        try:
            place = spec["publish"]["to"].rstrip("/")
        except _UNREADABLE:
            pass
        else:
            place = place.lower() if place.startswith("hf://") else place
            used.add(f"pub_{hashlib.sha256(place.encode()).hexdigest()[:36]}")
        if used:
            connection.execute(
                sa.insert(_SCHEMA.tables["uses"]), [{"used": each, "job_id": job_id} for each in sorted(used)]
            )


def _set_model_job_nullable(nullable: bool) -> None:
    connection = op.get_bind()
    table = sa.Table("models", sa.MetaData(), autoload_with=connection, resolve_fks=False)
    if table.c.job_id.nullable == nullable:
        return
    if connection.dialect.name != "sqlite":
        op.alter_column("models", "job_id", existing_type=sa.String(40), nullable=nullable)
        return
    # SQLite cannot change a column. Foreign keys are checked again only when the transaction ends.
    connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
    connection.exec_driver_sql("CREATE TEMPORARY TABLE models_before AS SELECT * FROM models")
    table.drop(connection)
    table.c.job_id.nullable = nullable
    sa.Table("jobs", table.metadata, sa.Column("id", sa.String(40), primary_key=True))
    table.create(connection)
    connection.exec_driver_sql("INSERT INTO models SELECT * FROM models_before")
    connection.exec_driver_sql("DROP TABLE models_before")


def downgrade() -> None:
    """Restore the schema of 0.1.0. The database refuses while there are imported models, which must be deleted
    first."""
    _set_model_job_nullable(False)
    for name, (table, _) in _NEW_INDEXES.items():
        op.drop_index(name, table_name=table)
    for table, columns in _NEW_COLUMNS.items():
        for column in columns:
            op.drop_column(table, column.name)
    _SCHEMA.drop_all(op.get_bind(), tables=_NEW_TABLES)
