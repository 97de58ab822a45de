"""Effect of captured traffic on a replica: the 99th percentile of request times with and without capture.

    python -m benchmarks.capture [--rounds 7] [--requests 400] [--concurrency 4] [--output capture.json]

A replica serves a random small model in this process. A client in its own process sends conversations of about 200
tokens; the replica captures all of them or none, alternately, and redacts and stores them in a directory. The ratio is
of the medians over rounds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvicorn

from benchmarks.common import describe_conditions, make_benchmark_parser, write_report
from swiftkv_platform.local.ray_head import find_free_ports
from swiftkv_platform.model.conversion import convert_checkpoint
from swiftkv_platform.model.weights.bases import resolve_model_directory
from swiftkv_platform.serve.args import ReplicaArgs, ServedConfig
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.serve.versions import load_version
from swiftkv_platform.specs import BUILTIN_TEACHER
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.web.server import tune_interpreter

SENTENCE = "Write to ann.lee@example.org or call +1 202 555 0143 about order 4417, which was paid by card. "


def main() -> None:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=400, help="per round, with capture and without each")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--url", help="send one round to this server and print its times; for the client's process")
    args = parser.parse_args()
    if args.url is not None:
        print(json.dumps(asyncio.run(send_requests(args))))
        return
    with tempfile.TemporaryDirectory() as directory:
        report = asyncio.run(compare(args, Path(directory)))
    print(json.dumps(report["p99_ms"]))
    write_report(report, args.output)


async def compare(args: Namespace, directory: Path) -> dict[str, Any]:
    model = directory / "model"
    convert_checkpoint(resolve_model_directory(BUILTIN_TEACHER), model, num_key_value_layers=6)
    served = ServedConfig(model="student", artifact_uri=str(model), verify=False)
    version = await load_version(ReplicaArgs(id="dep_benchmark"), served)
    state = ReplicaState(version)
    tune_interpreter()
    [port] = find_free_ports([0])
    server = uvicorn.Server(uvicorn.Config(create_http_app(state), port=port, log_config=None))
    serving = asyncio.create_task(server.serve())
    capture = ResolvedCapture(share=1.0, uri=str(directory / "traffic"))
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * args.rounds + 2):
        captures = number % 2 == 1
        version.apply_request_settings(served.model_copy(update={"capture": capture if captures else None}))
        found = await run_client(args, f"http://127.0.0.1:{port}")
        if number >= 2:  # the first pair warms up
            times[captures].append(found)
    state.recorder.close()
    server.should_exit = True
    await serving
    await version.engine.aclose()
    stored = sum(path.stat().st_size for path in (directory / "traffic").rglob("*.gz"))
    with_capture, without = (median(times[captures]) for captures in (True, False))
    return {
        "conditions": describe_conditions(args),
        "p99_ms": {"without": 1000 * without, "with": 1000 * with_capture, "ratio": with_capture / without},
        "rounds_ms": {("with" if key else "without"): [1000 * each for each in found] for key, found in times.items()},
        "stored_bytes": stored,
    }


async def run_client(args: Namespace, url: str) -> float:
    """Return the 99th percentile of a round in seconds."""
    command = [sys.executable, "-m", "benchmarks.capture", "--url", url]
    options = [f"--requests={args.requests}", f"--concurrency={args.concurrency}"]
    process = await asyncio.create_subprocess_exec(*command, *options, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    times = sorted(json.loads(output.splitlines()[-1]))
    return float(times[int(0.99 * len(times))])


async def send_requests(args: Namespace) -> list[float]:
    """Send a round of requests, some at a time, and return their seconds."""
    numbers = iter(range(args.requests))
    times: list[float] = []

    async def send(client: httpx.AsyncClient) -> None:
        for number in numbers:
            prompt = f"Case {number}: {8 * SENTENCE}"
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
            started = time.perf_counter()
            response = await client.post(f"{args.url}/generate", json=body)
            times.append(time.perf_counter() - started)
            response.raise_for_status()

    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(send(client) for _ in range(args.concurrency)))
    return times


if __name__ == "__main__":
    main()
