"""Contract of rows that are deleted after a time: SQLite and PostgreSQL alike."""

from dataclasses import replace
from typing import Any

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import SessionRow
from swiftkv_platform.control_plane.deployments.repository import Deployment
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, MetricPoint, transition
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.retention import JobDataKind, RetentionRepository
from swiftkv_platform.control_plane.webhooks import Outbox
from swiftkv_platform.errors import ConflictError, NotFoundError
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.specs.job import WebhookSpec
from tests.support.records import TENANT, make_job, make_model, message, store


@pytest.fixture
def rows(database: Database) -> RetentionRepository:
    return RetentionRepository(database)


def ended(jobs: JobRepository, *, now: int = 100, model: Model | None = None, tenant: str = TENANT, **spec: Any) -> Job:
    """Store a job that failed at `now` or, with a model, succeeded."""
    job = store(jobs, make_job(tenant=tenant, **spec))
    if model is None:
        failed, event = transition(job, JobStatus.FAILED, now=now)
        return jobs.update(failed, events=[event])
    succeeded = replace(
        job, status=JobStatus.SUCCEEDED, finished_at=now, distilled_model=model.id, artifact_uri="s3://x"
    )
    return jobs.update(succeeded, model=replace(model, job_id=job.id, created_at=now))


def with_model(jobs: JobRepository, *, now: int = 100, **spec: Any) -> tuple[Job, str]:
    model = make_model(make_job())
    return ended(jobs, now=now, model=model, **spec), model.id


def deployed(database: Database, model_id: str, **options: Any) -> str:
    spec = ResolvedDeployment(id=f"dep_{model_id}", model=model_id, artifact_uri="s3://x", **options)
    return ModelRepository(database).create_deployment(Deployment(spec, TENANT, 100)).spec.id


def test_jobs_that_ended_are_found_until_they_are_marked(rows: RetentionRepository, jobs: JobRepository) -> None:
    store(jobs, make_job())
    first, second, _late = ended(jobs), ended(jobs), ended(jobs, now=300)
    assert rows.list_ended_jobs(JobDataKind.LOGS, before=200, limit=9, after=None) == [first.id, second.id]
    assert rows.list_ended_jobs(JobDataKind.LOGS, before=200, limit=1, after=None) == [first.id]
    assert rows.list_ended_jobs(JobDataKind.LOGS, before=200, limit=9, after=first.id) == [second.id]
    rows.mark_removed(first.id, JobDataKind.LOGS)
    rows.mark_removed(first.id, JobDataKind.EVENTS)
    assert rows.list_ended_jobs(JobDataKind.LOGS, before=200, limit=9, after=None) == [second.id]
    assert rows.list_ended_jobs(JobDataKind.TRACKING, before=200, limit=9, after=None) == [first.id, second.id]


def test_events_go_in_parts_and_changes_of_status_stay(rows: RetentionRepository, jobs: JobRepository) -> None:
    job = ended(jobs)
    jobs.update(job, events=[message(job, str(number)) for number in range(5)])
    assert rows.remove_events(job.id, limit=3, dry_run=True) == 5
    assert [rows.remove_events(job.id, limit=3) for _ in range(3)] == [3, 2, 0]
    assert [event.data["status"] for event in jobs.list_events(job.id, PageQuery(order="asc")).items] == [
        "queued",
        "failed",
    ]


@pytest.mark.parametrize("limit", [7, 1000])
def test_points_are_thinned_evenly_however_often(rows: RetentionRepository, jobs: JobRepository, limit: int) -> None:
    job = store(jobs, make_job())
    jobs.update(job, points=[MetricPoint(step, 1, 1.0, {"loss": 1.0}) for step in range(3, 103)])
    gone = 0
    while some := rows.downsample_points(job.id, max_points=11, limit=limit):
        assert some <= limit
        gone += some
    steps = [point.step for point in jobs.list_points(job.id, PageQuery(limit=200, order="asc")).items]
    assert gone == 100 - len(steps)
    assert steps == [3, *range(13, 103, 10), 102]
    assert rows.downsample_points(job.id, max_points=11, limit=limit) == 0


def test_deliveries_keys_and_sessions_go_when_they_are_old(database: Database, rows: RetentionRepository) -> None:
    hook = WebhookSpec(url="https://hooks.example.com/a", secret_ref="signing")
    jobs = JobRepository(database, TenantPolicies())
    job = store(jobs, make_job(webhook=hook), key="once")
    outbox = Outbox(database)
    [delivery] = outbox.claim(now=101, until=102, limit=1)
    assert rows.remove_old_rows("deliveries", before=200, limit=9, dry_run=False) == 0, "it is not delivered yet"
    outbox.mark_delivered(delivery.sequence, 101)
    assert rows.remove_old_rows("deliveries", before=99, limit=9, dry_run=False) == 0
    assert rows.remove_old_rows("deliveries", before=200, limit=9, dry_run=True) == 1
    assert rows.remove_old_rows("deliveries", before=200, limit=9, dry_run=False) == 1
    assert rows.remove_old_rows("idempotency_keys", before=99, limit=9, dry_run=False) == 0
    assert rows.remove_old_rows("idempotency_keys", before=100, limit=9, dry_run=True) == 1
    assert rows.remove_old_rows("idempotency_keys", before=100, limit=9, dry_run=False) == 1
    assert store(jobs, make_job(), key="once").id != job.id
    row = {"id_sha256": "a" * 64, "key_name": "ann", "sealed_key": "sealed"}
    with database.begin_write() as session:
        session.add(SessionRow(**row, created_at=1.0, expires_at=50.0))
    assert rows.remove_old_rows("sessions", before=49, limit=9, dry_run=False) == 0
    assert rows.remove_old_rows("sessions", before=50, limit=9, dry_run=True) == 1
    assert rows.remove_old_rows("sessions", before=50, limit=9, dry_run=False) == 1


def test_an_alias_keeps_what_it_can_be_rolled_back_to(
    database: Database, rows: RetentionRepository, jobs: JobRepository
) -> None:
    registry = ModelRepository(database)
    service = RegistryService(registry, lambda: 100.0, TenantPolicies())
    models = [with_model(jobs)[1] for _ in range(5)]
    for model in models[:4]:
        service.promote(model, "production", tenant=TENANT, by="ann", reason="better")
    service.roll_back("production", tenant=TENANT, by="ann", reason="worse")
    service.promote(models[4], "production", tenant=TENANT, by="ann", reason="better")
    assert rows.trim_promotions(before=99, keep=2, dry_run=False) == 0, "they are not old enough"
    assert rows.trim_promotions(before=100, keep=2, dry_run=True) == 2
    assert rows.trim_promotions(before=100, keep=2, dry_run=False) == 2
    assert rows.trim_promotions(before=100, keep=2, dry_run=False) == 0
    assert service.resolve_model("production", TENANT)[0].id == models[4]
    service.roll_back("production", tenant=TENANT, by="ann", reason="worse")
    assert service.resolve_model("production", TENANT)[0].id == models[2]
    with pytest.raises(ConflictError, match="no model before"):
        service.roll_back("production", tenant=TENANT, by="ann", reason="worse")


def test_models_are_superseded_by_a_newer_one_of_their_name(
    database: Database, rows: RetentionRepository, jobs: JobRepository
) -> None:
    found = [with_model(jobs, now=now)[1] for now in (100, 200, 300)]
    assert rows.list_superseded_models(before=199, limit=9, after=None) == []
    assert rows.list_superseded_models(before=200, limit=9, after=None) == found[:1]
    assert rows.list_superseded_models(before=300, limit=9, after=None) == found[:2]
    service = RegistryService(ModelRepository(database), lambda: 100.0, TenantPolicies())
    service.promote(found[0], "production", tenant=TENANT, by="ann", reason="good")
    assert rows.list_superseded_models(before=300, limit=9, after=None) == [found[1]]


def test_a_deleted_job_leaves_no_row_but_the_note_of_its_objects(
    database: Database, rows: RetentionRepository, jobs: JobRepository
) -> None:
    job, model_id = with_model(jobs)
    jobs.update(job, events=[message(job, "x")], points=[MetricPoint(1, 1, 1.0, {})])
    other = ended(jobs)
    with pytest.raises(NotFoundError):
        rows.delete_job(job.id, by="ann", now=400, tenant="another")
    number, prefix = rows.preview_job_deletion(job.id)
    assert prefix == f"jobs/{job.id}"
    assert rows.delete_job(job.id, by="ann", now=400, tenant=TENANT) == number
    assert rows.list_due_deletions(now=1000, limit=9, after=None) == [f"jobs/{job.id}"]
    with pytest.raises(NotFoundError):
        jobs.get(job.id, tenant=TENANT)
    with pytest.raises(NotFoundError):
        ModelRepository(database).get_model(model_id, tenant=TENANT)
    rows.finish_deletion(f"jobs/{job.id}")
    assert rows.list_due_deletions(now=1000, limit=9, after=None) == []
    counts = rows.count_rows()
    assert (counts["jobs"], counts["models"], counts["metric_points"]) == (1, 0, 0)
    assert jobs.get(other.id, tenant=TENANT) == other


def test_a_deleted_model_leaves_its_job(rows: RetentionRepository, jobs: JobRepository) -> None:
    job, model_id = with_model(jobs)
    assert rows.preview_model_deletion(model_id) == (1, f"jobs/{job.id}/attempts/1/artifact")
    assert rows.delete_model(model_id, by="ann", now=400, tenant=TENANT) == 1
    left = jobs.get(job.id, tenant=TENANT)
    assert (left.status, left.distilled_model, left.artifact_uri) == (JobStatus.SUCCEEDED, None, None)
    assert rows.list_due_deletions(now=1000, limit=9, after=None) == [f"jobs/{job.id}/attempts/1/artifact"]
    assert rows.list_expired_jobs(before=200, limit=9, after=None) == [job.id]
    rows.delete_job(job.id, by="ann", now=400)
    assert rows.list_due_deletions(now=1000, limit=9, after=None) == [
        f"jobs/{job.id}",
        f"jobs/{job.id}/attempts/1/artifact",
    ]


def test_what_has_a_model_does_not_expire(rows: RetentionRepository, jobs: JobRepository) -> None:
    _, failed = with_model(jobs), ended(jobs)
    store(jobs, make_job())
    assert rows.list_expired_jobs(before=200, limit=9, after=None) == [failed.id]


def test_checkpoints_that_an_unfinished_job_reads_stay(rows: RetentionRepository, jobs: JobRepository) -> None:
    parent, other = ended(jobs), ended(jobs)
    child = store(jobs, make_job(training={"from": f"{parent.id}:ckpt_00000002_0001"}))
    assert rows.list_ended_jobs(JobDataKind.CHECKPOINTS, before=200, limit=9, after=None) == [other.id]
    assert rows.list_ended_jobs(JobDataKind.LOGS, before=200, limit=9, after=None) == [parent.id, other.id]
    with pytest.raises(ConflictError, match=f"job {child.id} reads it"):
        rows.delete_job(parent.id, by="ann", now=400)
    failed, event = transition(child, JobStatus.FAILED, now=101)
    jobs.update(failed, events=[event])
    assert rows.list_ended_jobs(JobDataKind.CHECKPOINTS, before=200, limit=2, after=None) == [parent.id, other.id]
    rows.delete_job(parent.id, by="ann", now=400)


def test_what_holds_a_job_is_named(database: Database, rows: RetentionRepository, jobs: JobRepository) -> None:
    live = store(jobs, make_job())
    paused, event = transition(store(jobs, make_job()), JobStatus.PAUSED, now=101)
    jobs.update(paused, events=[event])
    (served_job, served), (shown_job, shown), (adapter_job, adapter), (promoted_job, promoted), (parent, _), free = (
        with_model(jobs) for _ in range(6)
    )
    first = deployed(database, served)
    candidate = {"model": shown, "artifact_uri": "s3://x"}
    adapters = [{"model": adapter, "artifact_uri": "s3://x"}]
    deployed(database, free[1], candidate=candidate, adapters=adapters, route_prefix="/other")
    service = RegistryService(ModelRepository(database), lambda: 100.0, TenantPolicies())
    service.promote(promoted, "production", tenant=TENANT, by="ann", reason="good")
    child = store(jobs, make_job(model={"name_or_path": f"s3://bucket/jobs/{parent.id}/attempts/1/artifact"}))
    held = [
        (live.id, "its job is queued; cancel it"),
        (paused.id, "is paused and can be resumed"),
        (served_job.id, f"deployment {first} serves {served}"),
        (shown_job.id, f"serves {shown}"),
        (adapter_job.id, f"serves {adapter}"),
        (promoted_job.id, "history of alias 'production'"),
        (parent.id, f"job {child.id} reads it"),
    ]
    before = rows.count_rows()
    for job_id, reason in held:
        with pytest.raises(ConflictError, match=reason):
            rows.preview_job_deletion(job_id)
        with pytest.raises(ConflictError, match=reason):
            rows.delete_job(job_id, by="ann", now=400)
    for model_id, reason in [
        *((each, "deployment") for each in (served, shown, adapter)),
        (promoted, "alias 'production'"),
    ]:
        with pytest.raises(ConflictError, match=reason):
            rows.delete_model(model_id, by="ann", now=400)
    assert rows.count_rows() == before


def test_text_and_other_tenants_hold_nothing(
    database: Database, rows: RetentionRepository, jobs: JobRepository
) -> None:
    job, model = with_model(jobs)
    _, served = with_model(jobs)
    deployed(database, served, chat_template=f"{{# {model} #}}", engine={"drafts": model})
    theirs = make_model(make_job(tenant="other"))
    ended(jobs, tenant="other", model=theirs)
    spec = ResolvedDeployment(
        id="dep_theirs",
        model=theirs.id,
        artifact_uri="s3://x",
        route_prefix="/theirs",
        candidate={"model": model, "artifact_uri": "s3://x"},
    )
    ModelRepository(database).create_deployment(Deployment(spec, "other", 100))
    store(jobs, make_job(tenant="other", training={"from": model}))
    store(jobs, make_job(tenant="other", data={"sources": [{"name_or_path": f"s3://b/jobs/{job.id}/rows"}]}))
    store(jobs, make_job(metadata={"about": model}))
    rows.delete_model(model, by="ann", now=400)
    rows.delete_job(job.id, by="ann", now=400)
