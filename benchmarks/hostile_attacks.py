"""Attacks by one caller, for `hostile_callers.py`. Each runs until it is cancelled, and counts its answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

NESTED = b"[" + b",".join([b"[]"] * 349_000) + b"]"
"""Body of 1 MiB that makes a parser create as many values as possible."""
LARGE = {
    "/generate": [
        (b'{"prompt": "', b"ab cd ", b'"}'),
        (b'{"prompt": [1', b",1", b"]}"),
        (b'{"prompt": [1], "stop": ["a"', b',"abcdefghijklm"', b"]}"),
    ],
    "/tokenize": [(b'{"prompt": "', b"ab cd ", b'"}')],
    "/detokenize": [(b'{"tokens": [1', b",1", b"]}")],
}
"""Beginning, part and end of bodies with large values, by path."""
LARGE_BYTES = (16 << 20) - 4096
"""Size a little below the limit."""
AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z ]/"
NUM_STREAMS, NUM_SILENT, NUM_SPECS, AT_ONCE = 1000, 2000, 200, 40
JOB = {"name": "job", "model": {"name_or_path": "org/teacher"}}
LARGE_JOB = {**JOB, "evaluation": {"tasks": [f"task_{at}_" + 180 * "x" for at in range(1000)]}}
"""The largest spec that is accepted."""
EXTREMES: list[dict[str, Any]] = [
    {"target_ongoing_requests": 1e-320},
    {"upscale_delay_s": 1e308, "downscale_delay_s": 1e308},
    {"min_replicas": 0, "max_replicas": 2**62},
    {"engine": {"num_threads": 2**62}},
    {"engine": {"tensor_parallel_size": 2**62, "kv_cache_bytes": 2**62}},
]

Count = Callable[[object], None]
Attack = Callable[[httpx.AsyncClient, str, Count], Awaitable[None]]


async def bodies(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Send bodies with many values, 40 at a time, without an API key."""
    headers = {"authorization": "", "content-type": "application/json"}
    while True:
        sent = (client.post(path, content=NESTED, headers=headers) for _ in range(AT_ONCE))
        for answer in await asyncio.gather(*sent, return_exceptions=True):
            count(answer)


async def large_bodies(client: httpx.AsyncClient, _path: str, count: Count) -> None:
    """One kind after the other, one at a time."""
    sent = [
        (path, head + part * ((LARGE_BYTES - len(head) - len(tail)) // len(part)) + tail)
        for path, kinds in LARGE.items()
        for head, part, tail in kinds
    ]
    for path, body in itertools.cycle(sent):
        try:
            count(await client.post(path, content=body, headers={"content-type": "application/json"}))
        except httpx.TransportError as error:  # refused while the body is still being sent
            count(error)


async def streams(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Open a thousand streams, 200 per second, and keep those that are accepted."""

    async def follow(number: int) -> None:
        await asyncio.sleep(number / 200)
        try:
            async with client.stream("GET", path, headers={"accept": "text/event-stream"}) as answer:
                count(answer)
                async for _ in answer.aiter_raw():
                    pass
        except httpx.HTTPError as error:
            count(error)

    await asyncio.gather(*(follow(number) for number in range(NUM_STREAMS)))
    await asyncio.sleep(3600)


async def silent(client: httpx.AsyncClient, _path: str, count: Count) -> None:
    """Connections that send nothing, each opened again when it is closed."""
    url = client.base_url

    async def connect() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(url.host, url.port)
                count("connected")
                await reader.read()
                writer.close()
            except OSError as error:
                count(error)
                await asyncio.sleep(1.0)

    await asyncio.gather(*(connect() for _ in range(NUM_SILENT)))


async def fill(client: httpx.AsyncClient) -> None:
    """Store jobs with large specs."""
    for _ in range(NUM_SPECS):
        await client.post("/jobs", json=LARGE_JOB)


async def specs(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Validate and read back the largest spec, eight requests at a time."""
    stored = f"/jobs/{(await client.post('/jobs', json=LARGE_JOB)).raise_for_status().json()['id']}"

    async def ask() -> None:
        while True:
            count(await client.post(path, json=LARGE_JOB))
            count(await client.get(stored))

    await asyncio.gather(*(ask() for _ in range(8)))


async def pages(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """List all jobs page by page, four requests at a time."""

    async def read() -> None:
        while True:
            count(await client.get(path))

    await asyncio.gather(*(read() for _ in range(4)))


async def refusals(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Exceed the key's rate limit, 40 requests at a time, where nothing else limits them."""

    async def ask() -> None:
        while True:
            count(await client.post(path, json={}))

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))


async def reads(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Read a job's history, its objects in the store, and lists, 16 requests at a time."""
    await client.post(path, json=LARGE_JOB)
    job = (await client.get(path, params={"limit": 1})).json()["data"][0]["id"]
    parts = ("", "/events", "/metrics", "/checkpoints", "/artifacts", "/logs?tail_lines=100000", "/tracking")
    asked = [f"{path}/{job}{part}" for part in parts] + ["/models", "/aliases", "/audit?limit=1000", "/v1/files"]

    async def ask() -> None:
        for each in itertools.cycle(asked):
            count(await client.get(each))

    await asyncio.gather(*(ask() for _ in range(16)))


async def complaints(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Specs with as many unknown keys as a body may have, eight at a time."""

    async def ask() -> None:
        while True:
            count(await client.post(path, json={**JOB, **{f"key_{number}": 0 for number in range(16_000)}}))

    await asyncio.gather(*(ask() for _ in range(8)))


async def deployments(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Send numbers that overflow in calculations."""
    while True:
        for extreme in EXTREMES:
            count(await client.post(path, json={"model": "mdl_none", "route_prefix": "/x", **extreme}))


async def grammar(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Send an ambiguous grammar, eight requests at a time."""
    body = {"prompt": [1], "max_tokens": 200, "n": 2, "structured_outputs": {"grammar": AMBIGUOUS}}

    async def ask() -> None:
        while True:
            count(await client.post(path, json=body))

    await asyncio.gather(*(ask() for _ in range(8)))


CASES: dict[str, tuple[Attack, str, bool]] = {
    "bodies": (bodies, "/jobs", True),
    "event streams": (streams, "/jobs/{job}/events", True),
    "followed logs": (streams, "/jobs/{job}/logs?follow=true", True),
    "silent connections": (silent, "", True),
    "pages": (pages, "/jobs?limit=1000", True),
    "specs": (specs, "/jobs/validate", True),
    "complaints": (complaints, "/jobs/validate", True),
    "reads": (reads, "/jobs", True),
    "refusals": (refusals, "/deployments/dep_none/generate", True),
    "deployments": (deployments, "/deployments", True),
    "bodies, replica": (bodies, "/generate", False),
    "large bodies, replica": (large_bodies, "", False),
    "grammar, replica": (grammar, "/generate", False),
}
"""Attack, path, and whether it is on the control plane."""
