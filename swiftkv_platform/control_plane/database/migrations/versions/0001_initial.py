"""Initial schema: jobs, idempotency keys, events, metrics, models, deployments."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

_DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
_SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_jobs()
    _create_history()
    _create_catalog()


def downgrade() -> None:
    for table in ("deployments", "models", "metric_points", "events", "idempotency_keys", "jobs"):
        op.drop_table(table)


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("labels", _DOCUMENT, nullable=False),
        sa.Column("spec", _DOCUMENT, nullable=False),
        sa.Column("state", _DOCUMENT, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant", "id"])
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_idempotency_keys_job_id"),
        sa.PrimaryKeyConstraint("tenant", "key", name="pk_idempotency_keys"),
    )


def _create_history() -> None:
    op.create_table(
        "events",
        sa.Column("sequence", _SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("data", _DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id"),
        sa.PrimaryKeyConstraint("sequence", name="pk_events"),
        sa.UniqueConstraint("id", name="uq_events_id"),
    )
    op.create_index("ix_events_job_id_sequence", "events", ["job_id", "sequence"])
    op.create_table(
        "metric_points",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(53), nullable=False),
        sa.Column("values", _DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metric_points_job_id"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_metric_points"),
    )


def _create_catalog() -> None:
    op.create_table(
        "models",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("artifact_uri", sa.String(), nullable=False),
        sa.Column("manifest_digest", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("lineage", _DOCUMENT, nullable=False),
        sa.Column("metrics", _DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_models_job_id"),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint("job_id", name="uq_models_job_id"),
    )
    op.create_index("ix_models_tenant", "models", ["tenant"])
    op.create_table(
        "deployments",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(40), nullable=False),
        sa.Column("held_route", sa.String(200), nullable=True),
        sa.Column("spec", _DOCUMENT, nullable=False),
        sa.Column("state", _DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name="fk_deployments_model"),
        sa.PrimaryKeyConstraint("id", name="pk_deployments"),
        sa.UniqueConstraint("held_route", name="uq_deployments_held_route"),
    )
    op.create_index("ix_deployments_tenant", "deployments", ["tenant"])
