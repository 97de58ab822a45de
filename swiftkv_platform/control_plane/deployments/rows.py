"""Rows of deployments. Knows the holder of a route, nothing about serving."""

from __future__ import annotations

from dataclasses import replace

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.base import Page, Slice
from swiftkv_platform.control_plane.database.paging import Store, owned, page_of, readable, unreadable
from swiftkv_platform.control_plane.database.tables import DeploymentRow, JobRow, ModelRow, PromotionRow
from swiftkv_platform.control_plane.deployments.deployment import (
    Admit,
    Deployment,
    DeploymentChange,
    DeploymentState,
    DeploymentStatus,
    Holdings,
    interferes,
)
from swiftkv_platform.control_plane.jobs.job import ON_CLUSTER
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.specs.limits import STORED

_STATE = TypeAdapter(DeploymentState)


class DeploymentRepository(Store):
    """Deployments of all tenants. Each method is one transaction."""

    def create_deployment(self, deployment: Deployment, *, admit: Admit | None = None) -> Deployment:
        """Store a deployment; concurrent changes of the tenant's deployments wait. `admit`: raises if the tenant's
        holdings leave no room for it. Raises `ConflictError` if another deployment's route prefix interferes, naming it
        only if it is the same tenant's."""
        with self._database.writing() as session:
            self._await_turn(session, deployment.tenant)
            self._database.take_turns(session, "routes of deployments")
            _check_route(session, deployment)
            if admit is not None:
                admit(_held_beside(session, deployment.spec.id, deployment.tenant))
            deployment = replace(deployment, spec=_as_promoted(session, deployment.spec, deployment.tenant))
            session.add(
                DeploymentRow(
                    id=deployment.spec.id,
                    tenant=deployment.tenant,
                    created_at=deployment.created_at,
                    model=deployment.spec.model,
                    held_route=deployment.spec.route_prefix,
                    spec=deployment.spec.model_dump(mode="json"),
                    state=_STATE.dump_python(deployment.state, mode="json"),
                    version=deployment.version,
                )
            )
        return deployment

    def get_deployment(self, deployment_id: str, *, tenant: str) -> Deployment:
        """Return a deployment. Raises `NotFoundError`."""
        with self._database.reading() as session:
            return read_deployment(owned(session, DeploymentRow, deployment_id, tenant))

    def list_deployments(self, page: Page, *, tenant: str) -> Slice[Deployment]:
        with self._database.reading() as session:
            rows = page_of(session, DeploymentRow, page, tenant)
            deployments, left_out = readable(rows.items, read_deployment)
            return Slice(deployments, rows.has_more, left_out)

    def all_deployments(self) -> Slice[Deployment]:
        """Return all deployments, oldest first. Ids of unreadable rows are in `left_out`: they must stay served too."""
        with self._database.reading() as session:
            rows = session.scalars(select(DeploymentRow).order_by(DeploymentRow.id))
            deployments, left_out = readable(rows, read_deployment)
            return Slice(deployments, has_more=False, left_out=left_out)

    def demand(self, tenant: str) -> Demand:
        """Return the demand of a tenant's deployments."""
        with self._database.reading() as session:
            return deployments_demand(session, tenant)

    def change_deployment(self, deployment_id: str, change: DeploymentChange, *, tenant: str) -> Deployment:
        """Store what `change` returns for the present deployment; other changes of the tenant's deployments wait.

        Its route prefix stays, and a deployment that follows an alias gets the alias's present model. Raises
        `NotFoundError`, `ConflictError` for a deployment that is being deleted, and what `change` raises; then nothing
        is stored.
        """
        with self._database.writing() as session:
            self._await_turn(session, tenant)
            row = owned(session, DeploymentRow, deployment_id, tenant, lock=True)
            deployment = read_deployment(row)
            if deployment.state.status is DeploymentStatus.DELETING:
                message = f"deployment {deployment_id} is being deleted; create another one"
                raise ConflictError(message, field="deployment_id", value=deployment_id)
            spec, state = change(deployment, _held_beside(session, deployment_id, tenant))
            write_deployment(row, _as_promoted(session, spec, tenant), state)
            return read_deployment(row)

    def set_deployment_state(
        self, deployment_id: str, state: DeploymentState, *, of: ResolvedDeployment | None = None
    ) -> None:
        """Store the cluster's state of a deployment. One that is being deleted stays so; a state of deleting frees its
        route prefix. `of`: the spec that the state is about; nothing is stored if another one is wanted by now."""
        with self._database.writing() as session:
            row = session.get(DeploymentRow, deployment_id, with_for_update=True)
            if row is None or _STATE.validate_python(row.state).status is DeploymentStatus.DELETING:
                return
            if of is not None and ResolvedDeployment.model_validate(row.spec, context=STORED) != of:
                return
            row.state = _STATE.dump_python(state, mode="json")
            if state.status is DeploymentStatus.DELETING:
                row.held_route = None

    def _await_turn(self, session: Session, tenant: str) -> None:
        """Wait until no other transaction changes the tenant's wanted deployments or its aliases."""
        self._database.take_turns(session, deployments_turn(tenant))

    def remove_deployment(self, deployment_id: str) -> None:
        """Delete the row of a deployment that is no longer served."""
        with self._database.writing() as session:
            row = session.get(DeploymentRow, deployment_id)
            if row is not None:
                session.delete(row)


def deployments_turn(tenant: str) -> str:
    """Return the name of the turn in which a tenant's wanted deployments are changed."""
    return f"deployments of {tenant}"


def deployments_demand(session: Session, tenant: str) -> Demand:
    """Return the summed demand of a tenant's deployments, as seen in this transaction."""
    rows = session.scalars(select(DeploymentRow).where(DeploymentRow.tenant == tenant))
    return sum((Demand.of_deployment(item.spec) for item in readable(rows, read_deployment)[0]), Demand())


def _check_route(session: Session, wanted: Deployment) -> None:
    """Raise `ConflictError` if a deployment's route interferes; another tenant's is not named."""
    route_prefix = wanted.spec.route_prefix
    held = select(DeploymentRow.id, DeploymentRow.tenant, DeploymentRow.held_route)
    for holder, tenant, held_route in session.execute(held):
        if held_route is None or not interferes(route_prefix, held_route):
            continue
        if tenant != wanted.tenant:
            why = "it is taken, or overlaps with a route that is; choose another prefix"
        elif held_route == route_prefix:
            why = f"it belongs to deployment {holder}; delete that one or choose another prefix"
        else:
            why = (
                f"it overlaps with deployment {holder} at {held_route!r}, and the longest prefix wins; choose another "
                "prefix"
            )
        raise ConflictError(f"route_prefix is {route_prefix!r}: {why}", field="route_prefix", value=route_prefix)


def _held_beside(session: Session, deployment_id: str, tenant: str) -> Holdings:
    """Return the tenant's other holdings. Deployments being deleted count, since their replicas still run; unreadable
    rows do not."""
    jobs = select(JobRow).where(JobRow.tenant == tenant, JobRow.status.in_(ON_CLUSTER))
    deployments = select(DeploymentRow).where(DeploymentRow.tenant == tenant, DeploymentRow.id != deployment_id)
    return Holdings(
        readable(session.scalars(jobs), _job_spec)[0],
        [deployment.spec for deployment in readable(session.scalars(deployments), read_deployment)[0]],
    )


def _job_spec(row: JobRow) -> JobSpec:
    """Return the row's value. Raises `UnreadableRowError`."""
    try:
        return JobSpec.model_validate(row.spec, context=STORED)
    except (ValidationError, TypeError) as error:
        raise unreadable("job", row.id, error) from error


def _as_promoted(session: Session, spec: ResolvedDeployment, tenant: str) -> ResolvedDeployment:
    """Return the spec with the model that its alias points to in this transaction."""
    if spec.alias is None:
        return spec
    promotions = select(PromotionRow.model).where(PromotionRow.tenant == tenant, PromotionRow.alias == spec.alias)
    model_id = session.scalar(promotions.order_by(PromotionRow.sequence.desc()).limit(1))
    if model_id is None or model_id == spec.model:
        return spec
    artifact_uri = session.get_one(ModelRow, model_id).artifact_uri
    return spec.model_copy(update={"model": model_id, "artifact_uri": artifact_uri})


def read_deployment(row: DeploymentRow) -> Deployment:
    """Return the row's value. Raises `UnreadableRowError`."""
    try:
        spec = ResolvedDeployment.model_validate(row.spec, context=STORED)
        return Deployment(spec, row.tenant, row.created_at, _STATE.validate_python(row.state), row.version)
    except (ValidationError, TypeError) as error:
        raise unreadable("deployment", row.id, error) from error


def write_deployment(row: DeploymentRow, spec: ResolvedDeployment, state: DeploymentState) -> None:
    """Write a changed spec and state into the row. Its route prefix stays, and so do fields of newer versions."""
    newer = {name: value for name, value in row.spec.items() if name not in ResolvedDeployment.model_fields}
    document = {**newer, **spec.model_dump(mode="json")}
    if document != row.spec:
        row.version += 1
    row.model = spec.model
    row.spec = document
    row.state = _STATE.dump_python(state, mode="json")
