"""Trails through the code in docs/architecture.md: a real request enters the files that the page names, in order."""

import re
from dataclasses import replace
from pathlib import Path

from swiftkv_platform.control_plane.jobs.ray_jobs import RayJobs
from swiftkv_platform.control_plane.jobs.reading import Instruments
from swiftkv_platform.control_plane.loops.leadership import UNDISPUTED
from swiftkv_platform.control_plane.running import build_reconciler
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.settings import Settings
from tests.fakes.scripted_server import Script, json_answer, serve
from tests.surface.replicas import application, asgi_client, version_of
from tests.trails import Entered, section, tables, traced
from tests.unit.control_plane.routes.conftest import SPEC, control_plane, make_parts
from tests.unit.engine.tiny_models import save_swiftkv

MOST_FILES_TO_A_TOKEN = 12
MOST_FILES_TO_A_STEP = 20


def passed(page: str) -> set[str]:
    """Files that the page lists as parts that a request passes on its way."""
    return set(re.findall(r"`([^`]+\.py)`", page.split("Parts that ", 1)[1].split("\n\n", 1)[0]))


async def test_generate_trail(tmp_path: Path) -> None:
    """The second request is traced, since the first one runs imports that are made on demand."""
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(save_swiftkv(tmp_path), EngineConfig(kv_cache_bytes=4 << 20)))
    client = asgi_client(application(version_of(engine)))
    entered = Entered(until="swiftkv_platform/engine/sampler.py:choose")
    body = {"prompt": "once upon", "max_tokens": 4, "ignore_eos": True}
    with traced(entered):
        for entered.recording in (False, True):
            answer = await client.post("/generate", json=body)
    await engine.aclose()
    assert len(answer.json()["choices"][0]["token_ids"]) == 4
    assert not entered.recording, "no token was sampled"
    page = section("From POST /generate to a token")
    [trail] = tables(page)
    parts = passed(page)
    assert [file for file in entered.files if file not in parts] == trail
    assert {*entered.files}.difference(trail) == parts
    assert len(trail) <= MOST_FILES_TO_A_TOKEN


def test_submission_trail(tmp_path: Path, empty_database: Path) -> None:
    """The second job is traced: its request, then a round of the reconciler, to the request to Ray's dashboard.
    `tests/unit/jobs/test_trail.py` has the rest."""
    ray = Script()
    ray.on("GET", "/api/v0/nodes", json_answer({"data": {"result": {"result": [{"state": "ALIVE"}]}}}))
    ray.on("POST", "/api/jobs/", json_answer({"submission_id": "s"}))
    entered = Entered(until="swiftkv_platform/control_plane/jobs/ray_jobs.py:submit")
    settings = Settings(home=tmp_path, _env_file=None)
    with serve(ray) as url, traced(entered):
        parts = replace(make_parts(tmp_path, empty_database), cluster=RayJobs(url))
        reconciler = build_reconciler(settings, parts, UNDISPUTED, Instruments())
        with control_plane(parts, settings) as client:
            for entered.recording in (False, True):
                assert client.post("/jobs", json=SPEC).status_code == 201
            reconciler.tick()
    assert ray.sent("POST", "/api/jobs/")
    page = section("From POST /jobs to an optimizer step")
    [trail] = tables(page)
    parts = {f"swiftkv_platform/{file}" for file in passed(page)}
    assert [file for file in entered.files if file not in parts] == trail[: trail.index("jobs/distill.py")]
    assert {*entered.files}.difference(trail) == parts
    assert len(trail) <= MOST_FILES_TO_A_STEP
