"""Effect of hostile requests on others: the longest gap of a stream, the 99th percentile of `/health`, memory.

    python -m benchmarks.hostile_requests [--output hostile.json] [--seconds 15 --body-mib 16]

A server process of its own serves a random model with a byte-level tokenizer. One caller streams an answer after
another, a second asks for `/health` every 20 ms, and beside them one kind of hostile body after the other is sent
without a pause, `--attackers` at a time. It uses nothing that an older version of the code lacks: with the root of an
older checkout as `PYTHONPATH`, `python <this file>` measures that one.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

HEALTH_EVERY_S = 0.02
NUM_TOKENS = 200
"""Tokens of each streamed answer."""


def main() -> None:
    args = parse_arguments()
    if args.serve is not None:
        serve(args.serve, args.port)
        return
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), args)
        report = asyncio.run(measure(Path(directory), args))
    print(json.dumps(report, indent=1))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each kind of body")
    parser.add_argument("--body-mib", type=int, default=16, help="of a hostile body; at most what a server accepts")
    parser.add_argument("--attackers", type=int, default=1, help="hostile requests at a time")
    parser.add_argument("--context-length", type=int, default=4096, help="of the model")
    parser.add_argument("--kinds", nargs="+", help="of bodies; default: all")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Path and body of each kind, of about `size` bytes, a little less than the limit that has always been there."""
    size -= 4096

    def repeated(head: bytes, part: bytes, tail: bytes) -> bytes:
        return head + part * ((size - len(head) - len(tail)) // len(part)) + tail

    return {
        "none": ("", b""),
        "prompt": ("/generate", repeated(b'{"prompt": "', b"ab cd ", b'"}')),
        "token_ids": ("/generate", repeated(b'{"prompt": [1', b",1", b"]}")),
        "stops": ("/generate", repeated(b'{"prompt": [1], "stop": ["a"', b',"abcdefghijklm"', b"]}")),
        "tokenize": ("/tokenize", repeated(b'{"prompt": "', b"ab cd ", b'"}')),
        "detokenize": ("/detokenize", repeated(b'{"tokens": [1', b",1", b"]}")),
    }


def save_model(directory: Path, args: argparse.Namespace) -> None:
    """A random Llama and its tokenizer: a token a byte, and the merges of a short text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.context_length,
    )
    LlamaForCausalLM(config).eval().save_pretrained(directory)


def serve(directory: Path, port: int) -> None:
    """In the server's process."""
    import uvicorn

    from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
    from swiftkv_platform.serve.current import Current, ModelCard, Version
    from swiftkv_platform.serve.http import create_http_app

    config = EngineConfig(max_num_seqs=8, num_threads=1, kv_cache_bytes=64 << 20, stream_interval_s=0.0)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(directory, config))
    card = ModelCard(
        deployment="dep_bench",
        model="mdl_bench",
        manifest_digest=None,
        swiftkv=None,
        max_model_len=engine.engine.max_model_len,
    )
    app = create_http_app(Current(Version(engine, card, created=1)))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


async def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each kind of body against a server of its own, so that none inherits another's memory."""
    report: dict[str, Any] = {"arguments": {key: value for key, value in vars(args).items() if key != "output"}}
    for kind, (path, body) in bodies(args.body_mib << 20).items():
        if args.kinds and kind not in args.kinds:
            continue
        with closing(Server(directory)) as server:
            report[kind] = found = await under_attack(server, path, body, args)
        print(json.dumps({kind: found}), flush=True)
    return report


class Server:
    """A process that serves the model."""

    def __init__(self, directory: Path) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--serve", str(directory), "--port", str(self.port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=environment)
        self.url = f"http://127.0.0.1:{self.port}"

    async def ready(self, client: httpx.AsyncClient) -> None:
        """Return when it answers."""
        while self._process.poll() is None:
            with suppress(httpx.TransportError):
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the server ended with {self._process.returncode}")

    def anonymous_bytes(self) -> int:
        """`RssAnon` of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def send(self, path: str, body: bytes) -> str:
        """The status of the answer, or what came instead. Blocks, without holding up this process."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600.0)
        with closing(connection):
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                return str(connection.getresponse().status)
            except OSError as error:  # refused while the body is still being sent
                return type(error).__name__

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


async def under_attack(server: Server, path: str, body: bytes, args: argparse.Namespace) -> dict[str, Any]:
    """Effect that the others notice. Times in milliseconds, memory in MiB beyond what the server had before."""
    gaps: list[float] = []
    health: list[float] = []
    memory: list[int] = []
    statuses: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits, trust_env=False) as client:
        await server.ready(client)
        await stream_once(client, [])
        before = server.anonymous_bytes()
        end = time.perf_counter() + args.seconds

        async def repeat(action: Callable[[], Awaitable[None]], pause: float = 0.0) -> None:
            while time.perf_counter() < end:
                await action()
                await asyncio.sleep(pause)

        async def ask_health() -> None:
            start = time.perf_counter()
            await client.get("/health")
            health.append(time.perf_counter() - start)

        async def attack() -> None:
            statuses[await asyncio.to_thread(server.send, path, body)] += 1

        async def watch_memory() -> None:
            memory.append(server.anonymous_bytes())

        attackers = [repeat(attack) for _ in range(args.attackers)] if path else []
        await asyncio.gather(
            repeat(lambda: stream_once(client, gaps)),
            repeat(ask_health, HEALTH_EVERY_S),
            repeat(watch_memory, 0.05),
            *attackers,
        )
    return {
        "longest_gap_ms": round(max(gaps) * 1e3, 1),
        "health_p99_ms": round(quantile(health, 0.99) * 1e3, 1),
        "health_max_ms": round(max(health) * 1e3, 1),
        "rss_anon_growth_mib": round((max(memory) - before) / (1 << 20), 1),
        "hostile_statuses": dict(statuses),
    }


async def stream_once(client: httpx.AsyncClient, gaps: list[float]) -> None:
    """One answer; the time until the first of its events, and between each and the next."""
    body = {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True}
    at = time.perf_counter()
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            now = time.perf_counter()
            gaps.append(now - at)
            at = now


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(math.ceil(share * len(values)), len(values)) - 1]


if __name__ == "__main__":
    main()
