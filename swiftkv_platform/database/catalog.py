"""Distilled models and their deployments in SQL. Knows rows and the holder of a route, nothing about serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from swiftkv_platform.database.paging import fetch, unknown_cursor
from swiftkv_platform.database.session import Database
from swiftkv_platform.database.tables import DeploymentRow, ModelRow
from swiftkv_platform.errors import ConflictError, NotFoundError
from swiftkv_platform.orchestration.job import Model
from swiftkv_platform.orchestration.ports import (
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
    Page,
    Slice,
)

_SPEC = TypeAdapter(DeploymentSpec)
_STATE = TypeAdapter(DeploymentState)


class SqlCatalog:
    """`Catalog` on a `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get_model(self, model_id: str, *, tenant: str) -> Model:
        with self._database.reading() as session:
            row = session.get(ModelRow, model_id)
            if row is None or row.tenant != tenant:
                raise NotFoundError(
                    f"there is no model {model_id}; GET /models lists them", field="model", value=model_id
                )
            return read_model(row)

    def list_models(self, page: Page, *, tenant: str) -> Slice[Model]:
        with self._database.reading() as session:
            if page.after is not None:
                seen = session.get(ModelRow, page.after)
                if seen is None or seen.tenant != tenant:
                    raise unknown_cursor(page.after)
            query = select(ModelRow).where(ModelRow.tenant == tenant)
            rows = fetch(session, query, ModelRow.id, page, after=page.after)
            return Slice([read_model(row) for row in rows.items], rows.has_more)

    def create_deployment(self, deployment: Deployment) -> Deployment:
        try:
            with self._database.writing() as session:
                session.add(
                    DeploymentRow(
                        id=deployment.spec.id,
                        tenant=deployment.tenant,
                        created_at=deployment.created_at,
                        model=deployment.spec.model,
                        held_route=deployment.spec.route_prefix,
                        spec=_SPEC.dump_python(deployment.spec, mode="json"),
                        state=_STATE.dump_python(deployment.state, mode="json"),
                    )
                )
        except IntegrityError as error:
            raise self._route_taken(deployment.spec.route_prefix) from error
        return deployment

    def get_deployment(self, deployment_id: str, *, tenant: str) -> Deployment:
        with self._database.reading() as session:
            row = session.get(DeploymentRow, deployment_id)
            if row is None or row.tenant != tenant:
                raise _unknown(deployment_id)
            return read_deployment(row)

    def list_deployments(self, page: Page, *, tenant: str) -> Slice[Deployment]:
        with self._database.reading() as session:
            if page.after is not None:
                seen = session.get(DeploymentRow, page.after)
                if seen is None or seen.tenant != tenant:
                    raise unknown_cursor(page.after)
            query = select(DeploymentRow).where(DeploymentRow.tenant == tenant)
            rows = fetch(session, query, DeploymentRow.id, page, after=page.after)
            return Slice([read_deployment(row) for row in rows.items], rows.has_more)

    def all_deployments(self) -> Sequence[Deployment]:
        with self._database.reading() as session:
            return [read_deployment(row) for row in session.scalars(select(DeploymentRow).order_by(DeploymentRow.id))]

    def update_deployment(self, spec: DeploymentSpec, state: DeploymentState, *, tenant: str) -> Deployment:
        with self._database.writing() as session:
            row = session.get(DeploymentRow, spec.id, with_for_update=True)
            if row is None or row.tenant != tenant:
                raise _unknown(spec.id)
            if _state(row.state).status is DeploymentStatus.DELETING:
                raise ConflictError(
                    f"deployment {spec.id} is being deleted; create another one", field="deployment_id", value=spec.id
                )
            write_deployment(row, spec, state)
            return read_deployment(row)

    def set_deployment_state(
        self, deployment_id: str, state: DeploymentState, *, of: DeploymentSpec | None = None
    ) -> None:
        with self._database.writing() as session:
            row = session.get(DeploymentRow, deployment_id, with_for_update=True)
            if row is None or _state(row.state).status is DeploymentStatus.DELETING:
                return
            if of is not None and _SPEC.validate_python(row.spec) != of:
                return
            row.state = _STATE.dump_python(state, mode="json")
            if state.status is DeploymentStatus.DELETING:
                row.held_route = None

    def remove_deployment(self, deployment_id: str) -> None:
        with self._database.writing() as session:
            row = session.get(DeploymentRow, deployment_id)
            if row is not None:
                session.delete(row)

    def _route_taken(self, route_prefix: str) -> ConflictError:
        with self._database.reading() as session:
            holder = session.scalar(select(DeploymentRow.id).where(DeploymentRow.held_route == route_prefix))
        return ConflictError(
            f"route_prefix {route_prefix!r} is held by deployment {holder}; delete that one or choose another prefix",
            field="route_prefix",
            value=route_prefix,
        )


def _unknown(deployment_id: str) -> NotFoundError:
    return NotFoundError(
        f"there is no deployment {deployment_id}; GET /deployments lists them",
        field="deployment_id",
        value=deployment_id,
    )


def read_model(row: ModelRow) -> Model:
    return Model(**{name: getattr(row, name) for name in Model.__dataclass_fields__})


def _state(document: dict[str, Any]) -> DeploymentState:
    return _STATE.validate_python(document)


def read_deployment(row: DeploymentRow) -> Deployment:
    return Deployment(_SPEC.validate_python(row.spec), row.tenant, row.created_at, _state(row.state))


def write_deployment(row: DeploymentRow, spec: DeploymentSpec, state: DeploymentState) -> None:
    """Something else is wanted of it; its route prefix stays."""
    row.model = spec.model
    row.spec = _SPEC.dump_python(spec, mode="json")
    row.state = _STATE.dump_python(state, mode="json")
