"""Limits of the number and bytes of stored objects of a tenant: SQLite and PostgreSQL alike."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.access.sessions import Sessions
from swiftkv_platform.control_plane.access.tenants import DEFAULT_POLICY, TenantPolicies, TenantPolicy
from swiftkv_platform.control_plane.access.usage import sum_stored_bytes
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.files.repository import FileRepository
from swiftkv_platform.control_plane.jobs.job import make_status_event
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.control_plane.webhooks import Outbox
from swiftkv_platform.errors import ConflictError, QuotaExceededError, UnauthenticatedError
from swiftkv_platform.limits import SESSIONS, Scope, list_limits
from swiftkv_platform.security import principals
from swiftkv_platform.security.keys import KeyRing, create_key
from tests.contract.test_catalog import HOOK, make_deployment, make_file
from tests.support.records import TENANT, make_job, store
from tests.support.threads import at_once


def service(registry: ModelRepository, **limits: int) -> RegistryService:
    return RegistryService(registry, clock=lambda: 1.0, policies=_Policies(**limits))  # type: ignore[arg-type]


class _Policies:
    """Tenants that all have one policy."""

    def __init__(self, **limits: int) -> None:
        self._policy = TenantPolicy.model_validate(limits)

    def get(self, _tenant: str) -> TenantPolicy:
        return self._policy


def add_deployment(database: Database, models: list[Model], policy: TenantPolicy) -> object:
    route = f"/{new_id('dep')}"
    return ModelRepository(database).create_deployment(make_deployment(models[0], route), policy=policy)


def add_file(database: Database, _models: list[Model], policy: TenantPolicy) -> object:
    return FileRepository(database).add(make_file(size=10), policy=policy)


def add_import(database: Database, models: list[Model], policy: TenantPolicy) -> object:
    registry, model = ModelRepository(database), replace(models[0], id=new_id("mdl"), job_id=None, size=10)
    registry.schedule_import_cleanup(model.prefix, by="ann", now=1.0)
    return registry.register_import(model, policy=policy, now=1.0)


def add_alias(database: Database, models: list[Model], policy: TenantPolicy) -> object:
    promotions = service(ModelRepository(database), max_aliases=policy.max_aliases or 0)
    alias = f"a{new_id('prm')[-20:].lower()}"
    return promotions.promote(models[0].id, alias, tenant=TENANT, by="ann", reason="better")


def add_job(database: Database, _models: list[Model], policy: TenantPolicy) -> object:
    job = make_job()
    return JobRepository(database, TenantPolicies()).create(job, make_status_event(job, now=100), policy=policy)


ADD = {
    "max_deployments": (add_deployment, 0),
    "max_files": (add_file, 0),
    "max_imported_models": (add_import, 0),
    "max_aliases": (add_alias, 0),
    "max_stored_jobs": (add_job, 3),
    "max_unfinished_jobs": (add_job, 0),
    "max_queued_jobs": (add_job, 0),
}
"""Functions that add an object that the limit counts, and the number of objects before."""


@pytest.mark.parametrize("name", ADD)
def test_of_many_at_once_as_many_are_stored_as_the_limit_says(
    database: Database, models: list[Model], name: str
) -> None:
    add, before = ADD[name]
    policy = TenantPolicy.model_validate({name: before + 3})
    refused = [each for each in at_once([partial(add, database, models, policy)] * 6) if isinstance(each, Exception)]
    assert [getattr(each, "field", each) for each in refused] == [name] * 3
    [error] = {str(each) for each in refused}
    assert f"{before + 3} " in error
    assert f"its quota {name} is {before + 3}; " in error
    assert isinstance(refused[0], QuotaExceededError)
    add(database, models, TenantPolicy.model_validate({name: None}) if name != "max_aliases" else DEFAULT_POLICY)


@pytest.mark.parametrize("add", [add_file, add_import, add_job])
def test_models_of_jobs_count_among_the_stored_bytes(
    database: Database, models: list[Model], add: Callable[..., object]
) -> None:
    stored = sum(model.size for model in models)
    with pytest.raises(QuotaExceededError, match=f"its quota max_stored_bytes is {stored - 1}; delete some"):
        add(database, models, TenantPolicy(max_stored_bytes=stored - 1))
    add(database, models, TenantPolicy(max_stored_bytes=stored + 10))


@pytest.mark.parametrize("add", [add_file, add_import])
def test_many_at_once_store_no_more_bytes_than_the_quota(
    database: Database, models: list[Model], add: Callable[..., object]
) -> None:
    policy = TenantPolicy(max_stored_bytes=sum(model.size for model in models) + 35)
    outcomes = at_once([partial(add, database, models, policy)] * 6)
    refused = [outcome.field for outcome in outcomes if isinstance(outcome, QuotaExceededError)]
    assert refused == ["max_stored_bytes"] * 3


def stored_bytes(database: Database) -> int:
    with database.begin_read() as session:
        return sum_stored_bytes(session, TENANT)


@pytest.mark.parametrize("kind", ["model", "job"])
def test_what_is_deleted_counts_until_its_objects_are_gone(database: Database, models: list[Model], kind: str) -> None:
    """Otherwise a tenant that imports and deletes in turn would store any number of bytes until the next sweep."""
    retained, [model, *others] = RetentionRepository(database), models
    stored = stored_bytes(database)
    options: dict[str, Any] = {"by": "ann", "now": 5.0, "tenant": TENANT}
    assert model.job_id is not None
    if kind == "model":
        retained.delete_model(model.id, **options)
    else:
        retained.delete_job(model.job_id, **options)
    assert stored_bytes(database) == stored
    [prefix] = retained.list_due_deletions(now=5.0, limit=9, after=None)
    retained.finish_deletion(prefix)
    assert stored_bytes(database) == sum(other.size for other in others)


def test_every_kind_is_limited_without_a_tenants_file() -> None:
    limits = {limit.setting: limit.default for limit in list_limits() if limit.scope is Scope.TENANT}
    stored = {*ADD, "max_stored_bytes", "max_alias_changes", "max_pending_deliveries"} - {"max_queued_jobs"}
    assert {name: getattr(DEFAULT_POLICY, name) for name in stored} == {name: limits[name] for name in stored}


def test_an_aliass_history_keeps_its_newest_changes(registry: ModelRepository, models: list[Model]) -> None:
    promotions = service(registry, max_alias_changes=4)
    for number in range(9):
        promotions.promote(models[number % 3].id, "production", tenant=TENANT, by="ann", reason="better")
    assert [item.version for item in registry.list_promotions(tenant=TENANT)] == [6, 7, 8, 9]
    found = [promotions.roll_back("production", tenant=TENANT, by="ann", reason="worse").model for _ in range(2)]
    assert found == [models[1].id, models[0].id]
    history = registry.list_promotions(tenant=TENANT)
    assert [(item.action, item.version) for item in history] == [
        ("promote", 8),
        ("promote", 9),
        ("rollback", 10),
        ("rollback", 11),
    ]
    with pytest.raises(ConflictError, match=f"has no model before {models[0].id}"):
        promotions.roll_back("production", tenant=TENANT, by="ann", reason="worse")
    assert promotions.find_model("production", TENANT).id == models[0].id


def test_a_key_has_as_many_sessions_as_it_may(database: Database, tmp_path: Path) -> None:
    ids, clock, reads = dict[str, list[str]](), itertools.count(1000.0), frozenset({principals.Scope.JOBS_READ})
    path = tmp_path / "keys.json"
    keys = {name: create_key(path, name=name, tenant="acme", scopes=reads) for name in ("ann", "bob")}
    sessions = Sessions(database, KeyRing(path), lambda: next(clock), lifetime_s=9999)
    for name, number in (("bob", 3), ("ann", SESSIONS.default + 5)):
        ids[name] = [sessions.create(keys[name], sessions.authenticate(keys[name])).id for _ in range(number)]
    for ended in ids["ann"][:5]:
        with pytest.raises(UnauthenticatedError, match="has ended"):
            sessions.get(ended)
    assert {sessions.get(each).key.name for each in ids["ann"][5:]} == {"ann"}
    assert {sessions.get(each).key.name for each in ids["bob"]} == {"bob"}


def test_deliveries_beyond_the_limit_count_as_failed(database: Database) -> None:
    jobs = JobRepository(database, _Policies(max_pending_deliveries=3))  # type: ignore[arg-type]
    for _ in range(5):
        store(jobs, make_job(webhook=HOOK))
    store(jobs, make_job(webhook=HOOK, tenant="other"))
    outbox = Outbox(database)
    assert outbox.count_by_status() == {"pending": 4, "delivered": 0, "failed": 2}
    for delivery in outbox.claim(now=200.0, until=260.0, limit=10):
        outbox.mark_delivered(delivery.sequence, 201.0)
    store(jobs, make_job(webhook=HOOK))
    assert outbox.count_by_status() == {"pending": 1, "delivered": 4, "failed": 2}
