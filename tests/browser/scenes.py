"""Scenes of the dashboard: jobs, models and deployments of a control plane whose clusters are fakes."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE
from swiftkv_platform.contract.traffic import CapturedRequest, format_utc_day, make_part_key, make_traffic_prefix
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import write_manifest
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.storage.traffic import TrafficStore, encode_row
from tests.support.browsers import playwright
from tests.support.components import make_components
from tests.support.fakes.scripted_server import Answer, Request, Script, event_stream, serve
from tests.unit.control_plane.routes.conftest import SPEC, Server, served_control_plane

expect = playwright.expect
Page = playwright.Page

PASSED = {"passed": True, "outcome": "passed"}
REPORT: dict[str, Any] = {
    "teacher": {"perplexity": 13.46},
    "rewired": {"perplexity": 35.16, "kl": 0.974, "top1_agreement": 0.49},
    "distilled": {"perplexity": 15.62, "kl": 0.173, "top1_agreement": 0.777},
    "kl_recovered": 0.82,
    "prefill_flops_ratio": 0.508,
    "kv_bytes_ratio": 0.75,
    "ttft_ms": {"dense": 376.0, "swiftkv": 196.0},
    "tokens_trained": 817334,
    "training": {"step": 30},
    "gates": [
        {"field": f"evaluation.{field}", "subject": subject, "limit": limit, "value": value, **more, **PASSED}
        for field, subject, limit, value, more in (
            ("max_kl", "KL to the teacher", 0.2, 0.173, {"interval": [0.16, 0.186]}),
            ("min_top1_agreement", "top-1 agreement", 0.7, 0.777, {}),
        )
    ],
}
TRIALS: list[dict[str, Any]] = [
    {"trial": "l9-g1", "error": None, "prefill_flops_ratio": 0.758, "kv_bytes_ratio": 1.0, "kl": 0.01},
    {"trial": "l6-g1", "error": None, "prefill_flops_ratio": 0.516, "kv_bytes_ratio": 1.0, "kl": 0.104},
    {"trial": "l6-g2", "error": None, "prefill_flops_ratio": 0.508, "kv_bytes_ratio": 0.75, "kl": 0.269},
    {"trial": "l7-g4", "error": None, "prefill_flops_ratio": 0.6, "kv_bytes_ratio": 0.7, "kl": 0.4},
    {"trial": "l9-g4", "error": "three layers are left: g is at most 3"},
]
PUBLISH_TARGET = "s3://models/default"
"""Address that models may be published to."""
OUT_OF_MEMORY = "a worker ran out of GPU memory at step 12; micro_batch_size 1 would fit"


def address(server: Server) -> str:
    return str(server.client.base_url)


class WallClock:
    """A clock that runs at real speed and that a test can set forward: replicas' rates use real seconds."""

    ahead = -3600.0

    def __call__(self) -> float:
        return time.time() + self.ahead


def forward(server: Server, seconds: float) -> None:
    assert isinstance(server.parts.clock, WallClock)
    server.parts.clock.ahead += seconds


def editor(page: Page) -> playwright.Locator:
    """Return the editor of a new job's spec."""
    return page.get_by_role("textbox", name="Spec, YAML or JSON")


def paste(page: Page, text: str) -> None:
    """Replace the spec by `text`, as from the clipboard: the editor renders only the lines in view."""
    editor(page).focus()
    page.keyboard.press("Control+a")
    editor(page).evaluate(
        """(element, text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          element.dispatchEvent(new ClipboardEvent("paste", {clipboardData, bubbles: true, cancelable: true}));
        }""",
        text,
    )


@contextmanager
def control_plane(tmp_path: Path, empty_database: Path, *, replicas: Script | None = None) -> Iterator[Server]:
    """Run a control plane in this process; `replicas` answers for its deployments."""
    with serve(replicas or Script()) as serve_url:
        database = Database(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'test.db')}")
        parts = make_components(database, LocalObjectStore(tmp_path / "store"), clock=WallClock())
        settings = Settings(home=tmp_path, serve_url=serve_url, publish_targets=(PUBLISH_TARGET,), _env_file=None)
        with served_control_plane(parts, settings) as url, httpx.Client(base_url=url) as client:
            yield Server(client, parts, settings)


def replica_page(name: str, *, tokens: int, exited: int, answers: int, seconds: float, waiting: int) -> bytes:
    """Return a replica's metrics in Prometheus' format."""
    values = {
        f'swiftkv:replica_info{{replica="{name}"}}': 1,
        "swiftkv:generation_tokens_total": tokens,
        "swiftkv:tokens_exited_total": exited,
        "swiftkv:time_to_first_token_seconds_count": answers,
        "swiftkv:time_to_first_token_seconds_sum": seconds,
        "swiftkv:num_requests_waiting": waiting,
        "swiftkv:kv_cache_usage_perc": 0.25,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items()).encode()


def busy_replica() -> Script:
    """Return a replica under load: its totals grow with each scrape, and it answers prompts."""
    script = Script()
    looks = 0

    def metrics(_: Request) -> Answer:
        nonlocal looks
        looks += 1
        figures = {"tokens": 93 * looks, "exited": 20 * looks, "answers": looks, "seconds": 0.2 * looks}
        return Answer(200, replica_page("one", **figures, waiting=looks % 3))  # type: ignore[arg-type]

    for route in ("", "/chat", "/next", "/a", "/b"):
        script.on("GET", f"{route}/metrics", metrics)
        script.on("POST", f"{route}/generate", event_stream(*answer_events()))
    return script


def answer_events() -> list[tuple[None, Any]]:
    """Return the events of an answer with two tokens that exited early and two drafted ones."""

    def counts(exited: int, drafted: int) -> dict[str, int]:
        return {"num_exited_tokens": exited, "num_accepted_tokens": drafted}

    pieces = [
        ("Prompts", 0, 0, 1),
        (" stop", 1, 0, 1),
        (" at", 0, 0, 1),
        (" layer l and", 0, 2, 3),
        (" go on.", 1, 0, 1),
    ]
    events = [
        {"choices": [{"index": 0, "text": text, "token_ids": [1] * tokens, **counts(exited, drafted)}]}
        for text, exited, drafted, tokens in pieces
    ]
    prompt = {"prompt_tokens": 40, "cached_tokens": 16, "prefill_layers_skipped_tokens": 8}
    usage = {**prompt, "completion_tokens": 7, "early_exit_tokens": 2}
    return [
        *((None, event) for event in events[:-1]),
        (None, {**events[-1], "usage": usage, "timings": {"ttft_ms": 22, "tpot_ms": 8}}),
        (None, "[DONE]"),
    ]


def trained(server: Server, name: str = "python-half", **spec: Any) -> dict[str, Any]:
    """Run a job to success, with curves, checkpoints, a report and a log; return the job."""
    job_id: str = server.submit(name=name, **spec)["id"]
    forward(server, 45)
    server.tick()
    worker = server.worker(job_id)
    forward(server, 20)
    begun = int(server.parts.clock())
    worker.say("status", status="running", time=begun)
    points = [
        {"step": step, "tokens": 900 * step, "loss": 2.0 / (1 + step / 9), "lr": 3e-3, "tokens_per_second": 2500 + step}
        for step in range(1, 31)
    ]
    for step in (15, 30):
        points[step - 1]["held_out_kl"] = 6.0 / step
    worker.say("metrics", time=begun + 1, points=points, total_steps=30)
    for step in (15, 30):
        key, at = worker.checkpoint(step, held_out_kl=6.0 / step), begun + 6.0 * step
        worker.say("checkpoint", f"step {step} saved", time=at, step=step, key=key, size=7, sha256="0" * 64)
    write_artifact(server, job_id)
    server.cluster.submissions[f"{job_id}-1"].log = "worker ready\nWARNING the store is slow\ntrained\n"
    server.tick()
    forward(server, 180)
    worker.say("status", status="evaluating", time=begun + 180)
    server.tick()
    forward(server, 60)
    server.end(job_id)
    job: dict[str, Any] = server.get(f"/jobs/{job_id}")
    assert job["status"] == "succeeded"
    return job


def evaluated(server: Server) -> str:
    """Let the queued job evaluate its checkpoint; return its model's id."""
    (job,) = server.get("/jobs", status="queued")["data"]
    server.tick()
    write_artifact(server, job["id"])
    server.end(job["id"])
    model: str = server.get(f"/jobs/{job['id']}")["distilled_model"]
    return model


def write_artifact(server: Server, job_id: str) -> None:
    objects, prefix = server.parts.objects, f"jobs/{job_id}/attempts/1/artifact"
    objects.put_bytes(f"{prefix}/evaluation.json", json.dumps(REPORT).encode())
    size = objects.head(f"{prefix}/evaluation.json").size
    files = {"evaluation.json": {"size": size, "sha256": "0" * 64}}
    spec = server.get(f"/jobs/{job_id}")["spec"]
    lineage = {"teacher": "org/teacher", "data_fingerprint": "9f" * 32, "spec": spec}
    if spec["publish"]["adapter"]:
        lineage[ADAPTER_LINEAGE] = "d" * 64
    write_manifest(objects, prefix, files, kind="artifact", lineage=lineage, metrics=REPORT)


def failed(server: Server) -> str:
    """Run a job that fails because it is out of memory; return its id."""
    job_id: str = server.submit(name="too-large")["id"]
    worker = server.run(job_id)
    worker.say("error", OUT_OF_MEMORY, code="out_of_memory", retryable=False)
    server.tick()
    server.end(job_id, SubmissionStatus.FAILED)
    assert server.get(f"/jobs/{job_id}")["status"] == "failed"
    return job_id


def sweep(server: Server) -> str:
    """Run a job that reports the results of its trials; return its id."""
    job_id: str = server.submit(name="python-sweep", evaluation={"max_kl": 0.2})["id"]
    server.tick()
    measured = [{**row, "perplexity_ratio": 1.1, "within_budget": "kl" in row and row["kl"] < 0.2} for row in TRIALS]
    server.worker(job_id).say("status", status="running")
    server.worker(job_id).say("message", "5 trials finished", time=1003, sweep=measured, recommended="l6-g1")
    server.tick()
    return job_id


def deploy(server: Server, model: str | None = None, **spec: Any) -> str:
    """Create a deployment with one replica; return its id."""
    model = model or server.succeed()["distilled_model"]
    answer = server.client.post("/deployments", json={"model": model, **spec})
    deployment: str = answer.json()["id"]
    server.tick()
    server.serving.become(deployment, DeploymentStatus.RUNNING, replicas=1)
    server.tick()
    return deployment


def capture(server: Server, deployment: str, number: int = 3) -> TrafficStore:
    """Store captured requests of two users, as replicas do: `r1` is the oldest."""
    traffic = TrafficStore(server.parts.objects, make_traffic_prefix("default", deployment))
    now = server.parts.clock()
    call = {"id": "c", "type": "function", "function": {"name": "send", "arguments": '{"to": "[email]"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Write to [email], my key is [secret]."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    usual = {"path": "/v1/chat/completions", "model": "mdl_1", "finish_reason": "tool_calls", "redacted": 3}
    for index in range(1, number + 1):
        time_ = now - number + index
        row = CapturedRequest(
            id=f"r{index}",
            time=time_,
            user=("ann", "bob")[index % 2],
            messages=messages,
            tools=[{"type": "function", "function": {"name": "send"}}],
            prompt_tokens=1200,
            completion_tokens=34,
            **usual,
        )
        traffic.write_part([encode_row(row)], name=make_part_key(format_utc_day(time_)))
    return traffic


def upload(server: Server, name: str) -> str:
    """Upload a file of two rows; return its id."""
    sent = {"files": {"file": (name, b'{"text": "a"}\n' * 2)}, "data": {"purpose": "fine-tune"}}
    answer = server.client.post("/v1/files", **sent, timeout=60).raise_for_status()  # type: ignore[arg-type]
    file: str = answer.json()["id"]
    return file


def team(server: Server) -> dict[str, str]:
    """Create two trained models, both deployed, a file, a running sweep, a waiting job and a failed one.

    Returns the pages that show them, by name.
    """
    first, second = (
        trained(server, name, swiftkv=swiftkv)
        for name, swiftkv in (("python-half", {"deep_tail": 16}), ("python-half-g4", {"key_value_group_size": 4}))
    )
    server.client.post(f"/models/{first['distilled_model']}/promote", json={"reason": "best KL"}).raise_for_status()
    chat = deploy(server, first["distilled_model"], route_prefix="/chat", capture={"share": 0.5})
    capture(server, chat)
    deploy(server, second["distilled_model"], route_prefix="/next")
    lost, running = failed(server), sweep(server)
    file = upload(server, "support-chats-" + "2026-" * 20 + ".jsonl")
    server.submit(**{**SPEC, "name": "waits-for-its-turn", "data": {"sources": [{"name_or_path": file}]}})
    return {
        "overview": "overview",
        "jobs": "jobs",
        "job": f"jobs/{first['id']}",
        **{f"job's {tab}": f"jobs/{first['id']}?tab={tab}" for tab in ("metrics", "checkpoints", "log", "spec")},
        "unknown job": "jobs/job_nope",
        "failed job": f"jobs/{lost}",
        "sweep": f"jobs/{running}",
        "runs": f"runs?jobs={first['id']},{second['id']}",
        "new job": "submit",
        "new job on a file": f"submit?file={file}",
        "files": "files",
        "clone": f"submit?job={first['id']}",
        "models": "models",
        "model": f"models/{first['distilled_model']}",
        "deployments": "deployments",
        "deployment": f"deployments/{chat}",
        "traffic": f"traffic/{chat}",
        "playground": f"playground?a={chat}",
        "audit": "audit",
    }
