"""Trails through the code in docs/architecture.md: a real request enters the files that the page names, in order."""

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from swiftkv_platform.control_plane.jobs.ray_jobs import RayJobs
from swiftkv_platform.control_plane.jobs.reading import Instruments
from swiftkv_platform.control_plane.loops.leadership import UNDISPUTED
from swiftkv_platform.control_plane.running import build_reconciler
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.settings import Settings
from tests.fakes.scripted_server import Script, json_answer, serve
from tests.surface.replicas import application, asgi_client, version_of
from tests.unit.control_plane.routes.conftest import SPEC, control_plane, make_parts
from tests.unit.engine.tiny_models import save_swiftkv

ROOT = Path(__file__).parents[2]
ROOMS = ("jobs", "serve", "swiftkv_platform")
MOST_FILES_TO_A_TOKEN = 12
MOST_FILES_TO_A_STEP = 20


def passed(page: str) -> set[str]:
    """Files that the page lists as parts that a request passes on its way."""
    return set(re.findall(r"`([^`]+\.py)`", page.split("Parts that ", 1)[1].split("\n\n", 1)[0]))


def section(heading: str) -> str:
    """Text below a heading of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def tables(page: str) -> list[list[str]]:
    """Files in the first column of each table."""
    found = [re.findall(r"^\| `([^`]+\.py)` \|", table, re.MULTILINE) for table in page.split("|---|---|")[1:]]
    return [table for table in found if table]


@cache
def file_of_ours(path: str) -> str | None:
    """Path of a source file from the top of the repository; None for a file of a test or a library."""
    resolved = Path(path).resolve()
    ours = resolved.is_file() and any(resolved.is_relative_to(ROOT / room) for room in ROOMS)
    return str(resolved.relative_to(ROOT)) if ours else None


class Entered:
    """Our files whose functions run while `recording`, in the order of their first call."""

    def __init__(self, until: str) -> None:
        """`until`: the `FILE:FUNCTION` whose return ends the recording."""
        self.files: dict[str, None] = {}
        self.recording = False
        self._until = until

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.recording or (file := file_of_ours(frame.f_code.co_filename)) is None:
            return
        if event == "call":
            self.files.setdefault(file)
        elif event == "return" and f"{file}:{frame.f_code.co_name}" == self._until:
            self.recording = False


@contextmanager
def traced(entered: Entered) -> Iterator[None]:
    """Report every call in this thread, and in threads that begin meanwhile, to `entered`."""
    sys.setprofile(entered)
    threading.setprofile(entered)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


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
