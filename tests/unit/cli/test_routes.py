"""Every route of the control plane's OpenAPI document is reached by a method of the client and by a command."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app as command_line
from swiftkv_platform.client import Client
from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from tests.support.fakes.scripted_server import Answer, Script, event_stream, serve
from tests.support.servers import serving
from tests.unit.control_plane.routes.conftest import SPEC, Start

Call = Callable[[Client, dict[str, str]], Any]

TRACKED = "attempts/1/tracking/offline-run-20261123_000000-job/run-job.wandb"

FINE_TUNING = (
    *(f"{method} /v1/fine_tuning/jobs" for method in ("GET", "POST")),
    *(f"GET /v1/fine_tuning/jobs/{{job_id}}{part}" for part in ("", "/events", "/checkpoints")),
    *(f"POST /v1/fine_tuning/jobs/{{job_id}}/{verb}" for verb in ("cancel", "pause", "resume")),
)

CALLS: dict[str, tuple[Call | None, str | None]] = {
    "GET /healthz": (lambda own, _: own.health(), None),
    "GET /readyz": (lambda own, _: own.ready(), None),
    "GET /readyz/{check}": (None, None),
    "GET /metrics": (None, None),
    "POST /jobs": (lambda own, _: own.jobs.create(SPEC), "jobs submit -f {spec}"),
    "POST /jobs/validate": (lambda own, _: own.jobs.validate(SPEC), "jobs validate -f {spec} --url {url}"),
    "GET /jobs": (lambda own, _: own.jobs.list(), "jobs list"),
    "GET /jobs/{job_id}": (lambda own, ids: own.jobs.get(ids["done"]), "jobs get {done}"),
    "POST /jobs/{job_id}/pause": (lambda own, ids: own.jobs.pause(ids["job"]), "jobs pause {job}"),
    "POST /jobs/{job_id}/resume": (lambda own, ids: own.jobs.resume(ids["job"]), "jobs resume {job}"),
    "POST /jobs/{job_id}/cancel": (lambda own, ids: own.jobs.cancel(ids["job"]), "jobs cancel {job}"),
    "GET /jobs/{job_id}/events": (
        lambda own, ids: list(own.jobs.events(ids["done"], follow=False)),
        "jobs events {done}",
    ),
    "GET /jobs/{job_id}/metrics": (lambda own, ids: own.jobs.metrics(ids["done"]), "jobs metrics {done}"),
    "GET /jobs/{job_id}/logs": (lambda own, ids: list(own.jobs.logs(ids["done"])), "jobs logs {done}"),
    "GET /jobs/{job_id}/checkpoints": (lambda own, ids: own.jobs.checkpoints(ids["done"]), "jobs checkpoints {done}"),
    "GET /jobs/{job_id}/artifacts": (lambda own, ids: own.jobs.artifacts(ids["done"]), "jobs artifacts {done}"),
    "GET /jobs/{job_id}/artifacts/{path}": (
        lambda own, ids: own.jobs.download(ids["done"], "manifest.json", Path(ids["fresh"]) / "manifest.json"),
        "jobs download {done} {fresh} --file manifest.json",
    ),
    "GET /jobs/{job_id}/tracking": (
        lambda own, ids: own.jobs.list_tracking_files(ids["done"]),
        "jobs wandb-sync {done} --dry-run",
    ),
    "GET /jobs/{job_id}/tracking/{tracking_path}": (
        lambda own, ids: own.jobs.download_tracking_file(ids["done"], TRACKED, Path(ids["fresh"]) / "run.wandb"),
        None,  # `jobs wandb-sync` needs a W&B: tests/unit/tracking/test_wandb_outages.py
    ),
    "POST /v1/files": (lambda own, ids: own.files.upload(Path(ids["rows"])), "files upload {rows}"),
    "GET /v1/files": (lambda own, _: own.files.list(), "files list"),
    "GET /v1/files/{file_id}": (lambda own, ids: own.files.get(ids["file"]), "files show {file}"),
    "GET /v1/files/{file_id}/content": (
        lambda own, ids: own.files.download(ids["file"], Path(ids["fresh"]) / "rows.jsonl"),
        "files download {file} {fresh}-rows.jsonl",
    ),
    "DELETE /v1/files/{file_id}": (lambda own, ids: own.files.delete(ids["file"]), "files delete {file}"),
    "POST /models": (
        lambda own, ids: own.models.create(from_checkpoint=f"{ids['done']}:2"),
        "models create --from-checkpoint {done}:2 --name chosen --set evaluation.max_kl=0.5",
    ),
    "POST /models/import": (
        lambda own, ids: own.models.import_(ids["student"]),
        "models import {student} --name brought",
    ),
    "GET /models": (lambda own, _: own.models.list(), "models list"),
    "GET /models/{model_id}": (lambda own, ids: own.models.get(ids["model"]), "models get {model}"),
    "GET /models/{model_id}/lineage": (lambda own, ids: own.models.lineage(ids["model"]), "models lineage {model}"),
    "GET /models/{model_id}/compare/{other_id}": (
        lambda own, ids: own.models.compare(ids["model"], ids["model"]),
        "compare {model} {other}",
    ),
    "GET /models/{model_id}/compare/{other_id}/rows/{task}": (
        lambda own, ids: own.models.changed_rows(ids["model"], ids["other"], task="own"),
        "compare {model} {other} --task own",
    ),
    "POST /models/{model_id}/publish": (
        lambda own, ids: own.models.publish(ids["model"], to="s3://models/one"),
        "models publish {model} --to s3://models/one",
    ),
    "POST /models/{model_id}/promote": (
        lambda own, ids: own.models.promote(ids["other"], reason="better"),
        "models promote {other} --reason better",
    ),
    "GET /aliases": (lambda own, _: own.models.aliases(), "models aliases"),
    "GET /aliases/{alias}": (lambda own, _: own.models.alias("production"), "models aliases --alias production"),
    "POST /aliases/{alias}/rollback": (
        lambda own, _: own.models.rollback(reason="worse"),
        "models rollback --reason worse",
    ),
    "POST /deployments": (
        lambda own, ids: own.deployments.create(ids["model"], route_prefix="/second"),
        "deploy {model} --route-prefix /second --no-wait",
    ),
    "GET /deployments": (lambda own, _: own.deployments.list(), "deployments list"),
    "GET /deployments/{deployment_id}": (
        lambda own, ids: own.deployments.get(ids["deployment"]),
        "deployments get {deployment}",
    ),
    "PATCH /deployments/{deployment_id}": (
        lambda own, ids: own.deployments.update(ids["deployment"], max_replicas=3),
        "deployments update {deployment} --set max_replicas=3",
    ),
    "GET /deployments/{deployment_id}/metrics": (
        lambda own, ids: own.deployments.metrics(ids["deployment"]),
        "deployments metrics {deployment}",
    ),
    "GET /deployments/{deployment_id}/rollouts": (
        lambda own, ids: own.deployments.rollouts(ids["deployment"]),
        "deployments rollouts {deployment}",
    ),
    "POST /deployments/{deployment_id}/rollouts/{job_id}/rollback": (
        lambda own, ids: own.deployments.roll_back(ids["deployment"], ids["rolled"], reason="worse"),
        "deployments rollback {deployment} {rolled} --reason worse",
    ),
    "GET /deployments/{deployment_id}/traffic": (
        lambda own, ids: own.deployments.traffic(ids["deployment"]),
        "traffic show {deployment}",
    ),
    "GET /deployments/{deployment_id}/traffic/rows": (
        lambda own, ids: own.deployments.captured_requests(ids["deployment"]),
        "traffic rows {deployment}",
    ),
    "DELETE /deployments/{deployment_id}/traffic": (
        lambda own, ids: own.deployments.delete_traffic(ids["deployment"], user="ann"),
        "traffic delete {deployment} --user ann",
    ),
    "POST /deployments/{deployment_id}/generate": (
        lambda own, ids: list(own.deployments.generate(ids["deployment"], "a")),
        "generate a --deployment {deployment}",
    ),
    "DELETE /deployments/{deployment_id}": (
        lambda own, ids: own.deployments.delete(ids["deployment"]),
        "deployments delete {deployment}",
    ),
    "DELETE /models/{model_id}": (
        lambda own, ids: own.models.delete(ids["spare_model"]),
        "models delete {spare_model}",
    ),
    "DELETE /jobs/{job_id}": (lambda own, ids: own.jobs.delete(ids["spare"]), "jobs delete {spare}"),
    "POST /deployments/{deployment_id}/chat/completions": (None, None),
    **dict.fromkeys(FINE_TUNING, (None, None)),
    "GET /recipes": (lambda own, _: own.jobs.recipes(), "jobs recipes"),
    "GET /audit": (lambda own, _: own.audit(status=201), "audit --status 201"),
    "GET /quota": (lambda own, _: own.quota(), "quota"),
}
"""By route: the client's method and the command. None: only probes, Prometheus or OpenAI's clients use the route."""


@dataclass
class Recorder:
    """Records which routes were reached and answered without an error."""

    app: ASGIApp
    reached: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400 and "route" in scope:
                self.reached.add(f"{scope['method']} {scope['route'].path}")
            await send(message)

        await self.app(scope, receive, watched)


@dataclass
class Platform:
    url: str
    recorder: Recorder
    ids: dict[str, str]

    def client(self) -> Client:
        return Client(self.url, max_retries=0)

    def run(self, command: str) -> None:
        environment = {"SWIFTKV_URL": self.url, "SWIFTKV_HOME": str(Path(self.ids["spec"]).parent)}
        result = CliRunner(env=environment).invoke(command_line, command.format(**self.ids).split())
        assert result.exit_code == 0, result.output


@pytest.fixture
def platform(parts: Components, start: Start, tmp_path: Path) -> Iterator[Platform]:
    """A control plane with a job that has succeeded, one that waits, and a deployment that answers."""
    script = Script()
    generation = {"id": "gen_1", "model": "m", "choices": [{"index": 0, "text": "b"}]}
    script.on("POST", "/generate", event_stream((None, generation), (None, "[DONE]")))
    script.on("GET", "/metrics", Answer(200, b'swiftkv:replica_info{replica="one"} 1\n'))
    with serve(script) as serve_url:
        server = start(serve_url=serve_url, publish_targets=("s3://models",))
        settings = server.settings.model_copy(update={"reconcile_interval_s": 1e6})
        recorder = Recorder(create_app(settings, components=parts))
        with serving(recorder) as url, Client(url) as own:  # type: ignore[arg-type]
            report = {"tasks": [{"task": "own", "metric": "contains", "row_results": "000-own"}]}
            done, other, spare = (server.succeed(name=name, report=report) for name in ("done", "other", "spare"))
            for job in (done, other):
                parts.objects.put_bytes(AttemptId(job["id"], 1).row_results_key("000-own"), b"")
            model = done["distilled_model"]
            parts.objects.put_bytes(f"jobs/{done['id']}/{TRACKED}", b"recorded")
            deployment = own.deployments.create(model, route_prefix="/").id
            server.tick()
            server.serving.become(deployment, DeploymentStatus.RUNNING, replicas=1)
            server.tick()
            own.models.promote(model, reason="first")
            rolled = server.succeed(name="rolled", rollout={"deployment": deployment})["id"]
            spec, rows = tmp_path / "spec.yaml", tmp_path / "rows.jsonl"
            spec.write_text(yaml.safe_dump(SPEC))
            rows.write_text('{"text": "x"}\n')
            ids = {"done": done["id"], "job": server.submit()["id"], "model": model, "deployment": deployment}
            ids |= {"rolled": rolled}
            ids |= {"other": other["distilled_model"], "spare": spare["id"], "spare_model": spare["distilled_model"]}
            (tmp_path / "student").mkdir()
            (tmp_path / "student" / "config.json").write_text('{"model_type": "llama_swiftkv"}')
            (tmp_path / "student" / "model.safetensors").write_bytes(b"weights")
            ids |= {"student": str(tmp_path / "student")}
            ids |= {"file": own.files.upload(rows).id, "rows": str(rows), "spec": str(spec), "url": url}
            yield Platform(url, recorder, {**ids, "fresh": str(tmp_path / "fresh")})


@pytest.mark.slow("reaches every route")
def test_the_client_reaches_every_route(platform: Platform) -> None:
    paths: dict[str, dict[str, Any]] = httpx.get(f"{platform.url}/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert routes - CALLS.keys() == set(), "routes without a client method and a command"
    assert CALLS.keys() - routes == set(), "routes that no longer exist"
    with platform.client() as client:
        for route, (call, _) in CALLS.items():
            if call is not None:
                platform.recorder.reached.clear()
                call(client, platform.ids)
                assert shown(route) in platform.recorder.reached, route


@pytest.mark.slow("runs every command")
def test_a_command_reaches_every_route(platform: Platform) -> None:
    for route, (_, command) in CALLS.items():
        if command is not None:
            platform.recorder.reached.clear()
            platform.run(command)
            assert shown(route) in platform.recorder.reached, route


def shown(route: str) -> str:
    return route.replace("path}", "path:path}").replace("{task}", "{task:path}")
