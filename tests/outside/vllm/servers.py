"""Two vLLM OpenAI servers connected by NIXL: one holds half of the model and reads prompts, the other decodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
"""A shape with upper layers of 200 MB, enough to show in a process's memory."""
LAYERS = {"num_key_value_layers": 4}
UPPER_BYTES = 12 * 4 * (4 * 512**2 + 3 * 512 * 2048) * 0.75
"""Bytes of the upper layers in float32. 0.75: without key and value projections; noise."""
FILL = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
"""Fields that vLLM's proxies send to a prefill server."""


class Server:
    """A server in separate processes, on a free port."""

    def __init__(self, student: Path, log: Path, role: str, buffer: str, *options: str) -> None:
        """`buffer`: the device through which caches move; `options`: of the command line."""
        transfer = json.dumps({"kv_connector": "NixlConnector", "kv_buffer_device": buffer, "kv_role": role})
        self._student, self._log, self._options = student, log, ["--kv-transfer-config", transfer, *options]
        self.port, side_port = free_port(), free_port()
        self._environment = os.environ | {
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._student)]
        options = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8 --no-enable-prefix-caching"
        names = ["--served-model-name", "student", "--port", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *options.split(), *names, *self._options],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while True:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def kill(self) -> None:
        """Kill all of its processes at once, as when a node is lost."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def memory(self) -> int:
        """Return the bytes that only its processes hold, without shared files."""
        root = psutil.Process(self._process.pid)
        return sum(process.memory_full_info().uss for process in (root, *root.children(recursive=True)))

    def complete(self, token_ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Return the response to a greedy request. httpx.HTTPError: the server is down, or refuses."""
        body = {
            "model": "student", "prompt": list(token_ids), "temperature": 0.0, "max_tokens": 12, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        response = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body | fields, timeout=300)
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def pair(student: Path, directory: Path, *options: str, buffer: str = "cpu") -> Iterator[tuple[Server, Server]]:
    """Yield a prefill server with half of the model, and a decode server with all of it."""
    half = ("--hf-overrides", '{"swiftkv_prefill_only": true}')
    servers = (
        Server(student, directory / "prefill.log", "kv_producer", buffer, *half, *options),
        Server(student, directory / "decode.log", "kv_consumer", buffer, *options),
    )
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.start, servers))
        yield servers
    finally:
        for server in servers:
            server.kill()


def complete(servers: tuple[Server, Server], token_ids: Sequence[int]) -> tuple[list[int], bool]:
    """Return the answer, and whether the prefill server read its prompt. As a proxy does, send the whole request to the
    decode server if the prefill server or the cache that it wrote is gone."""
    prefill, decode = servers
    try:
        filled = prefill.complete(token_ids, max_tokens=1, kv_transfer_params=FILL)
        answer = decode.complete(token_ids, kv_transfer_params=filled["kv_transfer_params"])
    except httpx.HTTPError:
        return decode.complete(token_ids)["choices"][0]["token_ids"], False
    return answer["choices"][0]["token_ids"], True


def connect(servers: tuple[Server, Server], token_ids: Sequence[int]) -> None:
    """Send a request until the servers have connected: vLLM gives up after five seconds, which a slow machine needs."""
    while not complete(servers, token_ids)[1]:
        pass
