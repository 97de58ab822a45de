"""A deployment on Ray Serve, applied as the control plane applies one, in a process that judges reach over HTTP alone.

    python -m tests.outside.judges.deployment DIRECTORY native|vllm

prints one line of JSON, its address and its tokenizer's directory, once it serves. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoTokenizer

import tests.integration.conftest
from swiftkv_platform.cluster.ray_serve import RayServe
from swiftkv_platform.orchestration.deployment import DeploymentStatus
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import publish_directory
from tests.integration.conftest import wait_for
from tests.rays import become_a_driver, free_port, ray_head
from tests.unit.engine.tiny_models import save_swiftkv

become_a_driver()
tests.integration.conftest.DEADLINE_S = 900.0
"""vLLM compiles the model first, on whatever cores are free."""

CONTEXT = 4096
MODEL = "tiny"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def save_model(directory: Path) -> Path:
    """A student with random weights, a token a byte, and a chat template."""
    save_swiftkv(directory, CONTEXT)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(directory)
    return directory


def serve(directory: Path, backend: str, told: TextIO) -> None:
    """Serve the model until standard input ends; `told` gets the line."""
    model = save_model(directory / "model")
    publish_directory(open_store(str(directory)), model, "artifact", kind="artifact", lineage={}, metrics={})
    spec = ResolvedDeployment(
        id="dep_judged",
        model=MODEL,
        artifact_uri=str(directory / "artifact"),
        route_prefix="/judged",
        engine={"backend": backend, "max_num_seqs": 16, "num_threads": 1, "kv_cache_bytes": 64 << 20},
    )
    serve_url = f"http://127.0.0.1:{free_port()}"
    with (
        ray_head(num_cpus=2) as head,
        closing(RayServe(head.dashboard_url, serve_url)) as cluster,
    ):
        wait_for(lambda: cluster.status() == {})
        cluster.apply([spec])
        wait_for(lambda: _runs(cluster, spec.id))
        told.write(json.dumps({"url": f"{serve_url}{spec.route_prefix}", "tokenizer": str(model)}) + "\n")
        told.flush()
        sys.stdin.read()


def _runs(cluster: RayServe, name: str) -> bool:
    state = cluster.status().get(name)
    if state is not None and state.status is DeploymentStatus.FAILED:
        raise RuntimeError(f"the deployment failed: {state.message}")
    return state is not None and state.status is DeploymentStatus.RUNNING


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as standard_output:
        os.dup2(2, 1)  # libraries print what they like
        serve(Path(sys.argv[1]), sys.argv[2], standard_output)
