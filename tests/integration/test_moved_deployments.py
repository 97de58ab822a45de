"""A control plane that is given another Ray cluster deploys everything in its table there, while the deployments of the
old cluster still answer: the upgrade of Ray that infra/README.md describes."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentRepository, DeploymentStatus
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository, get_import_prefix
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.integration.conftest import wait_for
from tests.integration.load import PROMPTS, Load, ask, greedy_answers, publish, replica_pids
from tests.support.components import make_components
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.rays import free_port, ray_head
from tests.support.records import UNDISPUTED
from tests.unit.engine.tiny_models import save_swiftkv

pytestmark = [pytest.mark.integration, pytest.mark.soak("starts two heads")]


def test_deployments_move_to_another_cluster_without_a_request_lost(tmp_path: Path, sqlite_database: Database) -> None:
    model = save_swiftkv(tmp_path / "model", 256)
    artifact = publish(model, tmp_path / "store", get_import_prefix("mdl_one"))
    expected = {"mdl_one": greedy_answers(artifact)}
    rows = DeploymentRepository(sqlite_database)
    registered = Model("mdl_one", "default", "one", None, 0, 1, str(artifact), "d" * 64, 7, {}, {})
    registry = ModelRepository(sqlite_database)
    registry.schedule_import_cleanup(registered.prefix, by="default", now=1.0)
    registry.register_import(registered, now=1.0)
    spec = ResolvedDeployment(id="dep_one", model="mdl_one", artifact_uri=str(artifact), engine={"num_threads": 1})
    rows.create_deployment(Deployment(spec, "default", 1))

    def bring_up(cluster: RayServe) -> None:
        """Reconcile as a control plane does that has just started with this cluster's address."""
        wait_for(lambda: cluster.list_states() == {})
        parts = replace(make_components(sqlite_database, InMemoryObjectStore()), serving=cluster)
        reconciler = DeploymentReconciler(parts, Settings(_env_file=None), UNDISPUTED)  # type: ignore[call-arg]

        def runs() -> bool:
            reconciler.tick()
            return rows.list_all_deployments().items[0].state.status is DeploymentStatus.RUNNING

        wait_for(runs)

    first_url, second_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with ray_head(num_cpus=2) as first, closing(RayServe(first.dashboard_url, first_url)) as before:
        bring_up(before)
        replicas = replica_pids(first.dashboard_url, spec.id)
        with (
            Load(first_url, expected, num_clients=2, pause_s=0.1) as load,
            ray_head(num_cpus=2) as second,
            closing(RayServe(second.dashboard_url, second_url)) as after,
        ):
            bring_up(after)
            have = len(load.answers)
            wait_for(lambda: len(load.answers) > have + 10)
            assert replica_pids(first.dashboard_url, spec.id) == replicas, "the old replicas were restarted"
            with closing(httpx.Client(base_url=second_url, timeout=60.0, trust_env=False)) as client:
                assert ask(client, PROMPTS[0], stream=False) == ({"mdl_one"}, expected["mdl_one"][0])
        assert (load.failed, load.wrong) == ([], [])
