"""Deployments and their rows. Knows the holder of a route, nothing about serving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from swiftkv_platform.contract.autoscaling import compute_replica_resources
from swiftkv_platform.control_plane.access.tenants import DEFAULT_POLICY, Demand, TenantPolicy
from swiftkv_platform.control_plane.access.usage import check_count_quota, check_storage_quota, sum_demand
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.database.session import (
    Database,
    Repository,
    fetch_page,
    fetch_rows,
    get_tenant_row,
    make_deployments_lock_key,
    make_unreadable_row_error,
    parse_readable_rows,
    split_into_batches,
)
from swiftkv_platform.control_plane.database.tables import DeploymentRow, ModelRow, PromotionRow
from swiftkv_platform.errors import ConflictError, InvalidInputError
from swiftkv_platform.specs.base import STORED_CONTEXT
from swiftkv_platform.specs.deployment import ResolvedDeployment


class DeploymentStatus(StrEnum):
    PENDING = "pending"
    """Stored, not yet handed to the cluster."""
    DEPLOYING = "deploying"
    RUNNING = "running"
    SWAPPING = "swapping"
    """The previous version answers while the wanted one is loaded."""
    REFUSED = "refused"
    """The previous version answers; the wanted one was refused."""
    UNHEALTHY = "unhealthy"
    """Some replica that ran does not run any more."""
    FAILED = "failed"
    """The deployment could not be started."""
    DELETING = "deleting"


@dataclass(frozen=True)
class DeploymentState:
    """The serving cluster's view of a deployment."""

    status: DeploymentStatus
    message: str = ""
    replicas: int = 0
    """Replicas running now."""
    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`fetch`, `load`, `check`) of the replica that took longest to serve the model."""
    unknown_since: int | None = None
    """Unix seconds since which the cluster has not reported the other fields; None while it reports them."""


@dataclass(frozen=True)
class Deployment:
    """A served model."""

    spec: ResolvedDeployment
    tenant: str
    created_at: int
    state: DeploymentState = DeploymentState(DeploymentStatus.PENDING)
    version: int = 1
    """Increases with every change of `spec`, and only then."""


def replace_model(spec: ResolvedDeployment, model: str, artifact_uri: str) -> ResolvedDeployment:
    """Return the spec of a deployment whose alias points to another model. Raises `InvalidInputError` for a model that
    one of its adapters is, or is named like."""
    if any(model in (each.model, each.name) for each in spec.adapters or ()):
        raise InvalidInputError.for_field(
            "model",
            model,
            f"; deployment {spec.id} follows alias {spec.alias!r} and already serves this model as an adapter; remove "
            "the model from the deployment's adapters first",
        )
    return spec.model_copy(update={"model": model, "artifact_uri": artifact_uri})


def apply_change(deployment: Deployment, spec: ResolvedDeployment) -> tuple[ResolvedDeployment, DeploymentState]:
    """Return (spec, state) of a deployment after a change that the cluster has not applied yet."""
    if spec == deployment.spec:
        return spec, deployment.state
    status = deployment.state.status
    if status in (DeploymentStatus.RUNNING, DeploymentStatus.REFUSED, DeploymentStatus.UNHEALTHY):
        status = DeploymentStatus.SWAPPING
    elif status is DeploymentStatus.FAILED:
        status = DeploymentStatus.DEPLOYING
    return spec, DeploymentState(status, "applying the change", deployment.state.replicas)


def make_replica_bundle(spec: ResolvedDeployment) -> dict[str, float]:
    """Return the resources that a replica requires on one node, by Ray's resource names."""
    resources = compute_replica_resources(spec.engine)
    return {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}


Admit = Callable[[Demand], None]
ComputeDeploymentChange = Callable[[Deployment, Demand], tuple[ResolvedDeployment, DeploymentState]]
"""Function: (deployment, demand of its tenant's jobs and other deployments) -> (new spec, new state)."""


REPLICA_PATHS = frozenset({"generate", "v1", "tokenize", "detokenize", "health", "metrics", "openapi.json", "docs"})
"""First segments of the paths that a replica answers below its prefix."""


def find_outer_routes(route_prefix: str) -> list[str]:
    """Return the prefixes whose deployments would lose requests to this one, since it continues them with a path that
    replicas answer: /a/v1/b -> [/a]."""
    segments = route_prefix.split("/")
    return ["/".join(segments[:end]) or "/" for end in range(1, len(segments)) if segments[end] in REPLICA_PATHS]


def find_inner_routes(route_prefix: str) -> list[str]:
    """Return the beginnings of prefixes that would take requests from this one: /a -> [/a/docs/, /a/generate/, ...].
    A prefix that is followed by "/" counts as its own beginning."""
    return [f"{route_prefix.rstrip('/')}/{path}/" for path in sorted(REPLICA_PATHS)]


_STATE_ADAPTER = TypeAdapter(DeploymentState)
_ParsedRow = tuple[int, Any, Deployment]
"""(row's version, stored state, deployment of the row)"""


class DeploymentRepository(Repository):
    """Deployments of all tenants. Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._parsed: dict[str, _ParsedRow] = {}
        """Deployments by id, as `list_all_deployments` last read them."""

    def create_deployment(
        self, deployment: Deployment, *, policy: TenantPolicy = DEFAULT_POLICY, admit: Admit | None = None
    ) -> Deployment:
        """Store a deployment; concurrent changes of the tenant's deployments wait.

        Args:
            policy: says how many deployments and bytes the tenant may have, this one included.
            admit: raises if the tenant's other jobs and deployments leave no room for it.

        Raises `QuotaExceededError`, and `ConflictError` if another deployment's route prefix interferes, naming it only
        if it is the same tenant's.
        """
        with self._database.begin_write() as session:
            # 1. the tenant's number of deployments and its other holdings  2. the route  3. the row
            self._lock_deployments(session, deployment.tenant)
            check_count_quota(session, "max_deployments", deployment.tenant, policy)
            if admit is not None:
                admit(sum_demand(session, deployment.tenant, exclude=deployment.spec.id))
            _check_capture_quota(session, deployment, None, policy)
            self._database.lock(session, "deployment routes")
            _check_route(session, deployment)
            deployment = replace(deployment, spec=_resolve_alias(session, deployment.spec, deployment.tenant))
            session.add(
                DeploymentRow(
                    id=deployment.spec.id,
                    tenant=deployment.tenant,
                    created_at=deployment.created_at,
                    held_route=deployment.spec.route_prefix,
                    spec=deployment.spec.model_dump(mode="json"),
                    state=_STATE_ADAPTER.dump_python(deployment.state, mode="json"),
                    version=deployment.version,
                    **_make_columns(deployment.spec),
                )
            )
        return deployment

    def get_deployment(self, deployment_id: str, *, tenant: str) -> Deployment:
        """Return a deployment. Raises `NotFoundError`."""
        with self._database.begin_read() as session:
            return read_deployment(get_tenant_row(session, DeploymentRow, deployment_id, tenant))

    def list_deployments(self, page: PageQuery, *, tenant: str) -> Page[Deployment]:
        with self._database.begin_read() as session:
            rows = fetch_page(session, DeploymentRow, page, tenant)
            deployments, left_out = parse_readable_rows(rows.items, read_deployment)
            return Page(deployments, rows.has_more, left_out)

    def list_all_deployments(self) -> Page[Deployment]:
        """Return all deployments, oldest first. Ids of unreadable rows are in `left_out`: they must stay served too.

        Only specs that were created or changed since the last call are read and parsed.
        """
        heads = select(DeploymentRow.id, DeploymentRow.version, DeploymentRow.state).order_by(DeploymentRow.id)
        rows: list[DeploymentRow] = []
        with self._database.begin_read() as session:
            present = {row_id: (version, state) for row_id, version, state in session.execute(heads)}
            parsed = {row_id: self._parsed[row_id] for row_id in present.keys() & self._parsed.keys()}
            parsed = {row_id: found for row_id, found in parsed.items() if found[:2] == present[row_id]}
            for ids in split_into_batches([row_id for row_id in present if row_id not in parsed]):
                rows += session.scalars(select(DeploymentRow).where(DeploymentRow.id.in_(ids)))
        read, left_out = parse_readable_rows(rows, lambda row: (row, read_deployment(row)))
        for row, deployment in read:
            parsed[row.id] = (row.version, row.state, deployment)
            if any(getattr(row, name) != value for name, value in _make_columns(deployment.spec).items()):
                self._fill_missing_columns(row.id)
        self._parsed = parsed
        return Page(
            [parsed[row_id][2] for row_id in present if row_id in parsed], has_more=False, unreadable_ids=left_out
        )

    def _fill_missing_columns(self, deployment_id: str) -> None:
        """Set the missing columns of a row that an earlier version of this program wrote with the spec only."""
        with self._database.begin_write() as session:
            row = session.get(DeploymentRow, deployment_id, with_for_update=True)
            if row is not None:
                _set_columns(row, read_deployment(row).spec)

    def list_deployments_of_model(self, model_id: str, *, tenant: str, limit: int) -> Sequence[Deployment]:
        """Return the newest deployments that serve a model."""
        query = select(DeploymentRow).where(DeploymentRow.model == model_id, DeploymentRow.tenant == tenant)
        with self._database.begin_read() as session:
            rows = fetch_rows(session, query, DeploymentRow.id, PageQuery(limit=limit), after=None).items
            return parse_readable_rows(rows, read_deployment)[0]

    def change_deployment(
        self,
        deployment_id: str,
        change: ComputeDeploymentChange,
        *,
        tenant: str,
        policy: TenantPolicy = DEFAULT_POLICY,
    ) -> Deployment:
        """Store what `change` returns for the present deployment; other changes of the tenant's deployments wait.

        Its route prefix stays, and a deployment that follows an alias gets the alias's present model. `policy`: says
        how many bytes the tenant may have. Raises `NotFoundError`, `ConflictError` for a deployment that is being
        deleted, `QuotaExceededError`, and what `change` raises; then nothing is stored.
        """
        with self._database.begin_write() as session:
            self._lock_deployments(session, tenant)
            row = get_tenant_row(session, DeploymentRow, deployment_id, tenant, lock=True)
            deployment = read_deployment(row)
            if deployment.state.status is DeploymentStatus.DELETING:
                message = f"deployment {deployment_id} is being deleted; create another one"
                raise ConflictError(message, field="deployment_id", value=deployment_id)
            spec, state = change(deployment, sum_demand(session, tenant, exclude=deployment_id))
            _check_capture_quota(session, replace(deployment, spec=spec), deployment.spec, policy)
            write_deployment(row, _resolve_alias(session, spec, tenant), state)
            return read_deployment(row)

    def set_deployment_state(
        self, deployment_id: str, state: DeploymentState, *, of: ResolvedDeployment | None = None
    ) -> None:
        """Store the cluster's state of a deployment. `deleting` is final, and frees the route prefix. `of`: the spec
        that the state describes; if it has changed since, nothing is stored."""
        with self._database.begin_write() as session:
            row = session.get(DeploymentRow, deployment_id, with_for_update=True)
            if row is None or _STATE_ADAPTER.validate_python(row.state).status is DeploymentStatus.DELETING:
                return
            if of is not None and ResolvedDeployment.model_validate(row.spec, context=STORED_CONTEXT) != of:
                return
            row.state = _STATE_ADAPTER.dump_python(state, mode="json")
            if state.status is DeploymentStatus.DELETING:
                row.held_route = None

    def _lock_deployments(self, session: Session, tenant: str) -> None:
        """Wait until no other transaction changes the tenant's wanted deployments or its aliases."""
        self._database.lock(session, make_deployments_lock_key(tenant))

    def remove_deployment(self, deployment_id: str) -> None:
        """Delete the row of a deployment that is no longer served."""
        with self._database.begin_write() as session:
            row = session.get(DeploymentRow, deployment_id)
            if row is not None:
                session.delete(row)


def _check_capture_quota(
    session: Session, wanted: Deployment, previous: ResolvedDeployment | None, policy: TenantPolicy
) -> None:
    """Raise `QuotaExceededError` if captured traffic may take more bytes than before, and more than the quota."""
    reserved = [
        0 if spec is None or spec.capture is None else spec.capture.max_bytes for spec in (wanted.spec, previous)
    ]
    if (added := reserved[0] - reserved[1]) > 0:
        check_storage_quota(session, wanted.tenant, added, policy)


def _check_route(session: Session, wanted: Deployment) -> None:
    """Raise `ConflictError` if a deployment's route interferes; another tenant's is not named."""
    route_prefix, held = wanted.spec.route_prefix, DeploymentRow.held_route
    below = (func.substr(held + "/", 1, len(inner)) == inner for inner in find_inner_routes(route_prefix))
    interfering = select(held).where(or_(held.in_([route_prefix, *find_outer_routes(route_prefix)]), *below))
    held_route = session.scalar(interfering.limit(1))
    if held_route is None:
        return
    holder, tenant = session.execute(select(DeploymentRow.id, DeploymentRow.tenant).where(held == held_route)).one()
    if tenant != wanted.tenant:
        why = "the prefix is taken or overlaps with another route; choose another prefix"
    elif held_route == route_prefix:
        why = f"it belongs to deployment {holder}; delete that one or choose another prefix"
    else:
        why = (
            f"it overlaps with deployment {holder} at {held_route!r}, and the longest prefix wins; choose another "
            "prefix"
        )
    raise ConflictError(f"route_prefix is {route_prefix!r}: {why}", field="route_prefix", value=route_prefix)


def _resolve_alias(session: Session, spec: ResolvedDeployment, tenant: str) -> ResolvedDeployment:
    """Return the spec with the model that its alias points to in this transaction. Raises as `replace_model`."""
    if spec.alias is None:
        return spec
    promotions = select(PromotionRow.model).where(PromotionRow.tenant == tenant, PromotionRow.alias == spec.alias)
    model_id = session.scalar(promotions.order_by(PromotionRow.sequence.desc()).limit(1))
    if model_id is None or model_id == spec.model:
        return spec
    artifact_uri = session.scalars(select(ModelRow.artifact_uri).where(ModelRow.id == model_id)).one()
    return replace_model(spec, model_id, artifact_uri)


def read_deployment(row: DeploymentRow) -> Deployment:
    """Return the row's value. Raises `UnreadableRowError`."""
    try:
        spec = ResolvedDeployment.model_validate(row.spec, context=STORED_CONTEXT)
        return Deployment(spec, row.tenant, row.created_at, _STATE_ADAPTER.validate_python(row.state), row.version)
    except (ValidationError, TypeError) as error:
        raise make_unreadable_row_error("deployment", row.id, error) from error


def write_deployment(row: DeploymentRow, spec: ResolvedDeployment, state: DeploymentState) -> None:
    """Write a changed spec and state into the row. Its route prefix stays, and so do fields of newer versions."""
    newer = {name: value for name, value in row.spec.items() if name not in ResolvedDeployment.model_fields}
    document = {**newer, **spec.model_dump(mode="json")}
    if document != row.spec:
        row.version += 1
    _set_columns(row, spec)
    row.spec = document
    row.state = _STATE_ADAPTER.dump_python(state, mode="json")


def _make_columns(spec: ResolvedDeployment) -> dict[str, Any]:
    """Return the columns that hold parts of a spec."""
    demand = Demand.for_deployment(spec)
    return {
        "model": spec.model,
        "alias": spec.alias,
        "candidate": None if spec.candidate is None else spec.candidate.model,
        "replicas": demand.replicas,
        "gpus": demand.gpus,
        "cpus": demand.cpus,
    }


def _set_columns(row: DeploymentRow, spec: ResolvedDeployment) -> None:
    for name, value in _make_columns(spec).items():
        setattr(row, name, value)
