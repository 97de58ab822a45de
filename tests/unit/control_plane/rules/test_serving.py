"""Deployments: applied when they or their models change, followed by reports of the cluster, removed once deleted."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE
from swiftkv_platform.control_plane.access.tenants import TenantPolicies, TenantPolicy
from swiftkv_platform.control_plane.base import Caller, new_id
from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.deployments.service import DeploymentService
from swiftkv_platform.control_plane.merge_patch import ExpectedVersions
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.control_plane.ray import Node
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    InvalidInputError,
    PreconditionFailedError,
    StaleVersionError,
)
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import DeploymentSpec, ResolvedDeployment
from tests.support.fakes.serve_cluster import FakeServeCluster
from tests.support.records import UNDISPUTED
from tests.unit.control_plane.rules.conftest import TENANT, Plane

ANN = Caller(TENANT, "ann")
SETTINGS = Settings(_env_file=None)  # type: ignore[call-arg]


@pytest.fixture
def model(plane: Plane) -> Model:
    job = plane.submit()
    model = Model(new_id("mdl"), TENANT, "test", job.id, 1, 1, "s3://bucket/artifact", "d" * 64, 7, {}, {})
    plane.jobs.update(job, model=model)
    return model


def service(plane: Plane) -> DeploymentService:
    return DeploymentService(plane.parts, SETTINGS)


def deploy(plane: Plane, model: str, route_prefix: str = "/") -> Deployment:
    options = {"max_replicas": 2, "target_ongoing_requests": 4, "engine": {"dtype": "float32"}}
    spec = DeploymentSpec.model_validate({"model": model, "route_prefix": route_prefix, **options})
    return service(plane).create(ANN, spec)


def delete(plane: Plane, deployment: Deployment) -> Deployment:
    return service(plane).delete(deployment.spec.id, ANN)


def status(plane: Plane, deployment: Deployment) -> DeploymentStatus:
    return plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).state.status


@pytest.mark.parametrize("damage", ["spec = '7'", "state = '{'", """spec = '{"from_the_future": 1}'"""])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_deployment_whose_row_cannot_be_read_is_served_on(
    plane: Plane, model: Model, damage: str, restarted: bool
) -> None:
    reconciler = DeploymentReconciler(plane.parts, SETTINGS, UNDISPUTED)
    damaged, sound = deploy(plane, model.id), deploy(plane, model.id, "/sound")
    reconciler.tick()
    for deployment in (damaged, sound):
        plane.serving.become(deployment.spec.id, DeploymentStatus.RUNNING, replicas=1)
    with plane.database.begin_write() as session:
        session.execute(text(f"UPDATE deployments SET {damage}, version = 7 WHERE id = :id"), {"id": damaged.spec.id})
    if restarted:
        reconciler = DeploymentReconciler(plane.parts, SETTINGS, UNDISPUTED)
    third = deploy(plane, model.id, "/third")
    with capture_logs() as logs:
        reconciler.tick()
        number = len(plane.serving.applied)
        reconciler.tick()
    assert plane.serving.list_states()[damaged.spec.id].status is DeploymentStatus.RUNNING
    assert plane.serving.applied[-1] == [sound.spec, third.spec]
    assert len(plane.serving.applied) == number, "an unreadable row causes no new apply"
    assert list(reconciler.unreadable) == [damaged.spec.id]
    assert [entry["ids"] for entry in logs if "keep serving unchanged" in entry["event"]] == [[damaged.spec.id]]
    with plane.database.begin_write() as session:
        session.execute(text("DELETE FROM deployments WHERE id = :id"), {"id": damaged.spec.id})
    reconciler.tick()
    assert plane.serving.list_states()[damaged.spec.id].status is DeploymentStatus.DELETING, "its row is gone"


class BusyCatalog(ModelRepository):
    """A registry in which other callers change the deployment between a read and its write."""

    meanwhile: list[Mapping[str, Any]]

    def get_deployment(self, deployment_id: str, *, tenant: str) -> Deployment:
        found = super().get_deployment(deployment_id, tenant=tenant)
        while self.meanwhile:
            fields = self.meanwhile.pop()
            self.change_deployment(
                deployment_id,
                lambda other, held, new=fields: (other.spec.model_copy(update=new), other.state),
                tenant=tenant,
            )
        return found


def test_of_two_changes_at_once_the_later_one_is_refused_where_it_contradicts(plane: Plane, model: Model) -> None:
    deployment, catalog = deploy(plane, model.id), BusyCatalog(plane.database)
    deployments = DeploymentService(replace(plane.parts, deployments=catalog, registry=catalog), SETTINGS)

    def update(meanwhile: Mapping[str, Any], expected: ExpectedVersions | None = None, **changes: Any) -> Deployment:
        catalog.meanwhile = [meanwhile]
        return deployments.update(deployment.spec.id, ANN, changes, expected=expected)

    found = update({"max_replicas": 5}, upscale_delay_s=1.0)
    assert (found.spec.max_replicas, found.spec.upscale_delay_s, found.version) == (5, 1.0, 3), "different fields"
    assert update({"max_replicas": 7}, max_replicas=7).spec.max_replicas == 7, "equal changes do not conflict"
    engine = update({"engine": {"dtype": "float32", "seed": 1}}, engine={"block_size": 8}).spec.engine
    assert engine == {"dtype": "float32", "seed": 1, "block_size": 8}
    for meanwhile, changes, field in (
        ({"max_replicas": 8}, {"max_replicas": 9}, "max_replicas"),
        ({"engine": {**engine, "seed": 2}}, {"engine": {"seed": 3}}, "engine.seed"),
        ({"engine": engine}, {"engine": {"seed": None}}, "engine.seed"),
        ({"engine": {**engine, "seed": 4}}, {"engine": None}, "engine"),
        ({"min_replicas": 2}, {"max_replicas": 1, "min_replicas": 0}, "min_replicas"),
    ):
        with pytest.raises(StaleVersionError) as stale:
            update(meanwhile, **changes)
        assert stale.value.field == field
    version = catalog.get_deployment(deployment.spec.id, tenant=TENANT).version
    assert (
        update({"max_replicas": 3}, ExpectedVersions(frozenset({version + 1})), max_replicas=4).spec.max_replicas == 4
    )
    with pytest.raises(PreconditionFailedError):
        update({"max_replicas": 3}, ExpectedVersions(frozenset({version + 2})), upscale_delay_s=5.0)


def test_an_adapter_whose_base_is_closed_is_not_deployed(plane: Plane, model: Model) -> None:
    whole = model
    job = plane.submit()
    lineage = {"teacher": "rival/secret", "revision": None, ADAPTER_LINEAGE: "d" * 64}
    model = Model(new_id("mdl"), TENANT, "test", job.id, 1, 1, "s3://bucket/artifact", "d" * 64, 7, lineage, {})
    plane.jobs.update(job, model=model)
    settings = SETTINGS.model_copy(update={"source_roots": ("/data/{tenant}",)})

    def deploy_by(organizations: tuple[str, ...], **options: Any) -> Deployment:
        policies = having(lambda _: TenantPolicy(hub_organizations=organizations))
        return DeploymentService(replace(plane.parts, policies=policies), settings).create(
            ANN, DeploymentSpec.model_validate({"model": model.id, **options})
        )

    with pytest.raises(InvalidInputError, match=r"model\.base is 'rival/secret', which tenant 'acme' may not read"):
        deploy_by(("acme",))
    assert deploy_by(("rival",)).spec.model == model.id
    with pytest.raises(InvalidInputError, match=r"candidate\.model\.base is 'rival/secret'"):
        deploy_by(("acme",), model=whole.id, candidate={"model": model.id}, route_prefix="/other")


def register(plane: Plane, name: str, **lineage: Any) -> Model:
    job = plane.submit()
    model = Model(new_id("mdl"), TENANT, name, job.id, 1, 1, f"s3://bucket/{name}", "d" * 64, 7, lineage, {})
    plane.jobs.update(job, model=model)
    return model


def register_adapter(plane: Plane, name: str, base: str = "a") -> Model:
    return register(plane, name, teacher="org/base", revision=None, **{ADAPTER_LINEAGE: base * 64})


def test_adapters_of_one_base_are_deployed_and_changed_together(plane: Plane) -> None:
    own, first, second = (register_adapter(plane, name) for name in ("own", "first", "second"))
    wanted = {"model": own.id, "adapters": ["first", {"model": second.id, "name": "legal"}]}
    deployment = service(plane).create(ANN, DeploymentSpec.model_validate(wanted))
    resolved = [each.model_dump() for each in deployment.spec.adapters or ()]
    assert resolved == [
        {"model": first.id, "name": None, "artifact_uri": "s3://bucket/first"},
        {"model": second.id, "name": "legal", "artifact_uri": "s3://bucket/second"},
    ]

    def update(**changes: Any) -> Deployment:
        return service(plane).update(deployment.spec.id, ANN, changes)

    assert [each.model for each in update(adapters=[second.id]).spec.adapters or ()] == [second.id]
    foreign, whole = register_adapter(plane, "foreign", "b"), register(plane, "whole")
    digests = f"digest {'b' * 64}, but the base of {own.id} has {'a' * 64}"
    for changes, field, message in (
        ({"adapters": [second.id, foreign.id]}, "adapters", digests),
        ({"model": foreign.id}, "adapters", f"digest {'a' * 64}, but the base of {foreign.id} has {'b' * 64}"),
        ({"adapters": [whole.id]}, "adapters", "a full model"),
        ({"adapters": ["unknown"]}, r"adapters\[0\]", r"adapters\[0\]: .*unknown"),
        ({"adapters": [second.id, "second"]}, "adapters", "twice"),
        ({"engine": {"backend": "vllm"}}, "adapters", "vLLM serves one student per process"),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            update(**changes)
        assert caught.value.field == field.replace("\\", "")
    assert update(adapters=None, model=foreign.id).spec.model == foreign.id
    assert update(adapters=[], model=whole.id).spec.adapters == (), "replicas compare the base of a whole model"


@pytest.mark.parametrize("by_name", [False, True])
def test_an_alias_does_not_move_to_an_adapter_of_its_deployment(plane: Plane, by_name: bool) -> None:
    registry = RegistryService(plane.catalog, plane.clock, TenantPolicies())
    own, first, second = (register_adapter(plane, name) for name in ("own", "first", "second"))
    registry.promote(first.id, "production", tenant=TENANT, by="ann", reason="first")
    registry.promote(own.id, "production", tenant=TENANT, by="ann", reason="better")
    named = {"model": second.id, "name": first.id} if by_name else first.id
    spec = DeploymentSpec.model_validate({"model": "production", "adapters": [named]})
    deployment = service(plane).create(ANN, spec)
    why = rf"model is '{first.id}'; deployment {deployment.spec.id}.* serves this model as an adapter; remove the model"
    with pytest.raises(InvalidInputError, match=why):
        registry.promote(first.id, "production", tenant=TENANT, by="ann", reason="again")
    with pytest.raises(InvalidInputError, match=why):
        registry.roll_back("production", tenant=TENANT, by="ann", reason="worse")
    assert plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT) == deployment
    service(plane).update(deployment.spec.id, ANN, {"adapters": []})
    registry.promote(first.id, "production", tenant=TENANT, by="ann", reason="again")
    assert plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).spec.model == first.id


def test_what_the_cluster_no_longer_reports_is_unknown_since_then(plane: Plane, model: Model) -> None:
    reconciler = DeploymentReconciler(plane.parts, SETTINGS, UNDISPUTED)
    running, deleted = deploy(plane, model.id), deploy(plane, model.id, "/deleted")
    reconciler.tick()
    for deployment in (running, deleted):
        plane.serving.become(deployment.spec.id, DeploymentStatus.RUNNING, replicas=1)
    reconciler.tick()
    delete(plane, deleted)
    pending = deploy(plane, model.id, "/pending")

    def state(deployment: Deployment) -> DeploymentState:
        return plane.catalog.get_deployment(deployment.spec.id, tenant=TENANT).state

    def fail(now: float) -> None:
        plane.clock.now = now
        with pytest.raises(ClusterUnavailableError):
            reconciler.tick()

    plane.serving.away = True
    fail(2000.0)
    fail(2014.0)
    assert state(running).unknown_since is None, "one late report is no outage"
    for later in (2015.0, 2100.0):
        fail(later)
        assert state(running) == DeploymentState(DeploymentStatus.RUNNING, replicas=1, unknown_since=2000)
    assert [state(each).unknown_since for each in (deleted, pending)] == [None, None], "the control plane sets these"
    plane.serving.away = False
    reconciler.tick()
    assert state(running) == DeploymentState(DeploymentStatus.RUNNING, replicas=1)
    plane.serving.away = True
    fail(3000.0)
    fail(3020.0)
    assert state(running).unknown_since == 3000, "the second outage has its own time"


def test_what_the_cluster_loses_or_misses_is_applied_again(plane: Plane, model: Model) -> None:
    reconciler = DeploymentReconciler(plane.parts, SETTINGS, UNDISPUTED)
    plane.serving.away = True
    reconciler.tick()  # Serve is left alone where nothing was ever deployed
    deployment = deploy(plane, model.id)
    with pytest.raises(ClusterUnavailableError):
        reconciler.tick()
    assert status(plane, deployment) is DeploymentStatus.PENDING
    plane.serving.away = False
    reconciler.tick()
    assert plane.serving.applied == [[deployment.spec]]
    reconciler.tick()
    plane.serving.forget()
    reconciler.tick()
    assert plane.serving.applied == [[deployment.spec]] * 2
    assert status(plane, deployment) is DeploymentStatus.PENDING
    reconciler.tick()
    assert status(plane, deployment) is DeploymentStatus.DEPLOYING
    plane.serving.become(deployment.spec.id, DeploymentStatus.RUNNING, replicas=1)
    reconciler.tick()
    assert status(plane, deployment) is DeploymentStatus.RUNNING
    elsewhere = replace(plane.parts, serving=FakeServeCluster())
    DeploymentReconciler(elsewhere, SETTINGS, UNDISPUTED).tick()  # restarted, with another cluster's address
    assert status(plane, deployment) is DeploymentStatus.PENDING, "it runs only on the cluster of before"
    delete(plane, deployment)
    restarted = DeploymentReconciler(plane.parts, SETTINGS, UNDISPUTED)
    restarted.tick()
    assert plane.serving.applied[-1] == [], "deletions made while the control plane was down are applied"
    plane.serving.forget()
    restarted.tick()
    assert plane.catalog.list_all_deployments().items == []


GPU = {"device": "cuda"}
HALF: dict[str, Any] = {"deployments_share": 0.5}


def having(policy: Callable[[str], TenantPolicy]) -> Any:
    """Tenants with these policies."""
    return SimpleNamespace(get=policy)


def sharing(
    plane: Plane, *cpus: float, gpus: float = 0.0, policies: Any = None, **settings: Any
) -> DeploymentReconciler:
    """A reconciler on nodes with these CPUs, of which the last also has `gpus`."""
    gpus_of = [0.0] * (len(cpus) - 1) + [gpus]
    plane.cluster.nodes = [Node({"CPU": cpu, "GPU": gpu}, {}) for cpu, gpu in zip(cpus, gpus_of, strict=True)]
    return DeploymentReconciler(
        replace(plane.parts, policies=policies or plane.parts.policies),
        SETTINGS.model_copy(update=settings),
        UNDISPUTED,
    )


def want(plane: Plane, model: Model, name: str, *, cpus: int = 1, fewest: int = 1, most: int = 0, **engine: Any) -> str:
    """Store a deployment of the tenant that its name begins with; returns its id."""
    spec = ResolvedDeployment(
        id=new_id("dep"),
        model=model.id,
        artifact_uri=model.artifact_uri,
        route_prefix=f"/{name}",
        min_replicas=fewest,
        max_replicas=most or max(fewest, 1),
        engine={"num_threads": cpus, **engine},
        tenant=name.partition("-")[0],
    )
    return plane.catalog.create_deployment(Deployment(spec, name.partition("-")[0], 1)).spec.id


def asked(plane: Plane) -> dict[str, tuple[int, int]]:
    """Bounds of replicas that Serve was last asked for, by route prefix."""
    applied = plane.serving.applied[-1] if plane.serving.applied else []
    return {spec.route_prefix[1:]: (spec.min_replicas, spec.max_replicas) for spec in applied}


@pytest.mark.parametrize(
    ("cpus", "options", "wanted", "replicas"),
    [
        ([4], HALF, {"eve": {"fewest": 64}}, {"eve": (2, 2)}),
        ([4], HALF, {"eve": {"most": 64}}, {"eve": (1, 2)}),
        ([4], HALF, {"eve": {"fewest": 0, "most": 64}}, {"eve": (0, 2)}),
        ([4], HALF, {"eve-0": {"most": 64}, "eve-1": {"fewest": 64}, "ann": {}}, {"eve-0": (1, 1), "ann": (1, 1)}),
        ([4], HALF, {**{f"eve-{n}": {} for n in range(9)}, "ann": {}}, {"eve-0": (1, 1), "ann": (1, 1)}),
        ([8], HALF, {"eve": {"cpus": 8}, "ann": {"most": 9}}, {"ann": (1, 4)}),
        ([8], HALF, {"eve": {"cpus": 256}, "ann": {"cpus": 3}}, {"ann": (1, 1)}),
        ([8], HALF, {"eve-0": {"cpus": 2, "most": 9}, "ann": {"most": 9}}, {"eve-0": (1, 1), "ann": (1, 2)}),
        ([8], HALF, {"eve-0": {"most": 9}, "eve-1": {"fewest": 2, "most": 2}}, {"eve-0": (1, 2), "eve-1": (2, 2)}),
        ([4, 4], {}, {"eve": {"cpus": 3, "fewest": 9}, "ann": {"cpus": 4}}, {"eve": (1, 1), "ann": (1, 1)}),
        ([4], {}, {"ann": {"cpus": 4}}, {"ann": (1, 1)}),
        ([1], HALF, {"ann": {}}, {"ann": (1, 1)}),
        ([2], HALF, {"ann": {"most": 4}}, {"ann": (1, 1)}),
        ([0.3], HALF, {"ann": {}}, {}),
        ([6], HALF, {f"{name}-{n}": {} for n in range(4) for name in ("eve", "ann", "bob")},
         {"eve-0": (1, 1), "ann-0": (1, 1), "bob-0": (1, 1)}),
    ],
)  # fmt: skip
def test_tenants_share_what_is_open_to_deployments(
    plane: Plane, model: Model, cpus: list[float], options: Any, wanted: Any, replicas: Any
) -> None:
    for name, fields in wanted.items():
        want(plane, model, name, **fields)
    sharing(plane, *cpus, **options).tick()
    assert asked(plane) == replicas


def test_gpus_are_shared_as_cores_are_and_weights_count(plane: Plane, model: Model) -> None:
    weights = having(lambda tenant: TenantPolicy(weight=3 if tenant == "ann" else 1))
    want(plane, model, "eve", most=9, **GPU)
    want(plane, model, "ann", most=9, **GPU)
    want(plane, model, "bob", most=9)
    sharing(plane, 64, gpus=8, policies=weights, **HALF).tick()
    assert asked(plane) == {"eve": (1, 1), "ann": (1, 3), "bob": (1, 9)}


def test_a_deployment_without_a_place_says_what_it_lacks_and_comes_when_there_is_one(
    plane: Plane, model: Model
) -> None:
    reconciler, large = sharing(plane, 4, **HALF), want(plane, model, "eve-0", cpus=256)
    reconciler.tick()

    def told(deployment: str, tenant: str = "eve") -> tuple[DeploymentStatus, str]:
        state = plane.catalog.get_deployment(deployment, tenant=tenant).state
        return state.status, state.message

    assert told(large)[0] is DeploymentStatus.PENDING
    assert "256 CPU (engine.num_threads 256), and the largest nodes have 4 CPU" in told(large)[1]
    first, second = (want(plane, model, f"eve-{number}", fewest=number, most=9) for number in (1, 2))
    reconciler.tick()
    assert asked(plane) == {"eve-1": (1, 1), "eve-2": (1, 1)}
    ann = want(plane, model, "ann")
    plane.serving.become(first, DeploymentStatus.RUNNING, replicas=1)
    reconciler.tick()
    reconciler.tick()
    assert asked(plane) == {"eve-1": (1, 1), "ann": (1, 1)}, "the youngest deployment of the largest tenant makes room"
    assert told(second)[0] is DeploymentStatus.PENDING
    assert (
        "only 0 of 2 replicas (min_replicas) fit (1 CPU each): the deployments of all tenants, with draining "
        "replicas, share the 2 of 4 CPU that deployments may use" in told(second)[1]
    )
    assert told(first)[0] is DeploymentStatus.RUNNING
    assert "only 1 of 9 replicas (max_replicas) fit" in told(first)[1]
    assert told(ann, "ann") == (DeploymentStatus.DEPLOYING, "")
    plane.catalog.change_deployment(
        large, lambda item, held: (item.spec.model_copy(update={"engine": {}}), item.state), tenant="eve"
    )
    plane.cluster.nodes = [Node({"CPU": 8.0}, {})]
    plane.clock.now += 200
    reconciler.tick()
    assert asked(plane) == {"eve-0": (1, 1), "eve-1": (1, 1), "eve-2": (1, 1), "ann": (1, 1)}


@pytest.mark.parametrize("how", ["delete", "shrink", "resize", "gone"])
def test_replicas_that_drain_count_for_their_tenant_alone(plane: Plane, model: Model, how: str) -> None:
    """Otherwise a tenant that keeps changing deployments would hold more and more places."""
    reconciler, first = sharing(plane, 4, **HALF), want(plane, model, "eve-0", fewest=2)
    reconciler.tick()
    if how in ("delete", "gone"):
        plane.catalog.set_deployment_state(first, DeploymentState(DeploymentStatus.DELETING))
    else:
        changes = {"min_replicas": 1, "max_replicas": 1, **({"engine": {"num_threads": 2}} if how == "resize" else {})}
        plane.catalog.change_deployment(
            first, lambda item, held: (item.spec.model_copy(update=changes), item.state), tenant="eve"
        )
    reconciler.tick()
    kept = {} if how == "delete" else {"eve-0": (1, 1)}
    want(plane, model, "eve-1", fewest=2)
    if how == "gone":
        plane.serving.forget(first)
        reconciler.tick()
        assert asked(plane) == {"eve-1": (2, 2)}
        return
    for _ in range(2):
        reconciler.tick()
        assert asked(plane) == kept
    if how != "resize":
        want(plane, model, "ann")
        reconciler.tick()
        assert asked(plane) == {**kept, "ann": (1, 1)}, "draining replicas take nothing from other tenants"
    plane.clock.now += 200
    reconciler.tick()
    left = {"delete": {"eve-1": (1, 1), "ann": (1, 1)}, "shrink": {**kept, "ann": (1, 1)}, "resize": kept}
    assert asked(plane) == left[how]


def test_nodes_that_are_gone_for_a_moment_end_no_replica(plane: Plane, model: Model) -> None:
    reconciler = sharing(plane, 2, 2, **HALF)
    want(plane, model, "ann", fewest=2)
    seen = ([2.0, 2.0], 0, 2), (None, 700, 2), ([2.0], 700, 1), ([2.0, 2.0], 200, 2), ([], 9, 2)
    for nodes, seconds, replicas in seen:
        plane.cluster.nodes = nodes and [Node({"CPU": cpus}, {}) for cpus in nodes]
        plane.clock.now += seconds
        reconciler.tick()
        assert asked(plane) == {"ann": (replicas, replicas)}


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 1.0),
        ({"api_keys_file": "keys.yaml"}, 0.5),
        ({"oidc_file": "issuers.yaml"}, 0.5),
        ({"api_keys_file": "keys.yaml", "serve_dashboard_url": "http://127.0.0.1:9"}, 1.0),
        ({"api_keys_file": "keys.yaml", "deployments_share": 0.9}, 0.9),
        ({"deployments_share": 0.25}, 0.25),
    ],
)
def test_places_are_kept_for_jobs_where_there_are_tenants(settings: dict[str, Any], share: float) -> None:
    assert Settings(_env_file=None, **settings).resolved_deployments_share == share  # type: ignore[call-arg]
