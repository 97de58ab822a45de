"""Attacks by one caller, for `hostile_callers.py`. Each runs until it is cancelled, and counts its answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
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

NUM_SOURCES, NUM_SOURCE_FILES, NUM_DEPLOYMENTS, NUM_MODELS = 1000, 100, 3000, 1000
SOURCES = "sources"
"""Directory below the control plane's home that every tenant may read; `student` in it is a model."""
QUOTA = 1 << 30
"""Bytes that a tenant may store in the case of imports."""

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


def store_jobs(_home: Path, client: httpx.Client) -> None:
    """Store jobs with large specs."""
    for _ in range(NUM_SPECS):
        client.post("/jobs", json=LARGE_JOB).raise_for_status()


async def specs(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Validate and read back the largest spec, eight requests at a time."""
    stored = f"/jobs/{(await client.post('/jobs', json=LARGE_JOB)).raise_for_status().json()['id']}"

    async def ask() -> None:
        while True:
            count(await client.post(path, json=LARGE_JOB))
            count(await client.get(stored))

    await asyncio.gather(*(ask() for _ in range(8)))


async def pages(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Ask for the longest page of a list, four requests at a time."""

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


async def many_sources(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Validate a spec with a thousand sources of long JSON, four at a time."""
    directory = str(Path(path) / "nested")
    spec = {**JOB, "data": {"sources": [{"name_or_path": directory}] * NUM_SOURCES}}

    async def ask() -> None:
        while True:
            count(await client.post("/jobs/validate", json=spec))

    await asyncio.gather(*(ask() for _ in range(4)))


async def nested_upload(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Upload 99 MB of rows of empty lists."""
    line = b'{"text": "a", "x": [' + b",".join([b"[]"] * 1_398_000) + b"]}\n"
    content = line * (99_000_000 // len(line))
    while True:
        try:
            file = {"file": ("rows.jsonl", content, "application/jsonl")}
            count(await client.post(path, files=file, data={"purpose": "fine-tune"}))
        except httpx.TransportError as error:  # refused while the body is still being sent
            count(error)


async def change_deployments(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Create, change and delete deployments beside thousands, four at a time."""
    model = (await client.get("/models")).raise_for_status().json()["data"][0]["id"]

    async def change(number: int) -> None:
        while True:
            route = f"/t/eve/attack/{number}"
            answer = await client.post(path, json={"model": model, "route_prefix": route, "max_replicas": 1})
            count(answer)
            created = f"{path}/{answer.json().get('id', _clone_id('dep', number))}"
            count(await client.patch(created, json={"max_replicas": 2}))
            if answer.is_success:
                count(await client.delete(created))

    await asyncio.gather(*(change(number) for number in range(4)))


async def imports(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Import a model of more bytes than the quota, and one with a long manifest, two at a time."""

    async def ask(name: str) -> None:
        while True:
            count(await client.post("/models/import", json={"source": str(Path(path) / name), "name": name}))

    await asyncio.gather(*(ask(name) for name in ("sparse", "long-manifest")))


async def many_samples(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Ask for 32 samples at a time, six requests at a time."""
    body = {"prompt": [1, 2, 3], "max_tokens": 64, "n": 32, "ignore_eos": True}

    async def ask() -> None:
        while True:
            count(await client.post(path, json=body))

    await asyncio.gather(*(ask() for _ in range(6)))


def write_sources(home: Path, _client: httpx.Client) -> None:
    """Write files whose first row is a mebibyte of JSON."""
    nested = home / SOURCES / "nested"
    nested.mkdir()
    row = '{"text": "a", "x": [' + ",".join(["[]"] * 349_000) + "]}\n"
    for number in range(NUM_SOURCE_FILES):
        (nested / f"{number}.jsonl").write_text(row)


def write_imports(home: Path, _client: httpx.Client) -> None:
    """Write a student with a sparse file above the quota, and one with a manifest of 21 MB."""
    student = home / SOURCES / "student"
    for name in ("sparse", "long-manifest"):
        copy = home / SOURCES / name
        copy.mkdir()
        for file in student.iterdir():
            shutil.copyfile(file, copy / file.name)
    with (home / SOURCES / "sparse" / "zeros.safetensors").open("wb") as stream:
        stream.truncate(2 * QUOTA)
    lists = ",".join(["[]"] * 7_000_000)
    manifest = f'{{"kind": "artifact", "files": {{}}, "created_at": 0, "lineage": {{"x": [{lists}]}}}}'
    (home / SOURCES / "long-manifest" / "manifest.json").write_text(manifest)


def import_student(home: Path, client: httpx.Client) -> str:
    """Import the student; return its id."""
    answer = client.post("/models/import", json={"source": str(home / SOURCES / "student"), "name": "student"})
    model: str = answer.raise_for_status().json()["id"]
    return model


def store_deployments(home: Path, client: httpx.Client) -> None:
    """Store copies of a deployment."""
    spec = {"model": import_student(home, client), "route_prefix": "/t/eve/first", "max_replicas": 1}
    first = client.post("/deployments", json=spec).raise_for_status().json()["id"]

    def change(row: dict[str, Any], number: int) -> None:
        route, known = f"/t/eve/{number}", _clone_id("dep", number)
        row.update(id=known, held_route=route)
        row["spec"] = json.dumps({**json.loads(row["spec"]), "id": known, "route_prefix": route})

    _clone(home, "deployments", first, NUM_DEPLOYMENTS, change)


def store_models(home: Path, client: httpx.Client) -> None:
    """Store copies of a model, each with 55 KB of lineage."""

    def change(row: dict[str, Any], number: int) -> None:
        row["id"] = _clone_id("mdl", number)
        row["lineage"] = json.dumps({**json.loads(row["lineage"]), "notes": "x" * 55_000})

    _clone(home, "models", import_student(home, client), NUM_MODELS, change)


def _clone_id(kind: str, number: int) -> str:
    return f"{kind}_{number:026}"


def _clone(home: Path, table: str, key: str, count: int, change: Callable[[dict[str, Any], int], None]) -> None:
    """Insert copies of a row: past the API, so that a limit on their number does not change what is measured."""
    with closing(sqlite3.connect(home / "swiftkv.db", timeout=60)) as database, database:
        database.row_factory = sqlite3.Row
        original = database.execute(f"SELECT * FROM {table} WHERE id = ?", (key,)).fetchone()
        for number in range(count):
            row = dict(original)
            change(row, number)
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


@dataclass(frozen=True)
class Case:
    """One attack."""

    attack: Attack
    path: str = ""
    """Path of the requests; `{job}` is a job's id, `{sources}` the directory of sources."""
    is_replica: bool = False
    """Whether a replica is attacked; else a control plane."""
    prepare: Callable[[Path, httpx.Client], object] | None = None
    """Called once with the control plane's home and a client of the attacker, before anything is measured."""


CASES = {
    "bodies": Case(bodies, "/jobs"),
    "event streams": Case(streams, "/jobs/{job}/events"),
    "followed logs": Case(streams, "/jobs/{job}/logs?follow=true"),
    "silent connections": Case(silent),
    "pages": Case(pages, "/jobs?limit=1000", prepare=store_jobs),
    "specs": Case(specs, "/jobs/validate"),
    "complaints": Case(complaints, "/jobs/validate"),
    "reads": Case(reads, "/jobs"),
    "refusals": Case(refusals, "/deployments/dep_none/generate"),
    "deployments": Case(deployments, "/deployments"),
    "sources": Case(many_sources, "{sources}", prepare=write_sources),
    "nested upload": Case(nested_upload, "/v1/files"),
    "stored deployments": Case(change_deployments, "/deployments", prepare=store_deployments),
    "imports": Case(imports, "{sources}", prepare=write_imports),
    "large models": Case(pages, "/models?limit=1000", prepare=store_models),
    "bodies, replica": Case(bodies, "/generate", is_replica=True),
    "large bodies, replica": Case(large_bodies, is_replica=True),
    "grammar, replica": Case(grammar, "/generate", is_replica=True),
    "samples, replica": Case(many_samples, "/generate", is_replica=True),
}
