"""Effect of one hostile caller on others' requests: their answers, the 99th percentile of their times, and memory.

    python -m benchmarks.hostile_callers [--output hostile.json] [--cases bodies grammar] [--requests 150]

Each case has its own control plane, or its own replica of a small random model, with API keys in unmodified processes.
A separate process attacks at a lower CPU priority, since it would have its own machine. Another tenant sends
`--requests` in sequence, each over a new connection, alternately without and during the attack, `--rounds` times; a
streamed answer counts with its longest gap. After each attack, the benchmark waits until the server is idle (`busy
after`: a minute at most). Ratios compare the p99 during the attack to the lowest p99 of a round without it. A case is
`stopped` if one of these requests fails or gets no answer within `--patience` seconds. There is no Ray: jobs wait, and
streams of their events and logs stay open.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.common import benchmark_parser, random_llama, write_report
from swiftkv_platform.local.ray_head import find_free_ports
from swiftkv_platform.model import convert
from swiftkv_platform.security.keys import Scope, create_key

ROOT = Path(__file__).parents[1]
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
GRAMMAR = {"prompt": [1], "max_tokens": 200, "n": 2, "structured_outputs": {"grammar": AMBIGUOUS}}
MANY_SAMPLES = {"prompt": [1, 2, 3], "max_tokens": 64, "n": 32, "ignore_eos": True}
NUM_STREAMS, NUM_SILENT, NUM_SPECS, AT_ONCE = 1000, 2000, 200, 40
JOB = {"name": "job", "model": {"name_or_path": "org/teacher"}}
LARGE_JOB = {**JOB, "evaluation": {"tasks": [f"task_{at}_" + 180 * "x" for at in range(1000)]}}
"""The largest spec that is accepted."""
MANY_KEYS = {**JOB, **{f"key_{number}": 0 for number in range(16_000)}}
"""A spec with as many unknown keys as a body may have."""
EXTREMES: list[dict[str, Any]] = [
    {"target_ongoing_requests": 1e-320},
    {"upscale_delay_s": 1e308, "downscale_delay_s": 1e308},
    {"min_replicas": 0, "max_replicas": 2**62},
    {"engine": {"num_threads": 2**62}},
    {"engine": {"tensor_parallel_size": 2**62, "kv_cache_bytes": 2**62}},
]

SERVE = ["--max-num-seqs", "8", "--num-threads", "1", "--kv-cache-bytes", "67108864", "--stream-interval-s", "0"]
"""Engine options of the replica."""

Count = Callable[[object], None]
Attack = Callable[[httpx.AsyncClient, str, Count], Awaitable[None]]


async def repeat(number: int, act: Callable[[], Awaitable[None]]) -> None:
    """Do something again and again, `number` times at once."""

    async def forever() -> None:
        while True:
            await act()

    await asyncio.gather(*(forever() for _ in range(number)))


def posting(number: int, body: Any) -> Attack:
    """An attack that sends the same JSON again and again, `number` requests at a time."""

    async def attack(client: httpx.AsyncClient, path: str, count: Count) -> None:
        async def ask() -> None:
            count(await client.post(path, json=body))

        await repeat(number, ask)

    return attack


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
        try:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            count("connected")
            await reader.read()
            writer.close()
        except OSError as error:
            count(error)
            await asyncio.sleep(1.0)

    await repeat(NUM_SILENT, connect)


def store_jobs(client: httpx.Client) -> None:
    """Store jobs with large specs."""
    for _ in range(NUM_SPECS):
        client.post("/jobs", json=LARGE_JOB).raise_for_status()


async def specs(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Validate and read back the largest spec, eight requests at a time."""
    stored = f"/jobs/{(await client.post('/jobs', json=LARGE_JOB)).raise_for_status().json()['id']}"

    async def ask() -> None:
        count(await client.post(path, json=LARGE_JOB))
        count(await client.get(stored))

    await repeat(8, ask)


async def pages(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Ask for the longest page of a list, four requests at a time."""

    async def read() -> None:
        count(await client.get(path))

    await repeat(4, read)


async def reads(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Read a job's history, its objects in the store, and lists, 16 requests at a time."""
    await client.post(path, json=LARGE_JOB)
    job = (await client.get(path, params={"limit": 1})).json()["data"][0]["id"]
    parts = ("", "/events", "/metrics", "/checkpoints", "/artifacts", "/logs?tail_lines=100000", "/tracking")
    asked = [f"{path}/{job}{part}" for part in parts] + ["/models", "/aliases", "/audit?limit=1000", "/v1/files"]

    async def ask() -> None:
        for each in asked:
            count(await client.get(each))

    await repeat(16, ask)


async def deployments(client: httpx.AsyncClient, path: str, count: Count) -> None:
    """Send numbers that overflow in calculations."""
    while True:
        for extreme in EXTREMES:
            count(await client.post(path, json={"model": "mdl_none", "route_prefix": "/x", **extreme}))


@dataclass(frozen=True)
class Case:
    """One attack."""

    attack: Attack
    path: str = ""
    """Path of the requests; `{job}` is a job's id."""
    is_replica: bool = False
    """Whether a replica is attacked; else a control plane."""
    prepare: Callable[[httpx.Client], object] | None = None
    """Called once with a client of the attacker, before anything is measured."""


CASES = {
    "bodies": Case(bodies, "/jobs"),
    "event streams": Case(streams, "/jobs/{job}/events"),
    "followed logs": Case(streams, "/jobs/{job}/logs?follow=true"),
    "silent connections": Case(silent),
    "pages": Case(pages, "/jobs?limit=1000", prepare=store_jobs),
    "specs": Case(specs, "/jobs/validate"),
    "complaints": Case(posting(8, MANY_KEYS), "/jobs/validate"),
    "reads": Case(reads, "/jobs"),
    "refusals": Case(posting(AT_ONCE, {}), "/deployments/dep_none/generate"),
    "deployments": Case(deployments, "/deployments"),
    "bodies, replica": Case(bodies, "/generate", is_replica=True),
    "large bodies, replica": Case(large_bodies, is_replica=True),
    "grammar, replica": Case(posting(8, GRAMMAR), "/generate", is_replica=True),
    "samples, replica": Case(posting(6, MANY_SAMPLES), "/generate", is_replica=True),
}


async def attack(case: str, url: str, key: str) -> None:
    """Run one attack in its own process until terminated, then print the answers it got."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.nice(10)
    seen: Counter[str] = Counter()

    def count(what: object) -> None:
        plain = what if isinstance(what, str) else type(what).__name__
        seen[str(what.status_code) if isinstance(what, httpx.Response) else plain] += 1

    act, path = CASES[case].attack, CASES[case].path
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False) as client:
        if "{job}" in path:
            path = path.format(job=(await client.post("/jobs", json=JOB)).raise_for_status().json()["id"])
        acting = asyncio.ensure_future(act(client, path, count))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, acting.cancel)
        print("begun", flush=True)
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await acting
    print(json.dumps(dict(seen)), flush=True)
    os._exit(0)  # without closing thousands of connections one by one


class Process:
    """Control plane or replica, as a process."""

    def __init__(self, arguments: list[str], port: int, **variables: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        known = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with_shells_limit = ["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh"]  # limits open files like a shell
        self._process = subprocess.Popen(
            [*with_shells_limit, sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **known, **variables},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def mebibytes(self, field: str) -> int:
        """Return `VmRSS`, or its maximum `VmHWM`, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(field))

    def settle(self, most_s: float = 60.0) -> float:
        """Wait until the process and its children use less than a tenth of a core. Returns the seconds that took."""
        began, used = time.perf_counter(), self._cpu_seconds()
        while time.perf_counter() - began < most_s:
            time.sleep(0.5)
            used, before = self._cpu_seconds(), used
            if used - before < 0.05:
                break
        return time.perf_counter() - began

    def _cpu_seconds(self) -> float:
        process = psutil.Process(self._process.pid)
        used = 0.0
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                used += times.user + times.system
        return used

    def wait(self, path: str) -> None:
        while self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + path, trust_env=False, timeout=5.0).is_success:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"it ended with {self._process.returncode}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def save_model(directory: Path) -> None:
    """Save a random Llama's student and a tokenizer: a token for each byte, and the merges of a short text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    shape = {"layers": 4, "hidden_size": 256, "intermediate_size": 512, "heads": 4, "kv_heads": 2}
    model = convert(random_llama(Namespace(vocab_size=tokenizer.get_vocab_size(), **shape), 1024))
    model.save_pretrained(directory)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=150, help="requests of the other tenant in each measurement")
    parser.add_argument("--rounds", type=int, default=2, help="measurements without the attack and during it")
    parser.add_argument("--seconds", type=float, default=12.0, help="maximum duration of those requests")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for an answer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--attack", nargs=3, help="internal, starts the attacking process: case, URL, key")
    options = parser.parse_args()
    if options.attack is not None:
        asyncio.run(attack(*options.attack))
        return
    report = {}
    print(
        "| attack | others answered (without) | median (without) | p99 (without) | ratio (of rounds) "
        "| longest of each request (without) | RSS before, most | busy after | attacker's answers |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in options.cases:
        with tempfile.TemporaryDirectory() as directory:
            report[case] = found = measure(case, Path(directory), options)
        shown = {**found, "rounds": ", ".join(map(str, found["rounds"]))}
        if found["answered"] != found["asked"]:
            shown["ratio"] = "stopped"
        for name in ("median", "p99"):
            shown[name] = "{1} ({0}) ms".format(*found[f"{name}_ms"])
        shown["longest"] = ", ".join("{1} ({0}) ms".format(*each) for each in found["longest_ms"])
        columns = (
            "{answered} of {asked} ({without}) | {median} | {p99} | {ratio} ({rounds}) | {longest} "
            "| {rss}, {most_rss} MiB | {busy_after_s} s | {seen}"
        )
        print(f"| {case} | {columns.format(**shown)} |", flush=True)
    write_report(report, options.output)


def measure(name: str, directory: Path, options: Any) -> dict[str, Any]:
    case = CASES[name]
    port = find_free_ports([0])[0]
    keys = directory / "keys.yaml"
    attacker, other = (
        create_key(keys, name=each, tenant=each, scopes=frozenset({Scope.ADMIN})) for each in ("eve", "ann")
    )
    asks: list[tuple[str, str, Any]]
    if case.is_replica:
        student = directory / "student"
        save_model(student)
        command = ["-m", "swiftkv_platform.cli", "serve", str(student), "--port", str(port), *SERVE]
        server = Process([*command, "--api-keys-file", str(keys)], port)
        answer = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
        asks = [("GET", "/health", None), ("POST", "/generate", answer)]
        asks.append(("POST", "/generate", {**answer, "max_tokens": 32, "stream": True}))
    else:
        server = Process(
            ["-m", "swiftkv_platform.control_plane"],
            port,
            SWIFTKV_HOME=str(directory),
            SWIFTKV_PORT=str(port),
            SWIFTKV_API_KEYS_FILE=str(keys),
            SWIFTKV_RAY_DASHBOARD_URL="http://127.0.0.1:1",
        )
        asks = [("GET", "/healthz", None), ("GET", "/jobs?limit=5", None), ("POST", "/jobs/validate", JOB)]
        asks.append(("POST", "/jobs", JOB))
    command = [sys.executable, "-m", "benchmarks.hostile_callers", "--attack", name, server.url, attacker]
    phases: list[tuple[list[float | None], list[float | None]]] = []
    seen: Counter[str] = Counter()
    busy_after: list[float] = []
    with closing(server):
        server.wait(asks[0][1])
        if case.prepare is not None:
            headers = {"authorization": f"Bearer {attacker}"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=120, trust_env=False) as client:
                case.prepare(client)
        ask_for(1.0, server.url, other, asks, options)
        server.settle()
        rss = server.mebibytes("VmRSS")
        for _ in range(options.rounds):
            without = ask_for(options.seconds, server.url, other, asks, options)
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                phases.append((without, ask_for(options.seconds, server.url, other, asks, options)))
                process.terminate()
                seen.update(json.loads(process.stdout.read()))
            busy_after.append(server.settle())
        most_rss = server.mebibytes("VmHWM")
    both = [[taken for phase in phases for taken in phase[at]] for at in (0, 1)]
    quiet = min(quantile(without, 0.99) for without, _ in phases)
    median, p99 = ([quantile(times, share) for times in both] for share in (0.5, 0.99))
    return {
        "asked": len(both[1]),
        "answered": len(both[1]) - both[1].count(None),
        "without": len(both[0]),
        "p99_ms": [round(each * 1e3) for each in p99],
        "median_ms": [round(each * 1e3) for each in median],
        "longest_ms": [[longest_ms(phases, during, at, len(asks)) for during in (0, 1)] for at in range(len(asks))],
        "ratio": ratio(quiet, p99[1]),
        "rounds": [ratio(quiet, quantile(during, 0.99)) for _, during in phases],
        "rss": rss,
        "most_rss": most_rss,
        "busy_after_s": [round(each, 1) for each in busy_after],
        "seen": dict(seen),
    }


def ask_for(seconds: float, url: str, key: str, asks: list[tuple[str, str, Any]], options: Any) -> list[float | None]:
    """Send requests for some seconds. Returns the seconds that each took (for a streamed answer, its longest gap); None
    without a good answer in time."""
    times: list[float | None] = []
    end = time.perf_counter() + seconds
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    with httpx.Client(base_url=url, headers=headers, timeout=options.patience, trust_env=False) as client:
        while len(times) < options.requests and time.perf_counter() < end:
            method, path, body = asks[len(times) % len(asks)]
            began = time.perf_counter()
            try:
                with client.stream(method, path, json=body) as answer:
                    parts = [began, *(time.perf_counter() for _ in answer.iter_raw()), time.perf_counter()]
            except httpx.HTTPError:
                times.append(None)
            else:
                parts = parts if "stream" in (body or {}) else [began, parts[-1]]
                longest = max(b - a for a, b in itertools.pairwise(parts))
                times.append(longest if answer.is_success else None)
            time.sleep(0.02)
    return times


def longest_ms(phases: list[tuple[list[float | None], ...]], during: int, at: int, number: int) -> int:
    """Longest time of one of the `number` kinds of requests, without or during the attack."""
    taken = [seconds for phase in phases for seconds in phase[during][at::number] if seconds]
    return round(1e3 * max(taken, default=0.0))


def quantile(times: list[float | None], share: float) -> float:
    """Return this quantile of the times of answered requests; 0 if there are none."""
    answered = sorted(taken for taken in times if taken is not None)
    return answered[math.ceil(share * len(answered)) - 1] if answered else 0.0


def ratio(without: float, during: float) -> float:
    return round(during / max(without, 1e-3), 1)


if __name__ == "__main__":
    main()
