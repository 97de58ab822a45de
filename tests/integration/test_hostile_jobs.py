"""Hostile sources sent to POST /jobs, with API keys, on a real Ray: none runs its code, opens a file outside its
tenant's root or connects to a socket. Every process of that Ray records the files it opens and the sockets it connects
to."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.local.ray_head import make_auth_environment
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.integration.conftest import environment, wait_for
from tests.security.hostile_sources import (
    CANARY,
    DATA,
    Listener,
    Stage,
    lay_out_hub_data,
    lay_out_hub_model,
    listening,
    model_with_a_shard_outside,
    write_rows,
    write_task,
)
from tests.support.rays import ray_head

pytestmark = [
    pytest.mark.integration,
    pytest.mark.soak("starts a Ray of its own that is traced"),
    pytest.mark.timeout(400),
]

_AUDIT = """
import os, sys
watched, log = os.environ["AUDIT_WATCHED"].split("|"), os.environ["AUDIT_LOG"]

def note(event, arguments):
    if event == "open":
        text = str(arguments[0])
    elif event == "socket.connect":
        text = repr(arguments[1])
    else:
        return
    if any(part in text for part in watched):
        with open(log, "a") as file:
            file.write(f"{event} {text}\\n")

sys.addaudithook(note)
"""
"""Audit hook, loaded by every Python process of the cluster before anything else."""
_INNOCENT = "innocent"


@dataclass(frozen=True)
class Site:
    """A control plane with a cluster, and the traps that record what jobs do."""

    client: TestClient
    stage: Stage
    listener: Listener
    audit: Path

    def post(self, **sections: Any) -> tuple[int, dict[str, Any]]:
        model = {"name_or_path": str(self.stage.teacher), "dtype": "float32"}
        limits = {"tracking": {"wandb": {"mode": "disabled"}}, "resources": {"num_workers": 1}}
        spec = {"name": "hostile", "model": model, **limits, **sections}
        answer = self.client.post("/jobs", json=spec)
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("hostile")
    with listening() as listener:
        stage = Stage.build(directory, listener.url, tiny_teacher)
        stage = Stage(
            stage.root,
            stage.outside,
            stage.marker,
            stage.url,
            Path(shutil.copytree(tiny_teacher, stage.root / "teacher")),
        )
        hook = directory / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(_AUDIT)
        audit, cache, cwd = directory / "audit.log", directory / "hub", directory / "cwd"
        cwd.mkdir()
        write_task(cwd / _INNOCENT, stage)
        variables = {
            "PYTHONPATH": os.pathsep.join([str(hook), str(Path(__file__).parents[2])]),
            "AUDIT_LOG": str(audit),
            "AUDIT_WATCHED": f"{stage.outside}|{stage.marker}|', {listener.port})|README.md|{directory}/hub",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": "http://127.0.0.1:1",
        }
        with (
            _working_in(cwd),
            ray_head(variables, num_cpus=2) as head,
            environment(make_auth_environment(head.token_file)),
        ):
            keys = directory / "keys.yaml"
            token = create_key(keys, name="eve", tenant="acme", scopes=frozenset({Scope.JOBS_READ, Scope.JOBS_WRITE}))
            settings = Settings(
                home=directory / "home",
                api_keys_file=keys,
                source_roots=(str(stage.root),),
                ray_dashboard_url=head.dashboard_url,
                reconcile_interval_s=0.2,
                max_running_jobs=2,
                _env_file=None,
            )
            settings.home.mkdir()
            headers = {"authorization": f"Bearer {token}"}
            with TestClient(create_app(settings), base_url="http://127.0.0.1:8000", headers=headers) as client:
                yield Site(client, stage, listener, audit)


@contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        yield


def test_no_payload_runs_reads_or_connects(site: Site) -> None:
    refused = _refused_at_the_door(site)
    assert refused == len(DATA)  # every data set but one, and a task's file
    accepted = _accepted_by_name(site)

    ended = wait_for(lambda: _ended(site, accepted))
    codes = {what: ended[job_id]["status_reason"]["code"] for what, job_id in accepted.items()}
    assert {ended[job_id]["status"] for job_id in accepted.values()} == {"failed"}
    assert codes == {
        "a hub model": "model_error",
        "a hub data set": "data_error",
        "a name of a file": "invalid_input",
        "a source that has changed": "data_error",
        "a model with a shard outside": "model_error",
    }

    assert not site.stage.marker.exists()
    assert site.listener.connections == []
    noted = site.audit.read_text().splitlines()
    assert any("README.md" in line for line in noted), "the hook records the files that workers open"
    assert [line for line in noted if str(site.stage.outside) in line or str(site.listener.port) in line] == []
    for job_id in accepted.values():
        said = site.client.get(f"/jobs/{job_id}/events", params={"limit": 100}).text
        assert CANARY not in said + site.client.get(f"/jobs/{job_id}/logs").text


def _refused_at_the_door(site: Site) -> int:
    """Post data sets that visibly lead outside, and a task file; assert that each gets a 422, and return their
    number."""
    specs: list[dict[str, Any]] = [
        {"data": {"sources": [{"name_or_path": str(lay_out(site.stage))}]}}
        for name, lay_out in DATA.items()
        if name != "pictures"  # its text may be read
    ]
    specs.append({"evaluation": {"tasks": [str(write_task(site.stage.root / "notes.txt", site.stage))]}})
    answers = [(spec, *site.post(**spec)) for spec in specs]
    assert [(spec, body) for spec, status, body in answers if status != 422] == []
    return len(answers)


def _accepted_by_name(site: Site) -> dict[str, str]:
    """Create the jobs whose fault only a worker can find; return their ids by fault."""
    cache = site.audit.parent / "hub"
    swapped = site.stage.directory("swapped")
    write_rows(swapped / "rows.jsonl", "own")
    posts: dict[str, dict[str, Any]] = {
        "a hub model": {"model": {"name_or_path": lay_out_hub_model(site.stage, cache), "dtype": "float32"}},
        "a hub data set": {"data": {"sources": [{"name_or_path": lay_out_hub_data(site.stage, cache)}]}},
        "a name of a file": {"evaluation": {"tasks": [_INNOCENT]}},
        "a source that has changed": {"data": {"sources": [{"name_or_path": str(swapped)}]}},
        "a model with a shard outside": {
            "model": {"name_or_path": str(model_with_a_shard_outside(site.stage)), "dtype": "float32"}
        },
    }
    jobs: dict[str, str] = {}
    for what, sections in posts.items():
        status, body = site.post(**sections)
        assert status == 201, (what, body)
        jobs[what] = body["id"]
        if what == "a source that has changed":
            (swapped / "rows.jsonl").unlink()
            (swapped / "rows.jsonl").symlink_to(site.stage.outside / "canary.jsonl")
    return jobs


def _ended(site: Site, jobs: dict[str, str]) -> dict[str, dict[str, Any]] | None:
    found = {job_id: site.client.get(f"/jobs/{job_id}").json() for job_id in jobs.values()}
    return found if all(job["status"] in ("failed", "succeeded", "cancelled") for job in found.values()) else None
