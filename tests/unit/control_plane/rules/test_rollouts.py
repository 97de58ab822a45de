"""Rollouts of jobs' models: candidate, then model of the deployment, each once, with every step undoable."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Caller, PageQuery, new_id
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.deployments.rollout import Rollout, RolloutStatus
from swiftkv_platform.control_plane.deployments.rollout_steps import RolloutReconciler, RolloutService
from swiftkv_platform.control_plane.deployments.service import DeploymentService
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model
from swiftkv_platform.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    QuotaExceededError,
    SwiftKVError,
)
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import DeploymentSpec
from tests.support.records import UNDISPUTED
from tests.unit.control_plane.rules.conftest import TENANT, Plane

ANN = Caller(TENANT, "ann")
SETTINGS = Settings(_env_file=None)  # type: ignore[call-arg]
ALIAS = "production"


def make_model(plane: Plane, rollout: Mapping[str, Any] | None = None, **metrics: Any) -> Model:
    """Register the model of a new job, as the reconciler does at the end of an attempt."""
    job = plane.submit(rollout=rollout)
    uri = f"s3://bucket/{job.id}"
    model = Model(new_id("mdl"), TENANT, "test", job.id, 1, int(plane.clock()), uri, "d" * 64, 7, {}, metrics)
    plane.jobs.update(job, model=model)
    return model


@pytest.fixture(params=[None, ALIAS])
def deployment(plane: Plane, request: pytest.FixtureRequest) -> Deployment:
    """A running deployment of a model, or of an alias."""
    first = make_model(plane)
    if request.param is not None:
        registry(plane).promote(first.id, ALIAS, tenant=TENANT, by="ann", reason="first")
    spec = DeploymentSpec.model_validate({"model": request.param or first.id})
    created = DeploymentService(plane.parts, SETTINGS).create(ANN, spec)
    become(plane, created, DeploymentStatus.RUNNING)
    return created


def registry(plane: Plane) -> RegistryService:
    return RegistryService(plane.catalog, plane.clock, TenantPolicies())


def become(plane: Plane, deployment: Deployment, status: DeploymentStatus, message: str = "") -> None:
    plane.catalog.set_deployment_state(deployment.spec.id, DeploymentState(status, message, 1))


def roll_out(plane: Plane, deployment: Deployment, *, metrics: Mapping[str, Any] = {}, **options: Any) -> Model:
    section = {"deployment": deployment.spec.id, "share": 0.25, "promote_after_s": 60, **options}
    return make_model(plane, section, **metrics)


def tick(plane: Plane) -> None:
    RolloutReconciler(plane.parts, SETTINGS, UNDISPUTED).tick()


def served(plane: Plane, deployment: Deployment) -> tuple[str, str | None]:
    """Model and candidate of the deployment."""
    spec = plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).spec
    return spec.model, spec.candidate and spec.candidate.model


def get(plane: Plane, model: Model) -> Rollout:
    return plane.parts.rollouts.get_rollout(str(model.job_id), tenant=TENANT)


def statuses(plane: Plane, model: Model) -> list[str]:
    return [step.status.value for step in get(plane, model).steps]


def undo(plane: Plane, deployment: Deployment, model: Model, reason: str = "worse") -> Rollout:
    service = RolloutService(plane.parts, SETTINGS)
    return service.roll_back(str(model.job_id), deployment.spec.id, ANN, reason)


def promote(plane: Plane, deployment: Deployment, model: Model) -> None:
    """Let a rollout run to its promotion."""
    tick(plane)
    become(plane, deployment, DeploymentStatus.RUNNING)
    tick(plane)
    plane.clock.now += 60
    tick(plane)
    assert get(plane, model).status is RolloutStatus.PROMOTED


def test_a_model_serves_as_candidate_for_its_time_and_is_then_promoted(plane: Plane, deployment: Deployment) -> None:
    before = deployment.spec.model
    model = roll_out(plane, deployment)
    assert served(plane, deployment) == (before, None)
    tick(plane)
    spec = plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).spec
    assert spec.candidate is not None
    assert (spec.candidate.model, spec.candidate.share, spec.candidate.artifact_uri) == (
        model.id,
        0.25,
        model.artifact_uri,
    )
    plane.clock.now += 1000
    tick(plane)
    assert get(plane, model).serving_since is None, "replicas still load it"
    become(plane, deployment, DeploymentStatus.RUNNING)
    tick(plane)
    assert get(plane, model).promote_at == plane.clock.now + 60
    plane.clock.now += 59
    tick(plane)
    assert served(plane, deployment) == (before, model.id)
    plane.clock.now += 1
    tick(plane)
    assert served(plane, deployment) == (model.id, None)
    tick(plane)
    assert statuses(plane, model) == ["waiting", "candidate", "promoted"], "each once"
    assert get(plane, model).previous == before
    if deployment.spec.alias is not None:
        newest = registry(plane).get_history(ALIAS, TENANT)[-1]
        assert (newest.model, newest.previous, newest.by) == (model.id, before, f"rollout of {model.job_id}")


def test_without_a_time_somebody_promotes_the_candidate(plane: Plane, deployment: Deployment) -> None:
    model = roll_out(plane, deployment, promote_after_s=None)
    tick(plane)
    become(plane, deployment, DeploymentStatus.RUNNING)
    plane.clock.now += 1e9
    tick(plane)
    assert statuses(plane, model) == ["waiting", "candidate"]
    if deployment.spec.alias is None:
        DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"model": model.id})
    else:
        registry(plane).promote(model.id, ALIAS, tenant=TENANT, by="ann", reason="good")
    tick(plane)
    assert statuses(plane, model) == ["waiting", "candidate", "promoted"]
    assert served(plane, deployment) == (model.id, None), "it needs no candidate any more"


@pytest.mark.parametrize("after_promotion", [False, True])
def test_a_rollout_can_be_undone_at_any_step(plane: Plane, deployment: Deployment, after_promotion: bool) -> None:
    before = deployment.spec.model
    model = roll_out(plane, deployment)
    if after_promotion:
        promote(plane, deployment, model)
    else:
        tick(plane)
    undone = undo(plane, deployment, model)
    assert served(plane, deployment) == (before, None)
    assert (undone.steps[-1].by, undone.steps[-1].message) == ("ann", "worse")
    tick(plane)
    assert get(plane, model).status is RolloutStatus.ROLLED_BACK, "it does not begin again"
    with pytest.raises(ConflictError, match="is rolled_back"):
        undo(plane, deployment, model)


def test_a_model_that_is_not_served_any_more_is_not_rolled_back(plane: Plane, deployment: Deployment) -> None:
    model = roll_out(plane, deployment)
    promote(plane, deployment, model)
    later = make_model(plane)
    DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"model": later.id})
    with pytest.raises(ConflictError, match=f"serves {later.id} now"):
        undo(plane, deployment, model)
    with pytest.raises(NotFoundError):
        RolloutService(plane.parts, SETTINGS).roll_back(
            str(model.job_id), deployment.spec.id, Caller("rival", "eve"), "no"
        )


def test_a_candidate_that_cannot_be_loaded_is_removed(plane: Plane, deployment: Deployment) -> None:
    model = roll_out(plane, deployment)
    tick(plane)
    become(plane, deployment, DeploymentStatus.REFUSED, "ModelError: it cannot generate")
    tick(plane)
    assert served(plane, deployment) == (deployment.spec.model, None)
    assert get(plane, model).steps[-1].message == "ModelError: it cannot generate"
    assert get(plane, model).status is RolloutStatus.REFUSED


def test_a_later_job_supersedes_an_earlier_candidate_but_nobodys_own(plane: Plane, deployment: Deployment) -> None:
    first, second = roll_out(plane, deployment), roll_out(plane, deployment)
    tick(plane)
    assert served(plane, deployment)[1] == second.id
    assert get(plane, first).steps[-1].message == f"superseded by the model of {second.job_id}"
    undo(plane, deployment, second)
    chosen = make_model(plane)
    service = DeploymentService(plane.parts, SETTINGS)
    service.update(deployment.spec.id, ANN, {"candidate": {"model": chosen.id, "share": 0.5}})
    third = roll_out(plane, deployment)
    tick(plane)
    tick(plane)
    assert served(plane, deployment)[1] == chosen.id
    assert statuses(plane, third) == ["waiting", "waiting"], "the reason is recorded once"
    service.update(deployment.spec.id, ANN, {"candidate": None})
    tick(plane)
    assert served(plane, deployment)[1] == third.id


def test_a_candidate_that_somebody_removes_stays_removed(plane: Plane, deployment: Deployment) -> None:
    model = roll_out(plane, deployment)
    tick(plane)
    DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"candidate": None})
    tick(plane)
    tick(plane)
    assert served(plane, deployment) == (deployment.spec.model, None)
    assert get(plane, model).steps[-1].message == "the candidate was removed or replaced"


def test_an_undecided_gate_or_a_deleted_deployment_refuses_a_rollout(plane: Plane, deployment: Deployment) -> None:
    gate = {"field": "evaluation.max_kl", "subject": "KL", "limit": 0.1, "value": 0.1, "outcome": "undecided"}
    undecided = roll_out(plane, deployment, metrics={"gates": [gate]})
    tick(plane)
    assert get(plane, undecided).steps[-1].message.startswith("inconclusive quality gates: KL is 0.1")
    DeploymentService(plane.parts, SETTINGS).delete(deployment.spec.id, ANN)
    late = roll_out(plane, deployment)
    tick(plane)
    assert get(plane, late).status is RolloutStatus.REFUSED
    plane.catalog.remove_deployment(deployment.spec.id)
    latest = roll_out(plane, deployment)
    tick(plane)
    assert get(plane, latest).status is RolloutStatus.REFUSED


class CrashError(Exception):
    pass


@pytest.mark.parametrize("step", ["candidate", "promoted"])
def test_a_crash_between_deployment_and_rollout_repeats_nothing(
    plane: Plane, deployment: Deployment, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = deployment.spec.model
    model = roll_out(plane, deployment)
    repository = type(plane.parts.rollouts)
    store = repository.update

    def crash_before_storing(self: Any, rollout: Rollout) -> Rollout:
        if rollout.status.value == step:
            raise CrashError
        return store(self, rollout)

    if step == "promoted":
        tick(plane)
        become(plane, deployment, DeploymentStatus.RUNNING)
        tick(plane)
        plane.clock.now += 60
    with monkeypatch.context() as patched:
        patched.setattr(repository, "update", crash_before_storing)
        with pytest.raises(CrashError):
            tick(plane)
    version = plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).version
    tick(plane)
    assert plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).version == version, "no second change"
    if step == "candidate":
        promote(plane, deployment, model)
    assert statuses(plane, model) == ["waiting", "candidate", "promoted"]
    assert undo(plane, deployment, model).status is RolloutStatus.ROLLED_BACK
    assert served(plane, deployment) == (before, None)


def test_a_crash_while_superseding_a_candidate_leaves_no_candidate_without_a_rollout(
    plane: Plane, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = roll_out(plane, deployment)
    tick(plane)
    second = roll_out(plane, deployment)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutService, "add_candidate", make_raiser(CrashError()))
        with pytest.raises(CrashError):
            tick(plane)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutReconciler, "_end", make_raiser(CrashError()))
        with pytest.raises(CrashError):
            tick(plane)
    tick(plane)
    tick(plane)
    assert served(plane, deployment)[1] == second.id
    assert get(plane, first).status is RolloutStatus.REFUSED
    assert statuses(plane, second) == ["waiting", "candidate"]


def make_raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [QuotaExceededError("full"), InvalidInputError("unknown"), NotFoundError("gone")])
def test_a_refused_promotion_ends_the_rollout_and_removes_its_candidate(
    plane: Plane, deployment: Deployment, error: SwiftKVError, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = roll_out(plane, deployment, promote_after_s=0)
    tick(plane)
    become(plane, deployment, DeploymentStatus.RUNNING)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutService, "promote", make_raiser(error))
        tick(plane)
    assert served(plane, deployment) == (deployment.spec.model, None)
    assert statuses(plane, model) == ["waiting", "candidate", "refused"]
    assert get(plane, model).steps[-1].message == error.message
    later = roll_out(plane, deployment)
    tick(plane)
    assert served(plane, deployment)[1] == later.id, "the next rollout is not held up"


@pytest.mark.parametrize("is_candidate", [False, True])
def test_a_promotion_by_somebody_can_be_rolled_back(plane: Plane, deployment: Deployment, is_candidate: bool) -> None:
    before = deployment.spec.model
    if not is_candidate:
        chosen = {"model": make_model(plane).id, "share": 0.5}
        DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"candidate": chosen})
    model = roll_out(plane, deployment, promote_after_s=None)
    tick(plane)
    if deployment.spec.alias is None:
        DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"model": model.id})
    else:
        registry(plane).promote(model.id, ALIAS, tenant=TENANT, by="ann", reason="good")
    tick(plane)
    assert get(plane, model).status is RolloutStatus.PROMOTED
    undo(plane, deployment, model)
    assert served(plane, deployment)[0] == before


def test_a_model_that_was_served_before_its_rollout_began_has_no_previous_one(
    plane: Plane, deployment: Deployment
) -> None:
    model = roll_out(plane, deployment)
    DeploymentService(plane.parts, SETTINGS).update(deployment.spec.id, ANN, {"model": model.id})
    tick(plane)
    with pytest.raises(ConflictError, match="before the rollout began; change the deployment's model"):
        undo(plane, deployment, model)


def test_two_planes_at_once_advance_a_rollout_once(plane: Plane, deployment: Deployment) -> None:
    model = roll_out(plane, deployment)
    stale = get(plane, model)
    tick(plane)
    with pytest.raises(SwiftKVError):
        plane.parts.rollouts.update(replace(stale, share=0.5))
    found = plane.parts.rollouts.list_rollouts(deployment.spec.id, PageQuery(), tenant=TENANT).items
    assert [each.share for each in found] == [0.25]
    assert not plane.parts.rollouts.list_rollouts(deployment.spec.id, PageQuery(), tenant="rival").items
