"""Transactions that write one row read no others, however many there are: SQLite and PostgreSQL alike."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.engine.cursor import CursorFetchStrategy

from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies, TenantPolicy
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import DeploymentRow, PromotionRow
from swiftkv_platform.control_plane.deployments import repository
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.contract.test_catalog import make_deployment
from tests.support.records import TENANT
from tests.support.threads import at_once

MANY = 3000
FEW = 60
"""Most rows that a transaction may fetch, however many there are."""


@contextmanager
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect the numbers of rows that statements return meanwhile."""
    numbers: list[int] = []

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            numbers.append(len(found) if isinstance(found, list) else found is not None)
            return found

        return fetch

    with monkeypatch.context() as patched:
        for name in ("fetchone", "fetchmany", "fetchall"):
            patched.setattr(CursorFetchStrategy, name, counting(getattr(CursorFetchStrategy, name)))
        yield numbers


def repeat(
    database: Database, table: type, row_id: str, number: int, change: Callable[[int], Mapping[str, Any]]
) -> None:
    """Insert copies of a row, each with changed columns."""
    columns = table.__table__.columns  # type: ignore[attr-defined]
    with database.begin_write() as session:
        row = session.scalars(select(table).where(table.id == row_id)).one()  # type: ignore[attr-defined]
        values = {column.key: getattr(row, column.key) for column in columns if column.key != "sequence"}
        session.execute(insert(table), [{**values, **change(each)} for each in range(number)])


def many_deployments(database: Database, catalog: ModelRepository, model: Model) -> Deployment:
    """Store 3,000 deployments of the tenant; return one."""
    first = catalog.create_deployment(make_deployment(model, "/first"))
    first = replace(first, spec=first.spec.model_copy(update={"id": first.spec.id}))

    def other(number: int) -> dict[str, Any]:
        spec = first.spec.model_copy(update={"id": new_id("dep"), "route_prefix": f"/route-{number}"})
        return {"id": spec.id, "held_route": spec.route_prefix, "spec": spec.model_dump(mode="json")}

    repeat(database, DeploymentRow, first.spec.id, MANY, other)
    return first


def test_a_write_among_3000_deployments_reads_few_of_them(
    database: Database, registry: ModelRepository, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = models[:2]
    own = many_deployments(database, registry, first)
    held: list[Any] = []

    def scale(present: Deployment, beside: Any) -> tuple[ResolvedDeployment, DeploymentState]:
        held.append(beside)
        return present.spec.model_copy(update={"max_replicas": 3}), present.state

    def keep() -> None:
        with pytest.raises(ConflictError, match="serves"):
            RetentionRepository(database).delete_model(first.id, by="ann", now=1.0, tenant=TENANT)

    writes: dict[str, Callable[[], object]] = {
        "create": lambda: registry.create_deployment(
            make_deployment(first, "/new"), policy=TenantPolicy(max_deployments=None), admit=held.append
        ),
        "scale": lambda: registry.change_deployment(own.spec.id, scale, tenant=TENANT),
        "state": lambda: registry.set_deployment_state(own.spec.id, DeploymentState(DeploymentStatus.RUNNING)),
        "promote": lambda: RegistryService(registry, lambda: 1.0, TenantPolicies()).promote(
            other.id, "production", tenant=TENANT, by="ann", reason="better"
        ),
        "keep": keep,
        "delete": lambda: registry.set_deployment_state(own.spec.id, DeploymentState(DeploymentStatus.DELETING)),
        "remove": lambda: registry.remove_deployment(own.spec.id),
        "demand": lambda: JobRepository(database, TenantPolicies()).sum_tenant_demand(TENANT),
    }
    for name, write in writes.items():
        with fetched(monkeypatch) as numbers:
            write()
        assert 0 < sum(numbers) <= FEW, name
    assert held == [Demand(cpus=MANY + 1, replicas=MANY + 1)] * 2


def test_a_round_parses_only_deployments_that_have_changed(
    database: Database, registry: ModelRepository, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, read = many_deployments(database, registry, models[0]), list[str]()
    before = registry.list_all_deployments()
    assert len(before.items) == MANY + 1
    original = repository.read_deployment

    def reading(row: DeploymentRow) -> Deployment:
        read.append(row.id)
        return original(row)

    monkeypatch.setattr(repository, "read_deployment", reading)
    assert registry.list_all_deployments() == before
    assert read == []
    registry.set_deployment_state(own.spec.id, DeploymentState(DeploymentStatus.RUNNING, replicas=1))
    registry.change_deployment(
        before.items[7].spec.id,
        lambda present, _: (present.spec.model_copy(update={"max_replicas": 2}), present.state),
        tenant=TENANT,
    )
    registry.remove_deployment(before.items[9].spec.id)
    read.clear()
    after = {item.spec.id: item for item in registry.list_all_deployments().items}
    assert sorted(read) == sorted([own.spec.id, before.items[7].spec.id])
    assert after[own.spec.id].state.replicas == 1
    assert after[before.items[7].spec.id].spec.max_replicas == 2
    assert len(after) == MANY


def test_a_promotion_or_rollback_reads_little_of_a_long_history(
    database: Database, registry: ModelRepository, models: list[Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    promotions = RegistryService(registry, lambda: 1.0, TenantPolicies())
    first = promotions.promote(models[0].id, "production", tenant=TENANT, by="ann", reason="better")

    def later(number: int) -> dict[str, Any]:
        place = {"id": new_id("prm"), "version": number + 2}
        return {**place, "model": models[number % 2 == 0].id, "previous": models[number % 2].id}

    repeat(database, PromotionRow, first.id, MANY, later)
    changes: dict[str, Callable[[], object]] = {
        "again": lambda: promotions.promote(models[0].id, "production", tenant=TENANT, by="ann", reason="x"),
        "other": lambda: promotions.promote(models[2].id, "production", tenant=TENANT, by="ann", reason="x"),
        "back": lambda: promotions.roll_back("production", tenant=TENANT, by="ann", reason="x"),
        "further": lambda: promotions.roll_back("production", tenant=TENANT, by="ann", reason="x"),
        "find": lambda: promotions.find_model("production", TENANT),
    }
    for name, change in changes.items():
        with fetched(monkeypatch) as numbers:
            change()
        assert 0 < sum(numbers) <= FEW, name
    newest = registry.list_promotions(tenant=TENANT)[-1]
    assert (newest.action, newest.version, newest.model) == ("rollback", MANY + 4, models[1].id)


@pytest.mark.parametrize(
    ("held", "wanted", "interfere"),
    [
        ("/a", "/a", True),
        ("/a", "/a/v1", True),
        ("/a", "/a/v1/b", True),
        ("/a/v1/b", "/a", True),
        ("/a/v1", "/a", True),
        ("/", "/v1/b", True),
        ("/v1/b", "/", True),
        ("/a", "/a/generate", True),
        ("/metrics", "/", True),
        ("/", "/health/x", True),
        ("/tokenize", "/", True),
        ("/a", "/a/detokenize", True),
        ("/a/openapi.json/b", "/a", True),
        ("/", "/docs", True),
        ("/a", "/a/v2", False),
        ("/a/V1/b", "/a", False),
        ("/a", "/a/b/v1", False),
        ("/a", "/ab", False),
        ("/", "/a", False),
        ("/a/v1-b", "/a", False),
    ],
)
def test_routes_interfere_whichever_comes_first(
    catalog: ModelRepository, models: list[Model], held: str, wanted: str, interfere: bool
) -> None:
    holder = catalog.create_deployment(make_deployment(models[0], held))
    outcome = at_once([partial(catalog.create_deployment, make_deployment(models[0], wanted))])[0]
    assert isinstance(outcome, ConflictError) == interfere, outcome
    if isinstance(outcome, ConflictError):
        assert (outcome.field, holder.spec.id in str(outcome)) == ("route_prefix", True), outcome


def test_of_interfering_routes_wanted_at_once_one_is_given(catalog: ModelRepository, models: list[Model]) -> None:
    routes = [f"/x/v1/{number}" for number in range(3)] + ["/x"] * 3
    made = at_once(partial(catalog.create_deployment, make_deployment(models[0], route)) for route in routes)
    given = {each.spec.route_prefix for each in made if isinstance(each, Deployment)}
    assert given in ({"/x"}, {"/x/v1/0", "/x/v1/1", "/x/v1/2"}), made
    assert all(isinstance(each, Deployment | ConflictError) for each in made)


def served(registry: ModelRepository, model: Model, **fields: Any) -> Deployment:
    deployment = make_deployment(model, "/served")
    return registry.create_deployment(
        replace(deployment, spec=ResolvedDeployment.model_validate({**deployment.spec.model_dump(), **fields}))
    )


def columns_of(database: Database) -> list[tuple[Any, ...]]:
    table = DeploymentRow
    with database.begin_read() as session:
        parts = (table.id, table.alias, table.candidate, table.replicas, table.gpus, table.cpus)
        return [tuple(row) for row in session.execute(select(*parts).order_by(table.id))]


def test_what_an_earlier_program_writes_meanwhile_is_counted_from_the_next_round(
    database: Database, registry: ModelRepository, models: list[Model]
) -> None:
    """During a rolling upgrade, an earlier program stores deployments without the columns."""
    own = served(registry, models[0], alias="production")
    whole = columns_of(database)
    with database.begin_write() as session:
        session.execute(update(DeploymentRow).values(alias=None, replicas=0, gpus=0.0, cpus=0.0))
    registry.list_all_deployments()
    assert columns_of(database) == whole
    RegistryService(registry, lambda: 1.0, TenantPolicies()).promote(
        models[1].id, "production", tenant=TENANT, by="ann", reason="x"
    )
    assert registry.get_deployment(own.spec.id, tenant=TENANT).spec.model == models[1].id


def test_a_candidate_is_kept_as_the_served_model_is(
    database: Database, registry: ModelRepository, models: list[Model]
) -> None:
    candidate = {"model": models[1].id, "artifact_uri": models[1].artifact_uri}
    own = served(registry, models[0], candidate=candidate)
    for model in models[:2]:
        with pytest.raises(ConflictError, match=own.spec.id):
            RetentionRepository(database).delete_model(model.id, by="ann", now=1.0, tenant=TENANT)
