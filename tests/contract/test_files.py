"""Contract of a database for uploaded files: a job and its file exist together, on SQLite and PostgreSQL alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from swiftkv_platform.contract.attempts import new_file_id
from swiftkv_platform.database.files import SqlFiles
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, QuotaExceededError
from swiftkv_platform.orchestration.files import File
from swiftkv_platform.orchestration.job import JobStatus, status_event
from swiftkv_platform.orchestration.ports import Page
from tests.records import TENANT, make_job, store
from tests.threads import at_once


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
def files(database: Database) -> SqlFiles:
    return SqlFiles(database)


def test_a_file_comes_back_as_it_was_stored_to_its_tenant_alone(files: SqlFiles) -> None:
    file, other = files.add(make_file(expires_at=1 << 40)), files.add(make_file(tenant="other"))
    assert files.get(file.id, tenant=TENANT) == file
    assert files.find([file.id, other.id], tenant=TENANT) == {file.id: file}
    assert files.list(Page(), tenant=TENANT).items == [file]
    assert files.known([file.id, other.id, new_file_id()]) == {file.id, other.id}
    for attempt in (lambda: files.get(other.id, tenant=TENANT), lambda: files.remove(other.id, tenant=TENANT)):
        with pytest.raises(NotFoundError):
            attempt()
    with pytest.raises(InvalidInputError, match="after"):
        files.list(Page(after=other.id), tenant=TENANT)
    assert files.expired(2.0**40, limit=5) == [file]
    assert files.expired(2.0**40 - 1, limit=5) == []


def test_no_file_goes_while_a_live_job_uses_it_and_no_job_comes_after_it(
    files: SqlFiles, jobs: SqlJobRepository
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
    assert len(jobs.list(Page(), tenant=TENANT).items) == 2


def test_of_a_job_and_a_deletion_at_once_one_is_refused(files: SqlFiles, jobs: SqlJobRepository) -> None:
    for _ in range(5):
        file = files.add(make_file())
        job = make_job(data=using(file))
        create = partial(jobs.create, job, status_event(job, now=100))
        outcomes = at_once([create, partial(files.remove, file.id, tenant=TENANT)])
        refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidInputError | ConflictError)]
        assert len(refused) == 1, outcomes


def test_of_many_uploads_at_once_as_many_are_kept_as_the_quota_holds(files: SqlFiles) -> None:
    uploads = at_once(partial(files.add, make_file(size=10), max_bytes=35) for _ in range(6))
    refused = [outcome.field for outcome in uploads if isinstance(outcome, QuotaExceededError)]
    assert (files.used_bytes(TENANT), refused) == (30, ["max_stored_bytes"] * 3)
    assert files.used_bytes("other") == 0
