"""The tables. A value that is filtered, sorted or guarded is a column; the rest is one JSON document. No queries."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, MetaData, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Document = JSON().with_variant(JSONB(), "postgresql")
Sequence = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite autoincrements only a plain INTEGER primary key."""


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class JobRow(Base):
    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    created_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(String(16), index=True)
    model: Mapped[str] = mapped_column(String)
    """The teacher's `name_or_path`, for the list's filter."""
    labels: Mapped[dict[str, str]] = mapped_column(Document)
    """The spec's `metadata`, for the list's filter."""
    spec: Mapped[dict[str, Any]] = mapped_column(Document)
    state: Mapped[dict[str, Any]] = mapped_column(Document)
    """Fields of `Job` without a column, as JSON."""
    version: Mapped[int]
    finished_at: Mapped[int | None] = mapped_column(BigInteger, index=True)
    """Copy of `state.finished_at`, for queries of retention."""
    swept: Mapped[int] = mapped_column(server_default="0", default=0)
    """Kinds of data that retention has removed since the job ended, one bit each."""
    priority: Mapped[int] = mapped_column(server_default="1")
    """Rank of `limits.priority`; the lowest goes first."""
    not_before: Mapped[float] = mapped_column(Float(53), server_default="0")
    """`Job.not_before`."""
    gpus: Mapped[float] = mapped_column(Float(53), server_default="0")
    """GPUs that the job holds while it is on the cluster."""
    cpus: Mapped[float] = mapped_column(Float(53), server_default="0")
    watched_until: Mapped[float] = mapped_column(Float(53), server_default="0")
    """Unix seconds until which the job's events are polled often. Changing this column keeps the job's version."""

    __table_args__ = (
        Index(None, "tenant", "id"),
        Index(None, "tenant", "status", "id"),
        # Everything that deciding the queue reads.
        Index("ix_jobs_queue", "status", "tenant", "priority", "id", "not_before", "gpus", "cpus"),
    )


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"

    tenant: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)


class EventRow(Base):
    __tablename__ = "events"

    sequence: Mapped[int] = mapped_column(Sequence, primary_key=True, autoincrement=True)
    """Increases with every event of a job, whose row is locked while one is added."""
    id: Mapped[str] = mapped_column(String(40), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[int] = mapped_column(BigInteger)
    type: Mapped[str] = mapped_column(String(16))
    level: Mapped[str] = mapped_column(String(8))
    message: Mapped[str] = mapped_column(String)
    data: Mapped[dict[str, Any]] = mapped_column(Document)

    __table_args__ = (Index(None, "job_id", "sequence"),)


class MetricRow(Base):
    __tablename__ = "metric_points"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    attempt: Mapped[int]
    time: Mapped[float] = mapped_column(Float(53))
    """Unix seconds."""
    values: Mapped[dict[str, Any]] = mapped_column(Document)


class ModelRow(Base):
    __tablename__ = "models"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    name: Mapped[str] = mapped_column(String(100))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), unique=True)
    """Null for an imported model."""
    attempt: Mapped[int]
    created_at: Mapped[int] = mapped_column(BigInteger)
    artifact_uri: Mapped[str] = mapped_column(String)
    manifest_digest: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    lineage: Mapped[dict[str, Any]] = mapped_column(Document)
    metrics: Mapped[dict[str, Any]] = mapped_column(Document)

    __table_args__ = (
        # Everything that a tenant's quotas read.
        Index(None, "tenant", "job_id", "size"),
        Index(None, "tenant", "name"),
    )


class DeploymentRow(Base):
    __tablename__ = "deployments"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str] = mapped_column(ForeignKey("models.id"), index=True)
    held_route: Mapped[str | None] = mapped_column(String(200), unique=True)
    """Route prefix, which no other deployment may have; null while it is being deleted."""
    alias: Mapped[str | None] = mapped_column(String(32))
    """`spec.alias`, for promotions to find the deployments that follow it."""
    candidate: Mapped[str | None] = mapped_column(String(40), index=True)
    """`spec.candidate.model`."""
    replicas: Mapped[int] = mapped_column(server_default="0", default=0)
    """`spec.max_replicas`."""
    gpus: Mapped[float] = mapped_column(Float(53), server_default="0")
    """GPUs of all replicas of the deployment."""
    cpus: Mapped[float] = mapped_column(Float(53), server_default="0")
    spec: Mapped[dict[str, Any]] = mapped_column(Document)
    state: Mapped[dict[str, Any]] = mapped_column(Document)
    version: Mapped[int]
    """Increases with every change of `spec`."""

    __table_args__ = (
        Index(None, "tenant", "alias"),
        # Everything that a tenant's quotas read.
        Index("ix_deployments_demand", "tenant", "id", "replicas", "gpus", "cpus"),
    )


PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"
"""Values of `DeliveryRow.status`."""


class DeliveryRow(Base):
    __tablename__ = "deliveries"

    sequence: Mapped[int] = mapped_column(Sequence, primary_key=True, autoincrement=True)
    event_id: Mapped[str] = mapped_column(ForeignKey("events.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    webhook: Mapped[dict[str, Any]] = mapped_column(Document)
    url: Mapped[str] = mapped_column(String(500))
    """URL of the webhook. Deliveries of one job to one URL go in order."""
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float] = mapped_column(Float(53))
    not_before: Mapped[float] = mapped_column(Float(53))
    """Unix seconds before which no attempt is made; a claim sets it to the claim's end."""
    attempts: Mapped[int]
    error: Mapped[str | None]
    delivered_at: Mapped[float | None] = mapped_column(Float(53))

    tenant: Mapped[str | None] = mapped_column(String(64))
    """The job's tenant; null in finished rows of earlier versions."""

    __table_args__ = (
        Index(None, "status", "not_before"),
        Index(None, "job_id", "sequence"),
        Index(None, "tenant", "status"),
    )


class PromotionRow(Base):
    __tablename__ = "promotions"

    sequence: Mapped[int] = mapped_column(Sequence, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(40))
    tenant: Mapped[str] = mapped_column(String(64))
    alias: Mapped[str] = mapped_column(String(32))
    action: Mapped[str] = mapped_column(String(16))
    model: Mapped[str] = mapped_column(ForeignKey("models.id"), index=True)
    previous: Mapped[str | None] = mapped_column(String(40))
    reason: Mapped[str]
    by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    version: Mapped[int]
    """Position in the alias's history, from 1."""

    __table_args__ = (
        Index(None, "tenant", "alias", "sequence"),
        Index(None, "tenant", "alias", "version", unique=True),
    )


class RolloutRow(Base):
    """The rollout of a job's model to a deployment."""

    __tablename__ = "rollouts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    deployment: Mapped[str] = mapped_column(String(40))
    model: Mapped[str] = mapped_column(String(40))
    status: Mapped[str] = mapped_column(String(16), index=True)
    state: Mapped[dict[str, Any]] = mapped_column(Document)
    """Fields of `Rollout` without a column, as JSON."""
    version: Mapped[int]

    __table_args__ = (Index(None, "tenant", "deployment", "job_id"),)


class SessionRow(Base):
    __tablename__ = "sessions"

    id_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_name: Mapped[str] = mapped_column(String(64))
    """Tenant and name of the caller, or their digest."""
    sealed_key: Mapped[str]
    """The API key, sealed with the session's id."""
    created_at: Mapped[float] = mapped_column(Float(53))
    expires_at: Mapped[float] = mapped_column(Float(53), index=True)
    """Unix seconds."""

    __table_args__ = (Index(None, "key_name", "expires_at"),)


class DeletionRow(Base):
    """A prefix of the object store whose objects must be removed: of a deleted job or model, or of an unregistered
    import."""

    __tablename__ = "deletions"

    prefix: Mapped[str] = mapped_column(String(200), primary_key=True)
    created_at: Mapped[int] = mapped_column(BigInteger)
    """Unix seconds from which the objects may be removed; in the future for an import."""
    by: Mapped[str] = mapped_column(String(200))
    tenant: Mapped[str | None] = mapped_column(String(64))
    """Tenant whose stored bytes include the objects until they are removed; null for none."""
    size: Mapped[int] = mapped_column(BigInteger, server_default="0", default=0)
    """Counted bytes."""

    __table_args__ = (Index(None, "tenant", "size"),)


class FileRow(Base):
    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64))
    created_by: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[int] = mapped_column(BigInteger)
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(32))
    size: Mapped[int] = mapped_column(BigInteger)
    """Bytes."""
    rows: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    format: Mapped[str] = mapped_column(String(32))
    columns: Mapped[list[str]] = mapped_column(Document)
    expires_at: Mapped[int | None] = mapped_column(BigInteger, index=True)

    __table_args__ = (Index(None, "tenant", "id"), Index(None, "tenant", "size"))


class JobReferenceRow(Base):
    """A reference from a job to an uploaded file, a model, another job or its publish target."""

    __tablename__ = "uses"

    used: Mapped[str] = mapped_column(String(40), primary_key=True)
    """Id of the object, or the digest of the publish target."""
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True, index=True)


class LeaseRow(Base):
    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[float] = mapped_column(Float(53))
    """Unix seconds."""
    token: Mapped[int] = mapped_column(BigInteger, server_default="1")
    """Increases each time that another holder takes the lease."""


class KeyUseRow(Base):
    """The last use of an API key, to the minute."""

    __tablename__ = "key_uses"

    key_id: Mapped[str] = mapped_column(String(40), primary_key=True)
    last_used_at: Mapped[int] = mapped_column(BigInteger)


class AuditRow(Base):
    """A request that changed something, tried to, or was refused access."""

    __tablename__ = "audit"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float(53), index=True)
    """Unix seconds."""
    request_id: Mapped[str] = mapped_column(String(40))
    actor: Mapped[str | None] = mapped_column(String(200))
    """Name of the caller; null if unknown."""
    credential: Mapped[str | None] = mapped_column(String(300))
    """Id of the key, or issuer and subject of the token."""
    tenant: Mapped[str | None] = mapped_column(String(64))
    address: Mapped[str] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(16))
    route: Mapped[str] = mapped_column(String(200))
    object: Mapped[str | None] = mapped_column(String(200))
    """Id of the object that the request reads or changes, e.g. of a job."""
    status: Mapped[int]
    """HTTP status of the response."""
    left_out: Mapped[int] = mapped_column(server_default="0", default=0)
    """Number of earlier refusals, of any address, that were not recorded, to limit the size of the trail."""

    __table_args__ = (Index(None, "tenant", "id"), Index(None, "object", "id"))
