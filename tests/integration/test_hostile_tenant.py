"""Two tenants share a platform under the default limits, with real parts: while one attacks it, the other's job, model
and answer still succeed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.client import Client
from swiftkv_platform.local.stack import Stack, StackOptions, find_marked_processes
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.integration.test_end_to_end import SPEC
from tests.support.rays import free_port

pytestmark = [
    pytest.mark.integration("a platform of its own"),
    pytest.mark.soak("jobs and deployments of two tenants"),
    pytest.mark.timeout(900),
]

EDGES: list[dict[str, Any]] = [
    {"target_ongoing_requests": 0.01, "upscale_delay_s": 0.0, "downscale_delay_s": 1e9, "max_replicas": 64},
    {"engine": {"num_threads": 256, "kv_cache_bytes": 1 << 40}},
    {"min_replicas": 64, "max_replicas": 64},
]
"""The largest accepted settings, which no machine can satisfy: Serve keeps looking for room while they are deployed."""
BEYOND: list[dict[str, Any]] = [
    {"target_ongoing_requests": 1e-320},
    {"upscale_delay_s": 1e308},
    {"max_replicas": 2**62},
]
AMBIGUOUS = {"grammar": "start: s\ns: s s s | s s | /[a-z ]/"}
QUIET = {**SPEC, "tracking": {"wandb": {"mode": "disabled"}}}


class Hostile:
    """A tenant that attacks the platform from threads until it is told to stop."""

    def __init__(self, url: str, serve_url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.plane = httpx.Client(base_url=url, headers=headers, timeout=120.0, limits=limits, trust_env=False)
        self.serve = httpx.Client(base_url=serve_url, headers=headers, timeout=120.0, trust_env=False)
        self.stopped = threading.Event()
        self.statuses: dict[str, set[int]] = {}
        self.jobs = [self.post("jobs", "/jobs", json={**QUIET, "name": f"waits-{at}"}) for at in range(12)]
        self._threads = ThreadPoolExecutor(200)
        for act in (self.cancel, self.deploy, self.upload, self.constrain):
            self._threads.submit(self._repeat, act, 1.0)
        for at in range(180):  # refused followers wait, or they would use up the key's rate limit
            self._threads.submit(self._repeat, self.follow_events if at % 2 else self.follow_log, 30.0)

    def post(self, what: str, path: str, **body: Any) -> dict[str, Any]:
        answer = self.plane.post(path, **body)
        self.statuses.setdefault(what, set()).add(answer.status_code)
        found: dict[str, Any] = answer.json()
        return found

    def _repeat(self, act: Any, pause_s: float) -> None:
        while not self.stopped.is_set():
            with suppress(httpx.HTTPError, KeyError):  # a refused request returns no id
                act()
            self.stopped.wait(pause_s)

    def follow_events(self) -> None:
        self._follow("events", {"accept": "text/event-stream"})

    def follow_log(self) -> None:
        self._follow("logs?follow=true", {})

    def _follow(self, what: str, headers: dict[str, str]) -> None:
        path = f"/jobs/{self.jobs[-1]['id']}/{what}"
        with self.plane.stream("GET", path, headers=headers) as answer:
            self.statuses.setdefault(what, set()).add(answer.status_code)
            for _ in answer.iter_raw():
                if self.stopped.is_set():
                    return

    def cancel(self) -> None:
        made = self.post("jobs", "/jobs", json={**QUIET, "name": "cancelled"})
        self.post("cancelled", f"/jobs/{made['id']}/cancel")

    def deploy(self) -> None:
        models = self.plane.get("/models").json()["data"]
        model = models[0]["id"] if models else "mdl_none"
        for number, fields in enumerate(BEYOND):
            body = {"model": model, "route_prefix": f"/beyond-{number}", **fields}
            self.post("beyond", "/deployments", json=body)
        if models:
            for number, fields in enumerate([*EDGES, {}]):
                self.post("edges", "/deployments", json={"model": model, "route_prefix": f"/edge-{number}", **fields})

    def upload(self) -> None:
        rows = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 100_000
        self.post("files", "/v1/files", files={"file": ("a.jsonl", rows)}, data={"purpose": "fine-tune"})

    def constrain(self) -> None:
        body = {"prompt": "a", "max_tokens": 100, "n": 2, "structured_outputs": AMBIGUOUS}
        answer = self.serve.post("/t/eve/edge-0/generate", json=body)
        self.statuses.setdefault("grammar", set()).add(answer.status_code)

    def close(self) -> None:
        self.stopped.set()
        self.plane.close()
        self.serve.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # open streams end with the server


@pytest.fixture
def tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hostile, Client]]:
    home, keys = tmp_path / "home", tmp_path / "keys.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWIFTKV_API_KEYS_FILE", str(keys))
    eve, ann = (create_key(keys, name=name, tenant=name, scopes=frozenset(Scope)) for name in ("eve", "ann"))
    ray, serve = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    stack = Stack(Settings(home=home, database_url=None, storage_uri=None, ray_dashboard_url=ray, serve_url=serve))
    try:
        state = stack.up(StackOptions(port=0, num_cpus=4), print)
        with (
            closing(Hostile(state.url, state.serve_url, eve)) as hostile,
            Client(state.url, ann, serve_url=state.serve_url, timeout=120.0) as client,
        ):
            yield hostile, client
    finally:
        stack.down()
    assert find_marked_processes(str(home)) == []


def test_the_other_tenants_job_model_and_answer_come(tenants: tuple[Hostile, Client]) -> None:
    hostile, client = tenants
    job = client.jobs.wait(client.jobs.create(QUIET).id)
    assert job.status == "succeeded", list(client.jobs.logs(job.id))[-40:]
    deployment = client.deployments.create(model=str(job.distilled_model), route_prefix="/answer")
    client.deployments.wait_ready(deployment.id)
    [*pieces] = client.deployments.generate(deployment.id, "def read(", max_tokens=8, temperature=0.0)
    assert "".join(piece.choices[0].text for piece in pieces)
    client.deployments.delete(deployment.id)
    assert hostile.statuses["beyond"] <= {422, 429}
    assert not any(status >= 500 for seen in hostile.statuses.values() for status in seen), hostile.statuses
    assert {200, 429} <= hostile.statuses["events"]
    assert {200, 429} <= hostile.statuses["logs?follow=true"]
