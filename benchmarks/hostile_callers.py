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

from benchmarks.common import make_benchmark_parser, make_random_llama, write_report
from swiftkv_platform.local.ray_head import find_free_ports
from swiftkv_platform.model import convert
from swiftkv_platform.security.keys import create_key
from swiftkv_platform.security.principals import Scope

ROOT = Path(__file__).parents[1]
NESTED_BODY = b"[" + b",".join([b"[]"] * 349_000) + b"]"
"""Body of 1 MiB that makes a parser create as many values as possible."""
LARGE_BODY_PARTS = {
    "/generate": [
        (b'{"prompt": "', b"ab cd ", b'"}'),
        (b'{"prompt": [1', b",1", b"]}"),
        (b'{"prompt": [1], "stop": ["a"', b',"abcdefghijklm"', b"]}"),
    ],
    "/tokenize": [(b'{"prompt": "', b"ab cd ", b'"}')],
    "/detokenize": [(b'{"tokens": [1', b",1", b"]}")],
}
"""Beginning, part and end of bodies with large values, by path."""
NEARLY_MAX_BODY_BYTES = (16 << 20) - 4096
"""Size of a body a little below a replica's limit, `REPLICA_BODY_BYTES`."""
AMBIGUOUS_GRAMMAR = "start: s\ns: s s s | s s | /[a-z ]/"
GRAMMAR_REQUEST = {"prompt": [1], "max_tokens": 200, "n": 2, "structured_outputs": {"grammar": AMBIGUOUS_GRAMMAR}}
MANY_SAMPLES_REQUEST = {"prompt": [1, 2, 3], "max_tokens": 64, "n": 32, "ignore_eos": True}
NUM_STREAMS, NUM_SILENT, NUM_SPECS, NUM_CONCURRENT = 1000, 2000, 200, 40
JOB_SPEC = {"name": "job", "model": {"name_or_path": "org/teacher"}}
LARGE_JOB_SPEC = {**JOB_SPEC, "evaluation": {"tasks": [f"task_{at}_" + 180 * "x" for at in range(1000)]}}
"""The largest spec that is accepted."""
MANY_KEYS_SPEC = {**JOB_SPEC, **{f"key_{number}": 0 for number in range(16_000)}}
"""A spec with as many unknown keys as a body may have."""
EXTREME_SETTINGS: list[dict[str, Any]] = [
    {"target_ongoing_requests": 1e-320},
    {"upscale_delay_s": 1e308, "downscale_delay_s": 1e308},
    {"min_replicas": 0, "max_replicas": 2**62},
    {"engine": {"num_threads": 2**62}},
    {"engine": {"tensor_parallel_size": 2**62, "kv_cache_bytes": 2**62}},
]

REPLICA_OPTIONS = ["--max-num-seqs=8", "--num-threads=1", "--kv-cache-bytes=67108864", "--stream-interval-s=0"]
"""Engine options of the replica."""

RecordResponse = Callable[[object], None]
Attack = Callable[[httpx.AsyncClient, str, RecordResponse], Awaitable[None]]


async def repeat_concurrently(number: int, action: Callable[[], Awaitable[None]]) -> None:
    """Repeat an action in `number` concurrent loops."""

    async def forever() -> None:
        while True:
            await action()

    await asyncio.gather(*(forever() for _ in range(number)))


def make_request_attack(number: int, method: str, body: Any = None) -> Attack:
    """Return an attack that repeats the same request in `number` concurrent loops."""

    async def attack(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
        async def send() -> None:
            record(await client.request(method, path, json=body))

        await repeat_concurrently(number, send)

    return attack


async def send_nested_bodies(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
    """Post bodies with many values, 40 concurrently, without an API key."""
    headers = {"authorization": "", "content-type": "application/json"}
    while True:
        sent = (client.post(path, content=NESTED_BODY, headers=headers) for _ in range(NUM_CONCURRENT))
        for response in await asyncio.gather(*sent, return_exceptions=True):
            record(response)


async def send_large_bodies(client: httpx.AsyncClient, _path: str, record: RecordResponse) -> None:
    sent = [
        (path, head + part * ((NEARLY_MAX_BODY_BYTES - len(head) - len(tail)) // len(part)) + tail)
        for path, kinds in LARGE_BODY_PARTS.items()
        for head, part, tail in kinds
    ]
    for path, body in itertools.cycle(sent):
        try:
            record(await client.post(path, content=body, headers={"content-type": "application/json"}))
        except httpx.TransportError as error:  # the server refuses before the body is sent
            record(error)


async def open_streams(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
    """Open a thousand streams, 200 per second, and keep accepted ones open."""

    async def follow(number: int) -> None:
        await asyncio.sleep(number / 200)
        try:
            async with client.stream("GET", path, headers={"accept": "text/event-stream"}) as response:
                record(response)
                async for _ in response.aiter_raw():
                    pass
        except httpx.HTTPError as error:
            record(error)

    await asyncio.gather(*(follow(number) for number in range(NUM_STREAMS)))
    await asyncio.sleep(3600)


async def open_silent_connections(client: httpx.AsyncClient, _path: str, record: RecordResponse) -> None:
    """Open connections that send nothing, and reopen closed ones."""
    url = client.base_url

    async def connect() -> None:
        try:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            record("connected")
            await reader.read()
            writer.close()
        except OSError as error:
            record(error)
            await asyncio.sleep(1.0)

    await repeat_concurrently(NUM_SILENT, connect)


def store_jobs(client: httpx.Client) -> None:
    for _ in range(NUM_SPECS):
        client.post("/jobs", json=LARGE_JOB_SPEC).raise_for_status()


async def validate_large_specs(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
    """Validate the largest spec and read it back, in eight concurrent loops."""
    stored = f"/jobs/{(await client.post('/jobs', json=LARGE_JOB_SPEC)).raise_for_status().json()['id']}"

    async def send() -> None:
        record(await client.post(path, json=LARGE_JOB_SPEC))
        record(await client.get(stored))

    await repeat_concurrently(8, send)


async def read_jobs_and_lists(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
    """Read a job's history, its objects in the store, and lists, in 16 concurrent loops."""
    await client.post(path, json=LARGE_JOB_SPEC)
    job = (await client.get(path, params={"limit": 1})).json()["data"][0]["id"]
    parts = ("", "/events", "/metrics", "/checkpoints", "/artifacts", "/logs?tail_lines=100000", "/tracking")
    paths = [f"{path}/{job}{part}" for part in parts] + ["/models", "/aliases", "/audit?limit=1000", "/v1/files"]

    async def send() -> None:
        for each in paths:
            record(await client.get(each))

    await repeat_concurrently(16, send)


async def send_extreme_deployments(client: httpx.AsyncClient, path: str, record: RecordResponse) -> None:
    """Create deployments with numbers that overflow in calculations."""
    while True:
        for extreme in EXTREME_SETTINGS:
            record(await client.post(path, json={"model": "mdl_none", "route_prefix": "/x", **extreme}))


@dataclass(frozen=True)
class AttackCase:
    attack: Attack
    path: str = ""
    """Path of the requests; `{job}` is a job's id."""
    is_replica: bool = False
    """Whether the target is a replica, not a control plane."""
    prepare: Callable[[httpx.Client], object] | None = None
    """Called once with a client of the attacker, before the measurements."""


ATTACK_CASES = {
    "bodies": AttackCase(send_nested_bodies, "/jobs"),
    "event streams": AttackCase(open_streams, "/jobs/{job}/events"),
    "followed logs": AttackCase(open_streams, "/jobs/{job}/logs?follow=true"),
    "silent connections": AttackCase(open_silent_connections),
    "pages": AttackCase(make_request_attack(4, "GET"), "/jobs?limit=1000", prepare=store_jobs),
    "specs": AttackCase(validate_large_specs, "/jobs/validate"),
    "complaints": AttackCase(make_request_attack(8, "POST", MANY_KEYS_SPEC), "/jobs/validate"),
    "reads": AttackCase(read_jobs_and_lists, "/jobs"),
    "refusals": AttackCase(make_request_attack(NUM_CONCURRENT, "POST", {}), "/deployments/dep_none/generate"),
    "deployments": AttackCase(send_extreme_deployments, "/deployments"),
    "bodies, replica": AttackCase(send_nested_bodies, "/generate", is_replica=True),
    "large bodies, replica": AttackCase(send_large_bodies, is_replica=True),
    "grammar, replica": AttackCase(make_request_attack(8, "POST", GRAMMAR_REQUEST), "/generate", is_replica=True),
    "samples, replica": AttackCase(make_request_attack(6, "POST", MANY_SAMPLES_REQUEST), "/generate", is_replica=True),
}


async def run_attack(case: str, url: str, key: str) -> None:
    """Run one attack in this process until terminated, then print the counts of its responses."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    os.nice(10)
    seen: Counter[str] = Counter()

    def record(response: object) -> None:
        plain = response if isinstance(response, str) else type(response).__name__
        seen[str(response.status_code) if isinstance(response, httpx.Response) else plain] += 1

    action, path = ATTACK_CASES[case].attack, ATTACK_CASES[case].path
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False) as client:
        if "{job}" in path:
            path = path.format(job=(await client.post("/jobs", json=JOB_SPEC)).raise_for_status().json()["id"])
        acting = asyncio.ensure_future(action(client, path, record))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, acting.cancel)
        print("begun", flush=True)
        with suppress(asyncio.CancelledError, httpx.HTTPError):
            await acting
    print(json.dumps(dict(seen)), flush=True)
    os._exit(0)  # without closing thousands of connections one by one


class ServerProcess:
    """A control plane or replica in its own process."""

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

    def read_memory_mib(self, field: str) -> int:
        """Return `VmRSS`, or its max `VmHWM`, in MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(field))

    def wait_until_idle(self, max_s: float = 60.0) -> float:
        """Wait until the process and its children use less than a tenth of a core. Returns the seconds waited."""
        began, used = time.perf_counter(), self._cpu_seconds()
        while time.perf_counter() - began < max_s:
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

    def wait_until_ready(self, path: str) -> None:
        while self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + path, trust_env=False, timeout=5.0).is_success:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the server exited with status {self._process.returncode}")

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
    model = convert(make_random_llama(Namespace(vocab_size=tokenizer.get_vocab_size(), **shape), 1024))
    model.save_pretrained(directory)


def main() -> None:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=150, help="requests of the other tenant per measurement")
    parser.add_argument("--rounds", type=int, default=2, help="measurements without the attack and during it")
    parser.add_argument("--seconds", type=float, default=12.0, help="max duration of a measurement")
    parser.add_argument("--patience", type=float, default=20.0, help="timeout of a request in seconds")
    parser.add_argument("--cases", nargs="+", choices=ATTACK_CASES, default=list(ATTACK_CASES))
    parser.add_argument("--attack", nargs=3, help="internal, starts the attacking process: case, URL, key")
    options = parser.parse_args()
    if options.attack is not None:
        asyncio.run(run_attack(*options.attack))
        return
    # measure each case, and print a row of the table
    report = {}
    print(
        "| attack | answered requests of others (without) | median (without) | p99 (without) | ratio (of rounds) "
        "| longest of each request (without) | RSS before, max | busy after | attacker's responses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in options.cases:
        with tempfile.TemporaryDirectory() as directory:
            report[case] = found = measure_case(case, Path(directory), options)
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


def measure_case(name: str, directory: Path, options: Any) -> dict[str, Any]:
    # 1. start the server, and define the other tenant's requests
    case = ATTACK_CASES[name]
    port = find_free_ports([0])[0]
    keys = directory / "keys.yaml"
    attacker, other = (
        create_key(keys, name=each, tenant=each, scopes=frozenset({Scope.ADMIN})) for each in ("eve", "ann")
    )
    calls: list[tuple[str, str, Any]]
    if case.is_replica:
        student = directory / "student"
        save_model(student)
        command = ["-m", "swiftkv_platform.cli", "serve", str(student), "--port", str(port), *REPLICA_OPTIONS]
        server = ServerProcess([*command, "--api-keys-file", str(keys)], port)
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
        calls = [("GET", "/health", None), ("POST", "/generate", body)]
        calls.append(("POST", "/generate", {**body, "max_tokens": 32, "stream": True}))
    else:
        server = ServerProcess(
            ["-m", "swiftkv_platform.control_plane"],
            port,
            SWIFTKV_HOME=str(directory),
            SWIFTKV_PORT=str(port),
            SWIFTKV_API_KEYS_FILE=str(keys),
            SWIFTKV_RAY_DASHBOARD_URL="http://127.0.0.1:1",
        )
        calls = [("GET", "/healthz", None), ("GET", "/jobs?limit=5", None), ("POST", "/jobs/validate", JOB_SPEC)]
        calls.append(("POST", "/jobs", JOB_SPEC))
    command = [sys.executable, "-m", "benchmarks.hostile_callers", "--attack", name, server.url, attacker]
    phases: list[tuple[list[float | None], list[float | None]]] = []
    seen: Counter[str] = Counter()
    busy_after: list[float] = []
    # 2. measure in rounds, without the attack and during it
    with closing(server):
        server.wait_until_ready(calls[0][1])
        if case.prepare is not None:
            headers = {"authorization": f"Bearer {attacker}"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=120, trust_env=False) as client:
                case.prepare(client)
        send_requests(1.0, server.url, other, calls, options)
        server.wait_until_idle()
        rss = server.read_memory_mib("VmRSS")
        for _ in range(options.rounds):
            without = send_requests(options.seconds, server.url, other, calls, options)
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                process.stdout.readline()
                phases.append((without, send_requests(options.seconds, server.url, other, calls, options)))
                process.terminate()
                seen.update(json.loads(process.stdout.read()))
            busy_after.append(server.wait_until_idle())
        most_rss = server.read_memory_mib("VmHWM")
    # 3. summarize latencies
    both = [[taken for phase in phases for taken in phase[at]] for at in (0, 1)]
    quiet = min(compute_quantile(without, 0.99) for without, _ in phases)
    median, p99 = ([compute_quantile(times, share) for times in both] for share in (0.5, 0.99))
    return {
        "asked": len(both[1]),
        "answered": len(both[1]) - both[1].count(None),
        "without": len(both[0]),
        "p99_ms": [round(each * 1e3) for each in p99],
        "median_ms": [round(each * 1e3) for each in median],
        "longest_ms": [
            [compute_longest_ms(phases, during, at, len(calls)) for during in (0, 1)] for at in range(len(calls))
        ],
        "ratio": compute_ratio(quiet, p99[1]),
        "rounds": [compute_ratio(quiet, compute_quantile(during, 0.99)) for _, during in phases],
        "rss": rss,
        "most_rss": most_rss,
        "busy_after_s": [round(each, 1) for each in busy_after],
        "seen": dict(seen),
    }


def send_requests(
    seconds: float, url: str, key: str, calls: list[tuple[str, str, Any]], options: Any
) -> list[float | None]:
    """Send requests for some seconds. Returns the latency of each in seconds (of a streamed response, its longest gap);
    None for a failed request or a timeout."""
    times: list[float | None] = []
    end = time.perf_counter() + seconds
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    with httpx.Client(base_url=url, headers=headers, timeout=options.patience, trust_env=False) as client:
        while len(times) < options.requests and time.perf_counter() < end:
            method, path, body = calls[len(times) % len(calls)]
            began = time.perf_counter()
            try:
                with client.stream(method, path, json=body) as response:
                    parts = [began, *(time.perf_counter() for _ in response.iter_raw()), time.perf_counter()]
            except httpx.HTTPError:
                times.append(None)
            else:
                parts = parts if "stream" in (body or {}) else [began, parts[-1]]
                longest = max(b - a for a, b in itertools.pairwise(parts))
                times.append(longest if response.is_success else None)
            time.sleep(0.02)
    return times


def compute_longest_ms(
    phases: list[tuple[list[float | None], ...]], is_attacked: int, kind: int, num_kinds: int
) -> int:
    """Return the longest latency of requests of one of `num_kinds` kinds, during the attack or without."""
    taken = [seconds for phase in phases for seconds in phase[is_attacked][kind::num_kinds] if seconds]
    return round(1e3 * max(taken, default=0.0))


def compute_quantile(times: list[float | None], share: float) -> float:
    """Return a quantile of the latencies of answered requests; 0 if there are none."""
    answered = sorted(taken for taken in times if taken is not None)
    return answered[math.ceil(share * len(answered)) - 1] if answered else 0.0


def compute_ratio(without: float, during: float) -> float:
    return round(during / max(without, 1e-3), 1)


if __name__ == "__main__":
    main()
