"""Real servers under a control plane are made to fail; a real Prometheus turns each fault into its alert.

Only time is faked: the alerts' `for` is removed, and the control plane's clock is set forward for faults that take
time.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import pytest

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.ray import Entrypoint
from swiftkv_platform.control_plane.wiring import build_components
from swiftkv_platform.local.ray_head import make_auth_environment
from swiftkv_platform.settings import Settings
from tests.integration.conftest import environment, wait_for
from tests.integration.planes import READ_REQUEST, ROOT, RayCluster
from tests.support.infra_files import INFRA, documents
from tests.support.prometheus import Prometheus, program, prometheus
from tests.support.rays import HeadProcess, free_port
from tests.support.requirements import required_module
from tests.support.s3_servers import Front, client_environment, run_moto
from tests.support.servers import serving
from tests.unit.control_plane.routes.conftest import SPEC

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.soak("starts Ray, PostgreSQL, an S3 server and Prometheus, and ends them"),
]

DAY_S = 24 * 3600.0

ATTEMPT = (
    READ_REQUEST
    + """
from swiftkv_platform.jobs.attempt.events import EventReporter
from swiftkv_platform.jobs.attempt.tracking import TrackedRun
reporter = EventReporter(store, request.attempt_id, "rank0")
if "tracked" in request.spec.metadata:
    run = TrackedRun(store, request, reporter.send_tracking)
    while run.info is None:
        time.sleep(0.1)
    run.close()
reporter.send_error("no rows", code="data_error", field=None, value=None, retryable=False)
sys.exit(1)
"""
)
"""A failing attempt; before it fails, its run is tracked by a W&B server that does not exist."""


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class Installation:
    """A control plane with its dependencies, and a Prometheus that scrapes it."""

    url: str
    ray: HeadProcess
    postgres: object
    store: Front
    clock: Clock
    tenants: Path
    webhook: str
    server: Prometheus
    stop: ExitStack
    """Stops the control plane."""

    def fires(self, alert: str, **labels: str) -> None:
        """Wait until the alert fires."""
        selector = ",".join(f'{name}="{value}"' for name, value in {"alertname": alert, **labels}.items())
        wait_for(lambda: self.server.query(f'ALERTS{{alertstate="firing",{selector}}}'))

    def firing(self) -> set[str]:
        return {labels["alertname"] for labels, _ in self.server.query('ALERTS{alertstate="firing"}')}

    def submit(self, **spec: object) -> str:
        answer = httpx.post(f"{self.url}/jobs", json={**SPEC, **spec}, timeout=60.0, trust_env=False)
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def status(self, job_id: str) -> str:
        status: str = httpx.get(f"{self.url}/jobs/{job_id}", timeout=60.0, trust_env=False).json()["status"]
        return status


def groups() -> list[dict[str, object]]:
    [document] = documents(INFRA / "monitoring" / "alerts.yaml")
    found: list[dict[str, object]] = document["spec"]["groups"]
    return found


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    program("prometheus")
    pgserver = required_module("pgserver")
    with ExitStack() as stack:
        front = stack.enter_context(closing(Front((moto := stack.enter_context(run_moto())).port)))
        nobody = f"http://127.0.0.1:{free_port()}"
        tracking = {"WANDB_BASE_URL": nobody, "WANDB_API_KEY": "0123456789abcdef" * 3, "SWIFTKV_HOME": str(tmp_path)}
        s3 = client_environment(front.port)
        stack.enter_context(environment(s3))
        ray = HeadProcess({**s3, **tracking}, num_cpus=2)
        stack.callback(ray.remove)
        ray.start()
        stack.enter_context(environment(make_auth_environment(ray.head.token_file)))
        RayCluster.of(ray.head)
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp", ignore_cleanup_errors=True))
        postgres = pgserver.get_server(place, cleanup_mode=None)
        stack.callback(postgres.cleanup)
        postgres.cleanup_mode = "stop"
        database_url = f"postgresql+psycopg://postgres@/postgres?host={quote(place, safe='')}"
        with closing(Database(database_url)) as database:
            database.upgrade()
        (tmp_path / "attempt.py").write_text(ATTEMPT.format(root=str(ROOT)))
        (tmp_path / "tenants.yaml").write_text("default: {}\n")
        (tmp_path / "secrets" / "default").mkdir(parents=True)
        (tmp_path / "secrets" / "default" / "signing").write_text("a secret that signs webhooks")
        settings = Settings(
            home=tmp_path,
            database_url=database_url,
            storage_uri=moto.uri("alerts"),
            ray_dashboard_url=ray.head.dashboard_url,
            tenants_file=tmp_path / "tenants.yaml",
            webhook_origins=(nobody,),
            secrets_dir=tmp_path / "secrets",
            max_running_jobs=4,
            _env_file=None,
        )
        clock, parts = Clock(), build_components(settings)
        entrypoint = Entrypoint((sys.executable, str(tmp_path / "attempt.py")), parts.objects.uri)
        app = create_app(settings, components=replace(parts, clock=clock, entrypoint=entrypoint))
        stop = stack.enter_context(ExitStack())
        url = stop.enter_context(serving(app))
        jobs = [{"job_name": "control-plane", "static_configs": [{"targets": [urlsplit(url).netloc]}]}]
        # A scrape waits seconds for a dependency that does not answer.
        server = stack.enter_context(prometheus(tmp_path, jobs, groups=groups(), interval_s=5))
        yield Installation(url, ray, postgres, front, clock, tmp_path / "tenants.yaml", nobody, server, stop)


def test_each_fault_fires_its_alert(installation: Installation) -> None:
    here = installation
    wait_for(lambda: [value for _, value in here.server.query("swiftkv_dependency_up")] == [1.0] * 4)
    # Alerts on changes within an hour need an earlier sample.
    wait_for(lambda: here.server.query('swiftkv_jobs{status="failed"}'))
    wait_for(lambda: not here.firing())  # alerts on absence fire until the first scrape

    webhook = {"url": f"{here.webhook}/told", "secret_ref": "signing"}
    failing = {"fault_tolerance": {"max_retries": 0}, "webhook": webhook}
    ids = [here.submit(metadata={"tracked": "yes"} if number == 0 else {}, **failing) for number in range(3)]
    wait_for(lambda: {here.status(job_id) for job_id in ids} == {"failed"})
    here.fires("SwiftKVJobsFail")
    here.fires("SwiftKVRunsUntracked")
    assert not here.firing() & {"SwiftKVWebhooksGivenUp", "SwiftKVDependencyAway"}
    here.clock.ahead += DAY_S
    here.fires("SwiftKVWebhooksGivenUp")

    here.tenants.write_text("default: {max_gpus: many}\n")
    here.fires("SwiftKVOperatorFileBroken", file="tenants")

    here.store.away = True
    here.fires("SwiftKVDependencyAway", dependency="object_store")
    here.store.away = False
    wait_for(lambda: "SwiftKVDependencyAway" not in here.firing())

    _signal(here.ray, signal.SIGSTOP)
    here.submit()
    for dependency in ("ray", "serving"):
        here.fires("SwiftKVDependencyAway", dependency=dependency)
    here.fires("SwiftKVQueueStands")
    _signal(here.ray, signal.SIGCONT)
    wait_for(lambda: "SwiftKVDependencyAway" not in here.firing())

    here.postgres.cleanup()  # type: ignore[attr-defined]
    here.fires("SwiftKVDependencyAway", dependency="database")
    assert httpx.get(f"{here.url}/jobs", timeout=60.0, trust_env=False).status_code == 503

    def requests_fail() -> bool:
        httpx.get(f"{here.url}/jobs", timeout=60.0, trust_env=False)
        return "SwiftKVRequestsFail" in here.firing()

    wait_for(requests_fail)
    here.clock.ahead += 200.0
    here.fires("SwiftKVLoopStalled")
    here.stop.close()
    here.fires("SwiftKVControlPlaneAbsent")


def _signal(head: HeadProcess, number: signal.Signals) -> None:
    assert head._process is not None
    os.killpg(head._process.pid, number)
