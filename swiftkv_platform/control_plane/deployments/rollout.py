"""Rollouts of jobs' models to deployments (section `rollout` of a job spec), and their rows. Knows no deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import TypeAdapter
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.session import Repository, fetch_rows
from swiftkv_platform.control_plane.database.tables import RolloutRow
from swiftkv_platform.errors import NotFoundError, StaleVersionError
from swiftkv_platform.specs.job import RolloutSpec


class RolloutStatus(StrEnum):
    WAITING = "waiting"
    """The deployment has not loaded the model as its candidate yet."""
    CANDIDATE = "candidate"
    """The model is the deployment's candidate."""
    PROMOTED = "promoted"
    """The model is the deployment's model."""
    REFUSED = "refused"
    """The rollout has ended without a promotion."""
    ROLLED_BACK = "rolled_back"
    """Somebody has undone the rollout."""


OPEN_STATUSES = [RolloutStatus.WAITING.value, RolloutStatus.CANDIDATE.value]


@dataclass(frozen=True)
class RolloutStep:
    """A past change of a rollout's status."""

    status: RolloutStatus
    at: int
    """Unix seconds."""
    by: str
    """Name of the caller's key, or the rollout itself."""
    message: str = ""


@dataclass(frozen=True)
class Rollout:
    """The rollout of a job's model to a deployment."""

    job_id: str
    tenant: str
    deployment: str
    """`dep_` id."""
    model: str
    """`mdl_` id."""
    share: float
    promote_after_s: int | None
    steps: tuple[RolloutStep, ...]
    """Oldest first; the last one has the present status."""
    serving_since: int | None = None
    """Unix seconds since which all replicas have served the candidate."""
    previous: str | None = None
    """Model that the deployment serves until the promotion."""
    version: int = 1

    @property
    def status(self) -> RolloutStatus:
        return self.steps[-1].status

    @property
    def author(self) -> str:
        """Name under which the rollout changes deployments and aliases."""
        return f"rollout of {self.job_id}"

    @property
    def promote_at(self) -> int | None:
        """Unix seconds at which the candidate is promoted; None if that is not known yet, or nothing will be."""
        if self.status is not RolloutStatus.CANDIDATE or self.serving_since is None or self.promote_after_s is None:
            return None
        return self.serving_since + self.promote_after_s

    def add_step(self, status: RolloutStatus, now: float, message: str = "", *, by: str | None = None) -> Rollout:
        return replace(self, steps=(*self.steps, RolloutStep(status, int(now), by or self.author, message)))


_ROLLOUT_ADAPTER = TypeAdapter(Rollout)


def add_rollout(session: Session, spec: RolloutSpec, job_id: str, tenant: str, model: str, now: float) -> None:
    """Store the rollout of a job's new model."""
    rollout = Rollout(job_id, tenant, spec.deployment, model, spec.share, spec.promote_after_s, steps=())
    session.add(RolloutRow(**_make_columns(rollout.add_step(RolloutStatus.WAITING, now))))


class RolloutRepository(Repository):
    """Rollouts of all tenants. Each method is one transaction."""

    def list_open(self) -> Sequence[Rollout]:
        """Return the rollouts that have not ended, oldest first."""
        query = select(RolloutRow).where(RolloutRow.status.in_(OPEN_STATUSES)).order_by(RolloutRow.job_id)
        with self._database.begin_read() as session:
            return [_parse_rollout(row) for row in session.scalars(query)]

    def list_rollouts(self, deployment_id: str, page: PageQuery, *, tenant: str) -> Page[Rollout]:
        """Return a page of a deployment's rollouts, ordered by their jobs' ids."""
        query = select(RolloutRow).where(RolloutRow.tenant == tenant, RolloutRow.deployment == deployment_id)
        with self._database.begin_read() as session:
            rows = fetch_rows(session, query, RolloutRow.job_id, page, after=page.after)
            return Page([_parse_rollout(row) for row in rows.items], rows.has_more)

    def get_rollout(self, job_id: str, *, tenant: str, deployment_id: str | None = None) -> Rollout:
        """Return the rollout of a job, to this deployment if one is given. Raises `NotFoundError`."""
        with self._database.begin_read() as session:
            row = session.get(RolloutRow, job_id)
            if row is None or row.tenant != tenant or deployment_id not in (None, row.deployment):
                raise NotFoundError(
                    f"there is no rollout of {job_id}; GET /deployments/{{id}}/rollouts lists them",
                    field="job_id",
                    value=job_id,
                )
            return _parse_rollout(row)

    def update(self, rollout: Rollout) -> Rollout:
        """Replace a rollout at the version that was read. Raises `StaleVersionError` if it has changed since."""
        updated = replace(rollout, version=rollout.version + 1)
        guarded = update(RolloutRow).where(RolloutRow.job_id == rollout.job_id, RolloutRow.version == rollout.version)
        with self._database.begin_write() as session:
            changed = session.execute(guarded.values(**_make_columns(updated)).returning(RolloutRow.job_id))
            if changed.scalar_one_or_none() is None:
                message = f"the rollout of {rollout.job_id} has been changed at the same time; read it again"
                raise StaleVersionError(message, field="job_id", value=rollout.job_id)
        return updated


def _make_columns(rollout: Rollout) -> dict[str, object]:
    state = _ROLLOUT_ADAPTER.dump_python(rollout, mode="json")
    columns = {name: state.pop(name) for name in ("job_id", "tenant", "deployment", "model", "version")}
    return {**columns, "status": rollout.status.value, "state": state}


def _parse_rollout(row: RolloutRow) -> Rollout:
    columns = {name: getattr(row, name) for name in ("job_id", "tenant", "deployment", "model", "version")}
    return _ROLLOUT_ADAPTER.validate_python({**row.state, **columns})
