"""Another engine in its own interpreter, driven over a pipe: its dependencies conflict with this project's pins.

`EngineWorker` starts `vllm_worker.py` there, or a script with the same protocol. Times are measured inside the worker,
so they exclude the pipe. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

VLLM_SCRIPT = Path(__file__).with_name("vllm_worker.py")
RESPONSE_TIMEOUT_S = 900.0
"""Time limit per response in seconds; the first one includes compiling the model."""
EXIT_TIMEOUT_S = 30.0
MAX_STDERR_LENGTH = 4000
"""Max characters of a failed worker's standard error in the message."""
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",
}
"""Environment for a single process with our number of threads and without network. The caller's variables override
it."""


class WorkerError(RuntimeError):
    """The worker exited or did not respond. The message includes the end of its standard error."""


def add_vllm_python_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", help="Python interpreter with vLLM, to include it in the comparison"
    )


def make_vllm_arguments(
    model: Path, *, kv_cache_bytes: int, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> dict[str, Any]:
    """Return vLLM's engine arguments for the settings of our engine: no prefix caching, no tokenizer; else its
    defaults."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "disable_log_stats": True,
        "seed": 0,
    }


class EngineWorker:
    """A worker process; as a context manager, it is closed after the block."""

    def __init__(
        self, python: Path, arguments: Mapping[str, Any], *, num_threads: int, script: Path = VLLM_SCRIPT
    ) -> None:
        """Start the process and wait until it has loaded the model.

        Args:
            python: an interpreter with vLLM, or with the packages of `script`.
            arguments: of vLLM's engine, or the script's first line.
            num_threads: number of OpenMP threads.
            script: another program with the protocol of `vllm_worker.py`.

        Raises:
            WorkerError: the worker does not start, exits, or exceeds the time limit.
        """
        self._response_timeout_s = RESPONSE_TIMEOUT_S
        self._directory = tempfile.TemporaryDirectory(prefix="vllm-worker-")
        self._stderr = Path(self._directory.name) / "stderr"
        ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            with self._stderr.open("wb") as stderr:
                self._process = subprocess.Popen(
                    [str(python), str(script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=VLLM_ENVIRONMENT | ours | {"OMP_NUM_THREADS": str(num_threads)},
                )
        except OSError as error:
            self._directory.cleanup()
            raise WorkerError(f"the interpreter {str(python)!r} does not run ({error})") from error
        try:
            self.settings: dict[str, Any] = self._send_command(arguments)
            """Versions and resulting settings of vLLM."""
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[list[float]]:
        """Generate greedily for all prompts at once, each up to its `max_tokens`.

        Returns:
            For each prompt, the seconds until each output token.

        Raises:
            WorkerError: the worker has exited or exceeded the time limit.
        """
        token_times: list[list[float]] = self._send_command({"prompts": prompts, "max_tokens": max_tokens})
        lengths = [len(times) for times in token_times]
        if lengths != list(max_tokens):
            raise WorkerError(f"vLLM generated {lengths} tokens instead of {list(max_tokens)}")
        return token_times

    def close(self) -> None:
        """End the process. A second call does nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(EXIT_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _send_command(self, message: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._make_error("has exited") from error
        return json.loads(self._read_line())

    def _read_line(self) -> bytes:
        """Read one response. Detects an exited worker even if its child keeps the pipe open."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + self._response_timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if selector.select(timeout=0.2):
                    part = os.read(self._process.stdout.fileno(), 1 << 20)
                    if not part:
                        raise self._make_error("has exited")
                    line += part
                elif self._process.poll() is not None:
                    raise self._make_error("has exited")
                elif time.monotonic() > deadline:
                    raise self._make_error(f"has not responded for {self._response_timeout_s:g} s")
        return line

    def _make_error(self, failure: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its pipe may close shortly before it exits
        status = self._process.poll()
        if status is None:
            self._process.kill()
        tail = self._stderr.read_text(encoding="utf-8", errors="replace").strip()[-MAX_STDERR_LENGTH:]
        ended = "was stopped" if status is None else f"exit status {status}"
        return WorkerError(
            f"the vLLM worker {failure} ({ended}); the end of its standard error:\n{tail or '(nothing)'}"
        )
