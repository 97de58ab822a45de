"""Contract of a database for models, deployments, files and deliveries of webhooks: SQLite and PostgreSQL alike."""

import json
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text

from swiftkv_platform.contract.attempts import new_file_id
from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery, new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.repository import (
    Deployment,
    DeploymentRepository,
    DeploymentState,
    DeploymentStatus,
)
from swiftkv_platform.control_plane.files.repository import File, FileRepository
from swiftkv_platform.control_plane.jobs.job import JobStatus, make_status_event, start_attempt
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.webhooks import Outbox
from swiftkv_platform.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    StaleVersionError,
    UnreadableRowError,
)
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.support.records import TENANT, make_job, make_model, store
from tests.support.threads import at_once


@pytest.fixture
def model(jobs: JobRepository) -> Model:
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


def test_a_route_is_held_until_its_deployment_is_being_deleted(catalog: DeploymentRepository, model: Model) -> None:
    holder = catalog.create_deployment(make_deployment(model))
    assert catalog.get_deployment(holder.spec.id, tenant=TENANT) == holder
    with pytest.raises(ConflictError, match=holder.spec.id):
        catalog.create_deployment(make_deployment(model))
    other = catalog.create_deployment(make_deployment(model, "/other"))
    catalog.set_deployment_state(holder.spec.id, DeploymentState(DeploymentStatus.DELETING))
    heir = catalog.create_deployment(make_deployment(model))
    assert [item.spec.id for item in catalog.list_all_deployments().items] == [
        holder.spec.id,
        other.spec.id,
        heir.spec.id,
    ]


def test_a_deployment_that_is_being_deleted_stays_so(catalog: DeploymentRepository, model: Model) -> None:
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


def test_a_change_of_a_deployment_outlives_what_was_said_of_the_one_before(
    catalog: DeploymentRepository, model: Model
) -> None:
    before = catalog.create_deployment(make_deployment(model)).spec
    after = before.model_copy(update={"engine": {"dtype": "float32"}, "max_replicas": 3})
    swapping = DeploymentState(DeploymentStatus.SWAPPING)
    catalog.set_deployment_state(before.id, DeploymentState(DeploymentStatus.DEPLOYING), of=before)
    seen: list[Deployment] = []

    def change(present: Deployment, held: Demand) -> tuple[ResolvedDeployment, DeploymentState]:
        seen.append(present)
        return after, swapping

    changed = catalog.change_deployment(after.id, change, tenant=TENANT)
    assert [(item.spec, item.state.status, item.version) for item in seen] == [(before, DeploymentStatus.DEPLOYING, 1)]
    assert (changed.spec, changed.state, changed.version) == (after, swapping, 2)
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=before)
    assert catalog.get_deployment(after.id, tenant=TENANT) == changed
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=after)
    assert catalog.get_deployment(after.id, tenant=TENANT).state.status is DeploymentStatus.RUNNING
    assert catalog.change_deployment(after.id, change, tenant=TENANT).version == 2, "an equal change is no new version"
    with pytest.raises(NotFoundError):
        catalog.change_deployment(after.id, change, tenant="other")
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.DELETING))
    with pytest.raises(ConflictError, match="being deleted"):
        catalog.change_deployment(after.id, change, tenant=TENANT)


@pytest.mark.parametrize("damage", ['\'{"not": "a deployment"}\'', "'[]'"])
def test_a_deployment_that_cannot_be_read_hides_no_other(
    database: Database, catalog: DeploymentRepository, model: Model, damage: str
) -> None:
    damaged, sound = (catalog.create_deployment(make_deployment(model, path)) for path in ("/damaged", "/sound"))
    with database.begin_write() as session:
        session.execute(text(f"UPDATE deployments SET spec = {damage} WHERE id = :id"), {"id": damaged.spec.id})
    assert (catalog.list_all_deployments().items, catalog.list_all_deployments().unreadable_ids) == (
        [sound],
        [damaged.spec.id],
    )
    listed = catalog.list_deployments(PageQuery(), tenant=TENANT)
    assert (listed.items, listed.unreadable_ids) == ([sound], [damaged.spec.id])
    with pytest.raises(UnreadableRowError, match=damaged.spec.id):
        catalog.get_deployment(damaged.spec.id, tenant=TENANT)
    held: list[Demand] = []
    catalog.create_deployment(make_deployment(model, "/third"), admit=held.append)
    assert held == [Demand(replicas=2, cpus=2.0)], "it may still be served"


def test_a_deployment_that_a_newer_version_has_stored_is_served_on(
    database: Database, catalog: DeploymentRepository, model: Model
) -> None:
    stored = catalog.create_deployment(make_deployment(model))
    document = json.dumps({**stored.spec.model_dump(mode="json"), "colour": "red"})
    with database.begin_write() as session:
        session.execute(
            text("UPDATE deployments SET spec = :spec WHERE id = :id"), {"spec": document, "id": stored.spec.id}
        )
    assert catalog.list_all_deployments().items == [stored]

    def change(present: Deployment, held: Demand) -> tuple[ResolvedDeployment, DeploymentState]:
        return present.spec.model_copy(update={"max_replicas": 7}), present.state

    catalog.change_deployment(stored.spec.id, change, tenant=TENANT)
    with database.begin_read() as session:
        kept = session.execute(text("SELECT spec FROM deployments")).scalar_one()
    kept = json.loads(kept) if isinstance(kept, str) else kept
    assert (kept["colour"], kept["max_replicas"]) == ("red", 7), "a newer version finds the fields that it stored"


def test_what_is_wanted_at_once_is_given_once_and_changed_one_after_another(
    database: Database, catalog: DeploymentRepository, model: Model
) -> None:
    made = at_once(partial(catalog.create_deployment, make_deployment(model)) for _ in range(8))
    [holder] = [each for each in made if isinstance(each, Deployment)]
    assert sum(isinstance(each, ConflictError) for each in made) == 7

    def change(number: int) -> Deployment:
        def more(present: Deployment, _held: Demand) -> tuple[ResolvedDeployment, DeploymentState]:
            engine = {**present.spec.engine, f"option_{number}": number}
            return present.spec.model_copy(update={"engine": engine}), present.state

        return catalog.change_deployment(holder.spec.id, more, tenant=TENANT)

    versions = [each.version for each in at_once(partial(change, number) for number in range(8))]
    assert sorted(versions) == list(range(2, 10))
    assert len(catalog.get_deployment(holder.spec.id, tenant=TENANT).spec.engine) == 9
    registry = ModelRepository(database)
    service = RegistryService(registry, lambda: 1.0, TenantPolicies())
    at_once(
        partial(service.promote, model.id, f"alias{number % 2}", tenant=TENANT, by="ann", reason="better")
        for number in range(8)
    )
    assert sorted((each.alias, each.version) for each in registry.list_promotions(tenant=TENANT)) == [
        ("alias0", 1),
        ("alias1", 1),
    ]


def make_file(*, tenant: str = TENANT, size: int = 10, expires_at: int | None = None) -> File:
    return File(
        id=new_file_id(),
        tenant=tenant,
        created_by="ann",
        created_at=100,
        filename="rows.jsonl",
        purpose="fine-tune",
        size=size,
        rows=1,
        sha256="0" * 64,
        format="text",
        columns=("text",),
        expires_at=expires_at,
    )


def using(file: File) -> dict[str, object]:
    return {"sources": [{"name_or_path": file.id}]}


@pytest.fixture
def files(database: Database) -> FileRepository:
    return FileRepository(database)


def test_a_file_comes_back_as_it_was_stored_to_its_tenant_alone(files: FileRepository) -> None:
    file, other = files.add(make_file(expires_at=1 << 40)), files.add(make_file(tenant="other"))
    assert files.get(file.id, tenant=TENANT) == file
    assert files.find_existing([file.id, other.id], tenant=TENANT) == {file.id: file}
    assert files.list(PageQuery(), tenant=TENANT).items == [file]
    assert files.list_existing_ids([file.id, other.id, new_file_id()]) == {file.id, other.id}
    for attempt in (lambda: files.get(other.id, tenant=TENANT), lambda: files.remove(other.id, tenant=TENANT)):
        with pytest.raises(NotFoundError):
            attempt()
    with pytest.raises(InvalidInputError, match="after"):
        files.list(PageQuery(after=other.id), tenant=TENANT)
    assert files.list_expired(2.0**40, limit=5) == [file]
    assert files.list_expired(2.0**40 - 1, limit=5) == []


def test_no_file_goes_while_a_live_job_uses_it_and_no_job_comes_after_it(
    files: FileRepository, jobs: JobRepository
) -> None:
    file = files.add(make_file())
    job = store(jobs, make_job(data=using(file)))
    store(jobs, make_job())
    with pytest.raises(ConflictError, match=job.id):
        files.remove(file.id, tenant=TENANT)
    jobs.update(replace(job, status=JobStatus.FAILED))
    assert files.remove(file.id, tenant=TENANT) == file
    with pytest.raises(InvalidInputError, match="has been deleted"):
        store(jobs, make_job(data=using(file)))
    theirs = files.add(make_file(tenant="other"))
    with pytest.raises(InvalidInputError, match=theirs.id):
        store(jobs, make_job(data=using(theirs)))
    assert len(jobs.list(PageQuery(), tenant=TENANT).items) == 2


def test_of_a_job_and_a_deletion_at_once_one_is_refused(files: FileRepository, jobs: JobRepository) -> None:
    for _ in range(5):
        file = files.add(make_file())
        job = make_job(data=using(file))
        create = partial(jobs.create, job, make_status_event(job, now=100))
        outcomes = at_once([create, partial(files.remove, file.id, tenant=TENANT)])
        refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidInputError | ConflictError)]
        assert len(refused) == 1, outcomes


HOOK = {"url": "https://a.example/hook", "secret_ref": "signing"}


@pytest.fixture
def outbox(database: Database) -> Outbox:
    return Outbox(database)


def test_a_change_and_its_delivery_are_stored_together(jobs: JobRepository, outbox: Outbox) -> None:
    job = store(jobs, make_job(webhook=HOOK, metadata={"team": "blue"}))
    started, event = start_attempt(job, now=101)
    with pytest.raises(StaleVersionError):
        jobs.update(replace(started, version=7), events=[event])
    [first] = outbox.claim(now=200.0, until=260.0, limit=10)
    assert (first.event.data["status"], first.tenant, first.job_name) == ("queued", "acme", "test")
    assert (first.webhook.url, first.metadata, first.attempts) == (HOOK["url"], {"team": "blue"}, 0)
    outbox.mark_delivered(first.sequence, 201.0)
    assert outbox.claim(now=300.0, until=360.0, limit=10) == []
    jobs.update(started, events=[event])
    [second] = outbox.claim(now=300.0, until=360.0, limit=10)
    assert second.event == event
    assert outbox.count_by_status() == {"pending": 1, "delivered": 1, "failed": 0}


def test_a_jobs_deliveries_to_one_address_wait_for_each_other(jobs: JobRepository, outbox: Outbox) -> None:
    job, other = store(jobs, make_job(webhook=HOOK)), store(jobs, make_job(webhook=HOOK))
    started, event = start_attempt(job, now=101)
    jobs.update(started, events=[event])
    first = outbox.claim(now=200.0, until=260.0, limit=10)
    assert [delivery.event.job_id for delivery in first] == [job.id, other.id]
    outbox.reschedule(first[0].sequence, "answered with 500", 205.0)
    assert outbox.claim(now=204.0, until=264.0, limit=10) == []
    [again] = outbox.claim(now=205.0, until=265.0, limit=10)
    assert (again.sequence, again.attempts) == (first[0].sequence, 1)
    outbox.mark_failed(again.sequence, "answered with 500")
    assert [delivery.event for delivery in outbox.claim(now=206.0, until=266.0, limit=10)] == [event]


def test_a_claim_that_nobody_settles_runs_out(jobs: JobRepository, outbox: Outbox) -> None:
    store(jobs, make_job(webhook=HOOK))
    [claimed] = outbox.claim(now=200.0, until=260.0, limit=10)
    assert outbox.claim(now=259.0, until=300.0, limit=10) == []
    assert outbox.claim(now=260.0, until=320.0, limit=10) == [claimed]


def test_of_many_who_claim_at_once_one_gets_each(jobs: JobRepository, outbox: Outbox) -> None:
    for _ in range(20):
        store(jobs, make_job(webhook=HOOK))

    def claim() -> list[int]:
        claimed: list[int] = []
        while found := outbox.claim(now=200.0, until=260.0, limit=3):
            claimed += [delivery.sequence for delivery in found]
        return claimed

    claimed = [sequence for found in at_once([claim] * 4) for sequence in found]
    assert len(claimed) == len(set(claimed)) == 20


def test_deliveries_to_a_receiver_that_is_left_out_wait(jobs: JobRepository, outbox: Outbox) -> None:
    for url in ("https://A.example/hook", "https://a.example", "https://a.example.org/x", "https://a.example:8443/x"):
        store(jobs, make_job(webhook={**HOOK, "url": url}))
    claimed = outbox.claim(
        now=200.0, until=260.0, limit=10, excluded_origins=["https://a.example", "https://b_.example"]
    )
    assert [delivery.webhook.url for delivery in claimed] == ["https://a.example.org/x", "https://a.example:8443/x"]
    rest = outbox.claim(now=200.0, until=260.0, limit=10)
    assert [delivery.webhook.url for delivery in rest] == ["https://A.example/hook", "https://a.example"]
