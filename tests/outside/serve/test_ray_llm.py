"""Ray Serve LLM with the application in infra/: its OpenAI routes give the greedy tokens of a job's student."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

import tests.integration.conftest
from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.control_plane.ray import RayDashboard
from swiftkv_platform.engine import LLMEngine, SamplingParams
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from tests.integration.conftest import dashboard_url, head, serve_port, wait_for
from tests.integration.load import GREEDY, PROMPTS
from tests.support.distill_jobs import JOB, ONE_WORKER, job_spec
from tests.support.requirements import interpreter
from tests.unit.engine.tiny_models import save_dense

__all__ = ["dashboard_url", "head", "serve_port"]

tests.integration.conftest.DEADLINE_S = 900.0
"""vLLM starts next to Ray's own processes."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

CONTEXT = 256
SHIPPED = Path(__file__).parents[3] / "infra" / "ray-llm.yaml"
APPLICATIONS = "/api/serve/applications/"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifact of a distillation job, made in the project's own environment, because vLLM's has no trainer."""
    python = interpreter("SWIFTKV_TEST_PYTHON", "install")
    directory = tmp_path_factory.mktemp("job")
    corpus = directory / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "def add_{i}(x):\\n    return x + {i}\\n\\n"}}\n' for i in range(200)))
    spec = job_spec(save_dense(directory / "teacher", CONTEXT), corpus, max_steps=4, resources=ONE_WORKER)
    request = AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run")
    store = open_store(str(directory / "store"))
    AttemptStore(store).write_request(request)
    command = [python, "-m", "swiftkv_platform.jobs.distill", "--job-id", JOB, "--attempt", "1", "--store", store.uri]
    subprocess.run(command, check=True, env={**os.environ, "RAY_ADDRESS": "local"})
    return directory / "store" / request.attempt_id.artifact_prefix


@pytest.fixture(scope="module")
def config(artifact: Path, serve_port: int) -> dict[str, Any]:
    """Return the shipped application, changed to a local model and CPUs."""
    config: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    [application] = config["applications"]
    [model] = application["args"]["llm_configs"]
    model["model_loading_config"]["model_source"] = str(artifact)
    model["placement_group_config"] = {"bundle_per_worker": {"CPU": 1}}
    model["deployment_config"]["autoscaling_config"]["max_replicas"] = 1
    model["engine_kwargs"] |= {"dtype": "float32", "max_model_len": CONTEXT, "enforce_eager": True}
    model["engine_kwargs"]["kv_cache_memory_bytes"] = 16 << 20
    return config | {"http_options": {"host": "127.0.0.1", "port": serve_port}}


@pytest.fixture(scope="module")
def client(config: dict[str, Any], dashboard_url: str) -> Iterator[openai.OpenAI]:
    with closing(RayDashboard(dashboard_url, timeout_s=120.0)) as dashboard:
        dashboard.check_success(dashboard.request("PUT", APPLICATIONS, json=config), "configure Serve")

        def running() -> bool:
            document = dashboard.parse_object(dashboard.request("GET", APPLICATIONS), "read the state of Serve")
            [application] = document["applications"].values()
            assert application["status"] not in ("DEPLOY_FAILED", "UNHEALTHY"), application
            return application["status"] == "RUNNING"

        wait_for(running)
        url = f"http://127.0.0.1:{config['http_options']['port']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", http_client=httpx.Client(trust_env=False)) as client:
            yield client


def test_its_routes_give_the_tokens_of_the_reference(client: openai.OpenAI, artifact: Path) -> None:
    outputs = LLMEngine.from_pretrained(artifact).generate(PROMPTS[:8], SamplingParams(**GREEDY))
    extra = {"ignore_eos": True, "return_token_ids": True}
    options = {"temperature": 0.0, "max_tokens": GREEDY["max_tokens"], "extra_body": extra}
    assert [model.id for model in client.models.list()] == ["student"]
    for prompt, output in zip(PROMPTS[:8], outputs, strict=True):
        tokens = list(output.token_ids)
        whole = client.completions.create(model="student", prompt=prompt, **options)
        stream = client.completions.create(model="student", prompt=prompt, **options, stream=True)
        chunks = [choice for chunk in stream for choice in chunk.choices]
        assert whole.choices[0].model_extra["token_ids"] == tokens
        assert [token for choice in chunks for token in choice.model_extra["token_ids"]] == tokens
        assert "".join(choice.text for choice in chunks) == whole.choices[0].text
