"""Artifacts and deployments of tiny students; clients that send requests to one continuously and check every answer;
metrics and health of its replicas."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from swiftkv_platform.control_plane.ray import RayDashboard
from swiftkv_platform.engine import LLMEngine, SamplingParams
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.artifacts import publish_directory
from swiftkv_platform.storage.object_store import open_store
from tests.integration.conftest import wait_for

PROMPTS = [[1, number, 2 * number, 7] for number in range(1, 33)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}

Expected = dict[str, list[list[int]]]
"""By model, the token ids of the answer to each of `PROMPTS`."""


def publish(model: Path, store: Path, name: str = "one", *, damaged: bool = False) -> Path:
    """Publish a model's directory as an artifact in a store; `damaged`: with a flipped byte in its weights."""
    publish_directory(open_store(str(store)), model, name, kind="artifact", lineage={}, metrics={})
    if damaged:
        weights = store / name / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    return store / name


def greedy_answers(artifact: Path) -> list[list[int]]:
    """Return the token ids of the answers to `PROMPTS`, by an engine of this process."""
    outputs = LLMEngine.from_pretrained(artifact).generate(PROMPTS, SamplingParams(**GREEDY))
    return [list(output.token_ids) for output in outputs]


def wait_until_running(cluster: RayServe, spec: ResolvedDeployment) -> None:
    """Wait until the deployment runs with as many replicas as it may have."""

    def runs() -> bool:
        state = cluster.list_states().get(spec.id)
        assert state is None or state.status is not DeploymentStatus.FAILED, state.message
        return state is not None and (state.status, state.replicas) == (DeploymentStatus.RUNNING, spec.max_replicas)

    wait_for(runs)


def new_client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60.0, trust_env=False)


@dataclass
class Load:
    """Clients that send one request after another, half of them streaming, and check every answer."""

    url: str
    expected: Expected
    num_clients: int = 6
    connect: Callable[[str], httpx.Client] = new_client
    """Returns the HTTP client of a thread."""
    pause_s: float = 0.0
    """Pause of a client between an answer and its next request."""
    answers: list[str] = field(default_factory=list)
    """Model of each correct answer."""
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.num_clients)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.answers) >= self.num_clients)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        chosen = random.Random(number)
        with closing(self.connect(self.url)) as client:
            while not self._over.is_set():
                prompt = chosen.randrange(len(PROMPTS))
                try:
                    self._check(prompt, *ask(client, PROMPTS[prompt], stream=number % 2 == 0))
                    time.sleep(self.pause_s)
                except (httpx.HTTPError, RuntimeError) as error:
                    self.failed.append(repr(error))

    def _check(self, prompt: int, models: set[str], token_ids: list[int]) -> None:
        if len(models) == 1 and token_ids == self.expected[model := models.pop()][prompt]:
            self.answers.append(model)
        else:
            self.wrong.append(f"{models} {PROMPTS[prompt]}: {token_ids}")


def ask(client: httpx.Client, prompt: Sequence[int], *, stream: bool) -> tuple[set[str], list[int]]:
    """Return the models that the answer names, and its token ids. Raise for anything but a complete answer."""
    body = {"prompt": prompt, "stream": stream, **GREEDY}
    if not stream:
        answer = client.post("/generate", json=body).raise_for_status().json()
        return {answer["model"]}, answer["choices"][0]["token_ids"]
    models: set[str] = set()
    token_ids: list[int] = []
    with client.stream("POST", "/generate", json=body) as response:
        if not response.is_success:
            raise RuntimeError(f"{response.status_code} {response.read().decode()}")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"the stream ends with {lines[-1]!r}")
    for event in map(json.loads, lines[:-1]):
        models.add(event["model"])
        token_ids += event["choices"][0]["token_ids"]
    return models, token_ids


def metrics(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def health(url: str) -> Any:
    return httpx.get(f"{url}/health", trust_env=False).json()


def replica_pids(dashboard_url: str, deployment: str) -> list[int]:
    """Return the process ids of the replicas that take requests, in ascending order."""
    with closing(RayDashboard(dashboard_url, timeout_s=30.0)) as dashboard:
        details = dashboard.parse_object(
            dashboard.request("GET", "/api/serve/applications/"), "read the state of Serve"
        )
    replicas = details["applications"][deployment]["deployments"]["Replica"]["replicas"]
    return sorted(replica["pid"] for replica in replicas if replica["state"] == "RUNNING")
