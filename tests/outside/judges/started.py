"""Deployments and the platform for judges, each in a process that ends when its standard input is closed.

    python -m tests.outside.judges.started native|vllm|platform|documents DIRECTORY

prints one line of JSON once it serves: a deployment's address, as the control plane applies it to Ray Serve, and its
tokenizer's directory, or the address of the whole platform as `swiftkv up` starts it. `documents` only writes the
OpenAPI documents of both applications.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tests.integration.conftest
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentStatus
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.artifacts import publish_directory
from swiftkv_platform.storage.object_store import open_store
from tests.contract.serving.replicas import save_chat_model
from tests.integration.conftest import wait_for
from tests.support.rays import become_a_driver, free_port, ray_head

CONTEXT = 4096
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@contextmanager
def deployment(directory: Path, backend: str) -> Iterator[dict[str, str]]:
    """A deployed student with random weights, one token per byte, and a chat template."""
    become_a_driver()
    tests.integration.conftest.DEADLINE_S = 900.0  # vLLM compiles the model first, on whatever cores are free
    model = save_chat_model(directory / "model", CONTEXT, TEMPLATE.read_text(encoding="utf-8"))
    publish_directory(open_store(str(directory)), model, "artifact", kind="artifact", lineage={}, metrics={})
    spec = ResolvedDeployment(
        id="dep_judged",
        model="tiny",
        artifact_uri=str(directory / "artifact"),
        route_prefix="/judged",
        engine={"backend": backend, "max_num_seqs": 16, "num_threads": 1, "kv_cache_bytes": 64 << 20},
    )
    serve_url = f"http://127.0.0.1:{free_port()}"
    with ray_head(num_cpus=2) as head, closing(RayServe(head.dashboard_url, serve_url)) as cluster:
        wait_for(lambda: cluster.list_states() == {})
        cluster.apply([spec])
        wait_for(lambda: _runs(cluster, spec.id))
        yield {"url": f"{serve_url}{spec.route_prefix}", "tokenizer": str(model)}


def _runs(cluster: RayServe, name: str) -> bool:
    state = cluster.list_states().get(name)
    if state is not None and state.status is DeploymentStatus.FAILED:
        raise RuntimeError(f"the deployment failed: {state.message}")
    return state is not None and state.status is DeploymentStatus.RUNNING


@contextmanager
def platform(directory: Path) -> Iterator[dict[str, str]]:
    from swiftkv_platform.local.stack import Stack, StackOptions
    from swiftkv_platform.settings import Settings

    os.environ["HOME"] = str(directory)
    stack = Stack(Settings(home=directory / "home", database_url=None, storage_uri=None))
    try:
        yield {"url": stack.up(StackOptions(port=0), lambda line: print(line, file=sys.stderr)).url}
    finally:
        stack.down()


def write_documents(directory: Path) -> None:
    from swiftkv_platform.control_plane.app import create_app
    from swiftkv_platform.settings import Settings

    applications = {"control-plane": create_app(Settings(_env_file=None)), "serve": create_http_app(ReplicaState())}
    for name, application in applications.items():
        (directory / f"{name}.json").write_text(json.dumps(application.openapi(), indent=1), encoding="utf-8")


def main(kind: str, directory: Path) -> None:
    if kind == "documents":
        write_documents(directory)
        return
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as standard_output:
        os.dup2(2, 1)  # keep libraries' output out of standard output
        with platform(directory) if kind == "platform" else deployment(directory, kind) as told:
            standard_output.write(json.dumps(told) + "\n")
            standard_output.flush()
            sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
