"""Many followers of one job's events at once, over real connections."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.orchestration.job import Event, JobStatus, new_id, transition
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, make_parts, served_control_plane

EVENTS = 40


@pytest.mark.parametrize("number", [3, pytest.param(200, marks=pytest.mark.soak("200 connections"))])
async def test_every_follower_hears_everything_in_order_and_others_are_still_answered(
    tmp_path: Path, empty_database: Path, number: int
) -> None:
    parts = make_parts(tmp_path, empty_database)
    settings = Settings(home=tmp_path, _env_file=None)
    with served_control_plane(replace(parts, clock=lambda: 1000.0), settings) as url:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
            job_id = (await client.post("/jobs", json=SPEC)).json()["id"]
            connected = asyncio.Semaphore(0)
            followers = [asyncio.create_task(follow(client, job_id, connected)) for _ in range(number)]
            for _ in followers:
                await connected.acquire()
            job = parts.jobs.get(job_id, tenant="default")
            sent = [Event(new_id("evt"), job_id, 1000, "message", f"number {each}") for each in range(EVENTS)]
            for event in sent:
                job = parts.jobs.update(job, events=[event])
                assert (await client.get(f"/jobs/{job_id}")).status_code == 200
            cancelling, first = transition(job, JobStatus.CANCELLING, now=1000)
            cancelled, second = transition(cancelling, JobStatus.CANCELLED, now=1000)
            parts.jobs.update(cancelled, events=[first, second])
            heard = await asyncio.gather(*followers)
    expected = [*(event.message for event in sent), first.message, second.message]
    for each in heard:
        assert each[1:] == expected


async def follow(client: httpx.AsyncClient, job_id: str, connected: asyncio.Semaphore) -> list[str]:
    heard: list[str] = []
    async with client.stream("GET", f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                heard.append(json.loads(line.removeprefix("data: "))["message"])
                if len(heard) == 1:
                    connected.release()
    return heard
