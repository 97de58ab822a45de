"""The schema of release 0.1.0."""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = None

_required = partial(sa.Column, nullable=False)
_DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_SCHEMA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sa.Table(
    "jobs",
    _SCHEMA,
    _required("id", sa.String(40), primary_key=True),
    _required("tenant", sa.String(64)),
    _required("created_by", sa.String(200)),
    _required("created_at", sa.BigInteger()),
    _required("status", sa.String(16), index=True),
    _required("model", sa.String()),
    _required("labels", _DOCUMENT),
    _required("spec", _DOCUMENT),
    _required("state", _DOCUMENT),
    _required("version", sa.Integer()),
    sa.Index(None, "tenant", "id"),
    sa.Index(None, "tenant", "status", "id"),
)
sa.Table(
    "idempotency_keys",
    _SCHEMA,
    _required("tenant", sa.String(64), primary_key=True),
    _required("key", sa.String(255), primary_key=True),
    _required("body_hash", sa.String(64)),
    _required("job_id", sa.ForeignKey("jobs.id")),
)
sa.Table(
    "events",
    _SCHEMA,
    _required("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
    _required("id", sa.String(40), unique=True),
    _required("job_id", sa.ForeignKey("jobs.id")),
    _required("created_at", sa.BigInteger()),
    _required("type", sa.String(16)),
    _required("level", sa.String(8)),
    _required("message", sa.String()),
    _required("data", _DOCUMENT),
    sa.Index(None, "job_id", "sequence"),
)
sa.Table(
    "metric_points",
    _SCHEMA,
    _required("job_id", sa.ForeignKey("jobs.id"), primary_key=True),
    _required("step", sa.BigInteger(), primary_key=True),
    _required("attempt", sa.Integer()),
    _required("time", sa.Float(53)),
    _required("values", _DOCUMENT),
)
sa.Table(
    "models",
    _SCHEMA,
    _required("id", sa.String(40), primary_key=True),
    _required("tenant", sa.String(64), index=True),
    _required("name", sa.String(100)),
    _required("job_id", sa.ForeignKey("jobs.id"), unique=True),
    _required("attempt", sa.Integer()),
    _required("created_at", sa.BigInteger()),
    _required("artifact_uri", sa.String()),
    _required("manifest_digest", sa.String(64)),
    _required("size", sa.BigInteger()),
    _required("lineage", _DOCUMENT),
    _required("metrics", _DOCUMENT),
)
sa.Table(
    "deployments",
    _SCHEMA,
    _required("id", sa.String(40), primary_key=True),
    _required("tenant", sa.String(64), index=True),
    _required("created_at", sa.BigInteger()),
    _required("model", sa.ForeignKey("models.id")),
    sa.Column("held_route", sa.String(200), unique=True),
    _required("spec", _DOCUMENT),
    _required("state", _DOCUMENT),
)
sa.Table(
    "leases",
    _SCHEMA,
    _required("name", sa.String(64), primary_key=True),
    _required("holder", sa.String(64)),
    _required("expires_at", sa.Float(53)),
)
sa.Table(
    "deliveries",
    _SCHEMA,
    _required("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
    _required("event_id", sa.ForeignKey("events.id")),
    _required("job_id", sa.ForeignKey("jobs.id")),
    _required("webhook", _DOCUMENT),
    _required("url", sa.String(500)),
    _required("status", sa.String(16)),
    _required("created_at", sa.Float(53)),
    _required("not_before", sa.Float(53)),
    _required("attempts", sa.Integer()),
    sa.Column("error", sa.String()),
    sa.Column("delivered_at", sa.Float(53)),
    sa.Index(None, "status", "not_before"),
    sa.Index(None, "job_id", "sequence"),
)
sa.Table(
    "promotions",
    _SCHEMA,
    _required("sequence", _SEQUENCE, primary_key=True, autoincrement=True),
    _required("id", sa.String(40)),
    _required("tenant", sa.String(64)),
    _required("alias", sa.String(32)),
    _required("action", sa.String(16)),
    _required("model", sa.ForeignKey("models.id")),
    sa.Column("previous", sa.String(40)),
    _required("reason", sa.String()),
    _required("by", sa.String(200)),
    _required("created_at", sa.BigInteger()),
    sa.Index(None, "tenant", "alias", "sequence"),
)


def upgrade() -> None:
    """Create what is missing: a database of before the release has some of these tables."""
    _SCHEMA.create_all(op.get_bind())
    for table in _SCHEMA.sorted_tables:
        for index in table.indexes:
            index.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    _SCHEMA.drop_all(op.get_bind())
