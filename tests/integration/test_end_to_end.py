"""The whole path over HTTP with real parts: a job by POST /jobs, its model deployed, /generate, cancellation."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from swiftkv_platform.client import Client, Job
from swiftkv_platform.local.stack import Stack, StackOptions, find_marked_processes
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import read_manifest
from swiftkv_platform.storage.object_store import open_store
from tests.outside.judges.fine_tuning import tune_and_chat
from tests.support import browsers
from tests.support.waiting import eventually

browser, page = browsers.browser, browsers.page  # fixtures
pytestmark = [pytest.mark.integration("a platform of its own, and whole jobs"), pytest.mark.timeout(600)]

SPEC: dict[str, Any] = {
    "name": "end-to-end",
    "model": {"name_or_path": "builtin:python-5m", "dtype": "float32"},
    "swiftkv": {"num_key_value_layers": 6, "key_value_group_size": 2, "calibration_tokens": 1024},
    "data": {"max_length": 128, "sources": [{"name_or_path": "builtin:python-stdlib", "sample_count": 40}]},
    "training": {"max_steps": 4, "batch_size": 4, "micro_batch_size": 2},
    "optimizer": {"learning_rate": 1e-3},
    "checkpoint": {"every_steps": 2, "keep": 10},
    "evaluation": {"max_tokens": 1024},
    "resources": {"num_workers": 1},
}
PROMPT = "def read_lines(path):\n    with open(path) as"


@dataclass(frozen=True)
class Platform:
    """A platform started by `swiftkv up`."""

    home: Path
    url: str
    client: Client

    def workers(self) -> list[psutil.Process]:
        """Return the processes of Ray Train's workers."""
        return [
            p
            for p in find_marked_processes(str(self.home))
            if p.is_running() and "RayTrainWorker" in " ".join(p.cmdline())
        ]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    home = tmp_path_factory.mktemp("user") / "home"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(home.parent))
        stack = Stack(Settings(home=home, database_url=None, storage_uri=None))
        try:
            state = stack.up(StackOptions(port=0), print)
            with Client(state.url, serve_url=state.serve_url) as client:
                yield Platform(home, state.url, client)
        finally:
            stack.down()
        assert find_marked_processes(str(home)) == []


@pytest.fixture
def client(platform: Platform) -> Client:
    return platform.client


@pytest.fixture(scope="module")
def job(platform: Platform) -> Job:
    client = platform.client
    job = client.jobs.wait(client.jobs.create(SPEC).id)
    assert job.status == "succeeded", list(client.jobs.logs(job.id))[-40:]
    return job


def test_the_job_leaves_a_complete_model_behind(client: Client, job: Job) -> None:
    assert (job.progress.step, job.progress.total_steps) == (4, 4)
    assert job.artifact_uri is not None
    manifest = read_manifest(open_store(job.artifact_uri), "")
    assert {"config.json", "model.safetensors", "tokenizer.json", "evaluation.json"} <= manifest.files.keys()
    model = client.models.get(str(job.distilled_model))
    assert model.lineage["job_id"] == job.id
    assert model.metrics["kv_bytes_ratio"] == 0.75
    assert model.metrics["prefill_flops_ratio"] < 0.6
    assert model.metrics["distilled"]["kl"] < model.metrics["rewired"]["kl"]
    assert [point.step for point in client.jobs.metrics(job.id)] == [1, 2, 3, 4]


def test_its_model_is_deployed_and_generates(client: Client, job: Job) -> None:
    deployment = client.deployments.create(model=str(job.distilled_model))
    client.deployments.wait_ready(deployment.id)
    whole = client.generate(PROMPT, max_tokens=12, temperature=0.0)
    pieces = list(client.generate(PROMPT, max_tokens=12, temperature=0.0, stream=True))
    assert whole.choices[0].text
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert whole.usage.prefill_layers_skipped_tokens == whole.usage.prompt_tokens - 1
    [replica] = client.deployments.metrics(deployment.id).replicas
    assert replica["replica"]
    assert replica["values"]["generation_tokens_total"] == 2 * whole.usage.completion_tokens
    client.deployments.delete(deployment.id)


@pytest.mark.soak("a job and a deployment more")
def test_a_checkpoint_in_the_middle_is_deployed_and_answers_as_its_evaluation_says(client: Client, job: Job) -> None:
    assert {2, 4} <= {each.step for each in client.jobs.checkpoints(job.id)}
    made = client.jobs.wait(client.models.create(from_checkpoint=f"{job.id}:2", name="halfway").id)
    assert made.status == "succeeded", list(client.jobs.logs(made.id))[-40:]
    middle, last = client.models.get(str(made.distilled_model)), client.models.get(str(job.distilled_model))
    assert middle.metrics is not None
    assert last.metrics is not None
    assert middle.metrics["teacher"] == last.metrics["teacher"], "the two were measured on different text"
    assert last.metrics["distilled"]["kl"] < middle.metrics["distilled"]["kl"] < middle.metrics["rewired"]["kl"]
    lineage = client.models.lineage(middle.id)
    assert [ancestor["job_id"] for ancestor in lineage.ancestors] == [job.id]

    deployment = client.deployments.create(model=middle.id)
    client.deployments.wait_ready(deployment.id)
    tokenizer = AutoTokenizer.from_pretrained(str(made.artifact_uri))
    measured, compared = middle.metrics["continuations"], 0
    for example in measured["examples"]:
        prompt = tokenizer.encode(example["prompt"], add_special_tokens=False)
        if len(prompt) != measured["prompt_length"]:
            continue  # a prompt that ends within a word tokenizes differently
        answer = client.generate(prompt, max_tokens=8, temperature=0.0).choices[0].text
        assert answer
        assert example["student"].startswith(answer), example
        compared += 1
    assert compared
    client.deployments.delete(deployment.id)


@pytest.mark.soak("a job and a deployment more")
def test_openais_client_uploads_tunes_and_chats(platform: Platform) -> None:
    tuned = tune_and_chat(platform.url)
    job = platform.client.jobs.get(tuned.id)
    assert (job.name, job.distilled_model) == ("adder", tuned.fine_tuned_model)
    assert job.progress is not None
    assert tuned.trained_tokens == job.progress.tokens > 0


QUESTION = "Write a function that reads a file."


@pytest.mark.soak("a job, a deployment and a browser")
def test_a_browser_goes_from_a_recipe_to_a_chat_without_yaml(platform: Platform, page: Any, tmp_path: Path) -> None:
    page.set_default_timeout(240_000)

    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": QUESTION}]}) + "\n")
    page.goto(platform.url)
    page.get_by_role("navigation").get_by_role("link", name="Files").click()
    page.get_by_label("Upload rows").set_input_files(tmp_path / "chats.jsonl")
    page.get_by_role("link", name="chats.jsonl", exact=True).wait_for()
    page.get_by_role("link", name="New job").first.click()
    page.get_by_label("Start from").select_option("recipe:builtin-python-5m")
    for label, value in (("Name", "from-a-browser"), ("Steps", "4"), ("Batch size", "4"), ("Workers", "1")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Tokens per row", exact=True).fill("128")
    page.get_by_label("Plan", exact=True).get_by_text("valid", exact=True).wait_for()
    page.get_by_role("button", name="Submit job").click()
    page.get_by_role("img", name="Loss by step").wait_for()
    page.locator("main .head").get_by_text("succeeded", exact=True).wait_for()
    page.get_by_role("row", name=re.compile("^distilled")).wait_for()
    page.get_by_role("link", name="View model").click()
    page.get_by_label("Route").fill("/browser")
    page.get_by_role("button", name="Deploy").click()
    page.get_by_role("link", name="Open in playground").wait_for()
    page.get_by_role("link", name="Open in playground").click()
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("button", name="New conversation").wait_for()
    page.get_by_text(
        "of these, tokens that skipped layers"
    ).wait_for()  # from the last event, with the whole answer's figures
    answer = "".join(page.locator(".turn.assistant").inner_text().split()).removeprefix("Model")
    (deployment,) = platform.client.deployments.list()
    # In bfloat16 a cached prompt is rounded differently from a computed one, as the page's was.
    platform.client.deployments.update(deployment.id, engine={"enable_prefix_caching": False})
    platform.client.deployments.wait_ready(deployment.id)
    messages = [{"role": "user", "content": QUESTION}]
    told = httpx.post(
        f"{deployment.url}/generate", json={"messages": messages, "max_tokens": 128, "temperature": 0.0}, timeout=60
    ).json()
    assert "".join(told["choices"][0]["text"].split()) == answer
    page.get_by_role("navigation").get_by_role("link", name="Deployments").click()
    page.get_by_role("link", name=deployment.id).click()
    page.locator(".tiles").wait_for()
    platform.client.deployments.delete(deployment.id)


@pytest.mark.soak("a job more")
def test_cancelling_a_running_job_frees_its_workers(platform: Platform, client: Client) -> None:
    training = SPEC["training"] | {"max_steps": 100_000}
    endless = client.jobs.create(SPEC | {"name": "endless", "training": training})
    eventually(lambda: client.jobs.metrics(endless.id), "the job makes a step", seconds=120)
    assert len(platform.workers()) == 1
    client.jobs.cancel(endless.id)
    assert client.jobs.wait(endless.id).status == "cancelled"
    eventually(lambda: not platform.workers(), "the workers end", seconds=120)
