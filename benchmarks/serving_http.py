"""Cost of HTTP, and effect of overload: one engine in this process and the same one behind Ray Serve.

    python -m benchmarks.serving_http [--output serving.json] [--rounds 5 --streams 8 ...]

`cost`: the same prompts at the same time, answered by `LLMEngine.generate` and by `/generate`: streamed by the
deployment's default, streamed with one event per token, and whole. They take turns; figures are medians over rounds.
`latency`: the median time between events of a single stream, against the engine's own time per token. `overload`:
requests arrive at even intervals regardless of earlier ones, at a fraction and at a multiple of the rate that the
deployment sustains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.common import add_shape, benchmark_parser, conditions, random_llama, random_student, write_report
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.local.ray_head import free_ports

WAYS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "an_event_a_token": {"stream_interval_s": 0.0},
    "whole": {"stream": False},
}
"""Ways to request an answer, as fields of the request."""


@dataclass(frozen=True)
class Answer:
    """Outcome of one request, in seconds since it was sent."""

    status: int
    first: float
    """Seconds until the first event, or until the refusal."""
    total: float
    retry_after: str | None = None
    gaps: tuple[float, ...] = ()
    """Seconds between consecutive events with tokens."""


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        dense: Any = random_llama(args, args.context_length + args.output_length)
        random_student(dense.to(torch.bfloat16), args).save_pretrained(directory)
        config = {
            "max_num_seqs": args.streams,
            "max_num_waiting": args.max_num_waiting,
            "max_queue_s": args.max_queue_s,
            "enable_prefix_caching": False,
            "num_threads": args.threads,
            "kv_cache_bytes": 64 << 20,
        }
        engine = LLMEngine.from_pretrained(directory, EngineConfig(**config))
        with closing(_Deployment(Path(directory), config)) as deployment:
            report = asyncio.run(measure(args, engine, deployment.url))
    print(json.dumps(report, indent=1))
    write_report(report, args.output)


def parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of `cost`")
    parser.add_argument("--streams", type=int, default=8, help="concurrent requests, and the engine's max_num_seqs")
    parser.add_argument("--max-num-waiting", type=int, default=64, help="the engine's max_num_waiting in both parts")
    parser.add_argument("--max-queue-s", type=float, help="the engine's max_queue_s in both parts; default: no limit")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine's operators")
    parser.add_argument("--context-length", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output-length", type=int, default=64, help="tokens a request generates")
    parser.add_argument(
        "--load-seconds", type=float, default=30.0, help="seconds of each load of `overload`; 0: leave it out"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 2.0], help="multiples of the sustained rate")
    add_shape(parser)
    return parser.parse_args()


class _Deployment:
    """A Ray instance of this process that serves the model."""

    def __init__(self, model: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # Same niceness as in our images, in `swiftkv up`, and in this process, where the engine runs alone.
        os.environ.setdefault("RAY_worker_niceness", "0")
        import ray
        from ray import serve as ray_serve

        from swiftkv_platform.serve.app import build_app

        [port] = free_ports([0])
        self.url = f"http://127.0.0.1:{port}"
        self._ray, self._serve = ray, ray_serve
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
        ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
        arguments = {"id": "dep_bench", "model": "mdl_bench", "artifact_uri": str(model), "verify": False}
        ray_serve.run(build_app({**arguments, "engine": config}), name="bench", route_prefix="/")

    def close(self) -> None:
        self._serve.shutdown()
        self._ray.shutdown()


async def measure(args: argparse.Namespace, engine: LLMEngine, url: str) -> dict[str, Any]:
    report = conditions(args)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False) as client:
        report["cost"] = cost = await compare(args, engine, client)
        print(json.dumps(cost), flush=True)
        report["latency"] = latency = await between_tokens(args, engine, client)
        print(json.dumps(latency), flush=True)
        if args.load_seconds:
            rate = args.streams / cost["streamed"]["duration"]
            report["overload"] = {
                f"{load:g}x": await under_load(args, client, load * rate, args.load_seconds) for load in args.loads
            }
    return report


async def compare(
    args: argparse.Namespace, engine: LLMEngine, client: httpx.AsyncClient
) -> dict[str, dict[str, float]]:
    """Return medians over rounds; the first round warms up. `http_cost`: time beyond the engine's own, as a share of
    it."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=args.output_length, temperature=0.0, ignore_eos=True)
    durations: dict[str, list[float]] = {"engine": [], **{system: [] for system in WAYS}}
    for round_ in range(args.rounds + 1):
        prompts = _prompts(args, args.streams, generator)
        for system in list(durations)[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            if system == "engine":
                await asyncio.to_thread(engine.generate, prompts, params, progress=False)
            else:
                answers = await asyncio.gather(
                    *(ask(client, prompt, args.output_length, **WAYS[system]) for prompt in prompts)
                )
                assert {answer.status for answer in answers} == {200}
            if round_:
                durations[system].append(time.perf_counter() - start)
    tokens = args.streams * (args.context_length + args.output_length)
    report = {}
    for system, measured in durations.items():
        median = statistics.median(measured)
        cost = statistics.median(one / own for one, own in zip(measured, durations["engine"], strict=True)) - 1
        report[system] = {"duration": median, "total_token_throughput": tokens / median, "http_cost": cost}
    return report


async def between_tokens(args: argparse.Namespace, engine: LLMEngine, client: httpx.AsyncClient) -> dict[str, float]:
    """Measure milliseconds between tokens of one stream and of the engine alone, alternately; the first round warms
    up."""
    generator = torch.Generator().manual_seed(2)
    gaps: list[float] = []
    tokens: list[float] = []
    ratios: list[float] = []
    for round_ in range(args.rounds + 1):
        [prompt] = _prompts(args, 1, generator)
        own = await asyncio.to_thread(token_times, engine, prompt, args.output_length)
        answer = await ask(client, prompt, args.output_length)
        assert answer.status == httpx.codes.OK
        if round_:
            gaps += answer.gaps
            tokens += own
            ratios.append(statistics.median(answer.gaps) / statistics.median(own))
    return {
        "inter_token_ms": 1e3 * statistics.median(gaps),
        "engine_token_ms": 1e3 * statistics.median(tokens),
        "inter_token_ratio": statistics.median(ratios),
        "tokens_per_event": len(tokens) / len(gaps),
    }


def token_times(engine: LLMEngine, prompt: Sequence[int], num_output: int) -> list[float]:
    """Return the seconds between tokens of the engine alone."""
    engine.add_request(prompt, SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True))
    moments = []
    while engine.has_unfinished_requests:
        if engine.step():
            moments.append(time.perf_counter())
    return [after - before for before, after in pairwise(moments)]


async def under_load(args: argparse.Namespace, client: httpx.AsyncClient, rate: float, seconds: float) -> Any:
    """Send `rate` requests per second for `seconds`, and account for all of them."""
    generator = torch.Generator().manual_seed(1)
    num_requests = max(int(rate * seconds), 1)
    prompts = _prompts(args, num_requests, generator)
    begin = asyncio.get_running_loop().time()

    async def one(number: int) -> Answer:
        await asyncio.sleep(max(begin + number / rate - asyncio.get_running_loop().time(), 0.0))
        return await ask(client, prompts[number], args.output_length)

    answers = await asyncio.gather(*map(one, range(num_requests)))
    accepted = [answer for answer in answers if answer.status == httpx.codes.OK]
    refused = [answer for answer in answers if answer.status == httpx.codes.TOO_MANY_REQUESTS]
    return {
        "rate": rate,
        "statuses": dict(Counter(answer.status for answer in answers)),
        "refused_without_retry_after": sum(answer.retry_after is None for answer in refused),
        "ttft_ms": quantiles([answer.first for answer in accepted]),
        "total_ms": quantiles([answer.total for answer in accepted]),
        "refusal_ms": quantiles([answer.first for answer in refused]),
    }


async def ask(
    client: httpx.AsyncClient, prompt: Sequence[int], num_output: int, *, stream: bool = True, **options: Any
) -> Answer:
    """Send a request and read its answer to the end."""
    body = {"prompt": prompt, "max_tokens": num_output, "temperature": 0.0, "ignore_eos": True, "stream": stream}
    body |= options
    start = time.perf_counter()
    moments: list[float] = []
    async with client.stream("POST", "/generate", json=body) as response:
        async for part in response.aiter_raw():
            moments += [time.perf_counter()] * max(part.count(b'"token_ids"'), not moments)
    total = time.perf_counter() - start
    gaps = tuple(after - before for before, after in pairwise(moments))
    first = moments[0] - start if moments else total
    return Answer(response.status_code, first, total, response.headers.get("retry-after"), gaps)


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return quantiles in milliseconds; None for an empty sequence."""
    if not seconds:
        return None
    values = torch.tensor(seconds, dtype=torch.float64) * 1e3
    return {f"p{share}": round(values.quantile(share / 100).item(), 1) for share in (50, 90, 99)}


def _prompts(args: argparse.Namespace, count: int, generator: torch.Generator) -> list[list[int]]:
    shape = (count, args.context_length)
    prompts: list[list[int]] = torch.randint(3, args.vocab_size, shape, generator=generator).tolist()
    return prompts


if __name__ == "__main__":
    main()
