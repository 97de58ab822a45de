"""Contract of a database for models and deployments: SQLite and PostgreSQL alike."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text

from swiftkv_platform.database.catalog import SqlCatalog, SqlRegistry
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import ConflictError, NotFoundError, UnreadableRowError
from swiftkv_platform.orchestration.deployment import Deployment, DeploymentState, DeploymentStatus, Holdings
from swiftkv_platform.orchestration.job import Model, new_id
from swiftkv_platform.orchestration.ports import Page
from swiftkv_platform.orchestration.registry import RegistryService
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.records import TENANT, make_job, make_model, store
from tests.threads import at_once


def test_a_model_is_stored_with_its_job(jobs: SqlJobRepository, catalog: SqlCatalog) -> None:
    job = store(jobs, make_job())
    model = make_model(job)
    jobs.update(replace(job, distilled_model=model.id), model=model)
    assert catalog.get_model(model.id, tenant=TENANT) == model
    assert catalog.list_models(Page(), tenant=TENANT).items == [model]
    with pytest.raises(NotFoundError):
        catalog.get_model(model.id, tenant="other")


@pytest.fixture
def model(jobs: SqlJobRepository) -> Model:
    job = store(jobs, make_job())
    model = make_model(job)
    jobs.update(job, model=model)
    return model


def make_deployment(model: Model, route_prefix: str = "/") -> Deployment:
    spec = ResolvedDeployment(
        id=new_id("dep"),
        model=model.id,
        artifact_uri=model.artifact_uri,
        route_prefix=route_prefix,
        engine={"dtype": "bfloat16"},
    )
    return Deployment(spec, TENANT, 300)


def test_a_route_is_held_until_its_deployment_is_being_deleted(catalog: SqlCatalog, model: Model) -> None:
    holder = catalog.create_deployment(make_deployment(model))
    assert catalog.get_deployment(holder.spec.id, tenant=TENANT) == holder
    with pytest.raises(ConflictError, match=holder.spec.id):
        catalog.create_deployment(make_deployment(model))
    other = catalog.create_deployment(make_deployment(model, "/other"))
    catalog.set_deployment_state(holder.spec.id, DeploymentState(DeploymentStatus.DELETING))
    heir = catalog.create_deployment(make_deployment(model))
    assert [item.spec.id for item in catalog.all_deployments()] == [holder.spec.id, other.spec.id, heir.spec.id]


def test_a_deployment_that_is_being_deleted_stays_so(catalog: SqlCatalog, model: Model) -> None:
    deployment = catalog.create_deployment(make_deployment(model)).spec.id
    running = DeploymentState(DeploymentStatus.RUNNING, "ready", 2, {"fetch": 1.5, "load": 2.0, "check": 0.25})
    catalog.set_deployment_state(deployment, running)
    assert catalog.get_deployment(deployment, tenant=TENANT).state == running
    catalog.set_deployment_state(deployment, DeploymentState(DeploymentStatus.DELETING))
    catalog.set_deployment_state(deployment, running)
    assert catalog.get_deployment(deployment, tenant=TENANT).state.status is DeploymentStatus.DELETING
    catalog.remove_deployment(deployment)
    catalog.remove_deployment(deployment)
    with pytest.raises(NotFoundError):
        catalog.get_deployment(deployment, tenant=TENANT)


def test_a_change_of_a_deployment_outlives_what_was_said_of_the_one_before(catalog: SqlCatalog, model: Model) -> None:
    before = catalog.create_deployment(make_deployment(model)).spec
    after = before.model_copy(update={"engine": {"dtype": "float32"}, "max_replicas": 3})
    swapping = DeploymentState(DeploymentStatus.SWAPPING)
    catalog.set_deployment_state(before.id, DeploymentState(DeploymentStatus.DEPLOYING), of=before)
    seen: list[Deployment] = []

    def change(present: Deployment, held: Holdings) -> tuple[ResolvedDeployment, DeploymentState]:
        seen.append(present)
        return after, swapping

    changed = catalog.change_deployment(after.id, change, tenant=TENANT)
    assert [(item.spec, item.state.status, item.version) for item in seen] == [(before, DeploymentStatus.DEPLOYING, 1)]
    assert (changed.spec, changed.state, changed.version) == (after, swapping, 2)
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=before)
    assert catalog.get_deployment(after.id, tenant=TENANT) == changed
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=after)
    assert catalog.get_deployment(after.id, tenant=TENANT).state.status is DeploymentStatus.RUNNING
    assert catalog.change_deployment(after.id, change, tenant=TENANT).version == 2, "nothing else is wanted of it"
    with pytest.raises(NotFoundError):
        catalog.change_deployment(after.id, change, tenant="other")
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.DELETING))
    with pytest.raises(ConflictError, match="being deleted"):
        catalog.change_deployment(after.id, change, tenant=TENANT)


@pytest.mark.parametrize("damage", ['\'{"not": "a deployment"}\'', "'[]'"])
def test_a_deployment_that_cannot_be_read_hides_no_other(
    database: Database, catalog: SqlCatalog, model: Model, damage: str
) -> None:
    damaged, sound = (catalog.create_deployment(make_deployment(model, path)) for path in ("/damaged", "/sound"))
    with database.writing() as session:
        session.execute(text(f"UPDATE deployments SET spec = {damage} WHERE id = :id"), {"id": damaged.spec.id})
    assert catalog.all_deployments() == [sound]
    listed = catalog.list_deployments(Page(), tenant=TENANT)
    assert (listed.items, listed.left_out) == ([sound], [damaged.spec.id])
    with pytest.raises(UnreadableRowError, match=damaged.spec.id):
        catalog.get_deployment(damaged.spec.id, tenant=TENANT)
    held: list[Holdings] = []
    catalog.create_deployment(make_deployment(model, "/third"), admit=held.append)
    assert held[0].deployments == [sound.spec]


def test_a_deployment_that_a_newer_version_has_stored_is_served_on(
    database: Database, catalog: SqlCatalog, model: Model
) -> None:
    stored = catalog.create_deployment(make_deployment(model))
    document = json.dumps({**stored.spec.model_dump(mode="json"), "colour": "red"})
    with database.writing() as session:
        session.execute(
            text("UPDATE deployments SET spec = :spec WHERE id = :id"), {"spec": document, "id": stored.spec.id}
        )
    assert catalog.all_deployments() == [stored]


def test_what_is_wanted_at_once_is_given_once_and_changed_one_after_another(
    database: Database, catalog: SqlCatalog, model: Model
) -> None:
    made = at_once(partial(catalog.create_deployment, make_deployment(model)) for _ in range(8))
    [holder] = [each for each in made if isinstance(each, Deployment)]
    assert sum(isinstance(each, ConflictError) for each in made) == 7

    def change(number: int) -> Deployment:
        def more(present: Deployment, _held: Holdings) -> tuple[ResolvedDeployment, DeploymentState]:
            engine = {**present.spec.engine, f"option_{number}": number}
            return present.spec.model_copy(update={"engine": engine}), present.state

        return catalog.change_deployment(holder.spec.id, more, tenant=TENANT)

    versions = [each.version for each in at_once(partial(change, number) for number in range(8))]
    assert sorted(versions) == list(range(2, 10))
    assert len(catalog.get_deployment(holder.spec.id, tenant=TENANT).spec.engine) == 9
    registry = SqlRegistry(database)
    service = RegistryService(registry, clock=lambda: 1.0)
    at_once(
        partial(service.promote, model.id, f"alias{number % 2}", tenant=TENANT, by="ann", reason="better")
        for number in range(8)
    )
    assert sorted((each.alias, each.version) for each in registry.promotions(tenant=TENANT)) == [
        ("alias0", 1),
        ("alias1", 1),
    ]
