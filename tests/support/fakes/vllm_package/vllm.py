"""The part of vLLM that `benchmarks/vllm_worker.py` uses, for an interpreter without it: one token per step and
request.

Passes the tests that real vLLM passes (`tests/unit/benchmarks/test_vllm.py`). Like vLLM it prints to standard output.
"""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace as Struct
from typing import Any

__version__ = "fake"
platforms = Struct(current_platform=object())
DIES, SLEEPS = 3, 4
"""First prompt tokens at which the process kills itself, or stops answering."""


class EngineArgs:
    def __init__(self, **arguments: Any) -> None:
        self.given = Struct(**arguments)


class SamplingParams:
    def __init__(self, *, max_tokens: int, temperature: float, ignore_eos: bool, detokenize: bool) -> None:
        assert temperature == 0.0
        assert ignore_eos
        assert not detokenize
        self.max_tokens = max_tokens


class LLMEngine:
    def __init__(self, given: Any) -> None:
        print("a line on standard output")
        self._given = given
        self._lengths: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self.vllm_config = Struct(
            model_config=Struct(enforce_eager=False),
            compilation_config=Struct(mode=Struct(name="NONE")),
            cache_config=Struct(block_size=128, num_gpu_blocks=1),
            scheduler_config=Struct(
                max_num_batched_tokens=given.max_num_batched_tokens, max_num_seqs=given.max_num_seqs
            ),
        )

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLMEngine:
        return cls(arguments.given)

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        tokens = prompt["prompt_token_ids"]
        if len(tokens) + params.max_tokens > self._given.max_model_len:
            raise ValueError(f"{len(tokens)} prompt tokens are beyond the maximum context length")
        if tokens[0] == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if tokens[0] == SLEEPS:
            time.sleep(600)
        self._lengths[request_id] = params.max_tokens
        self._tokens[request_id] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self._tokens)

    def step(self) -> list[Any]:
        os.write(1, b"another, past Python\n")
        for tokens in self._tokens.values():
            tokens.append(0)
        outputs = [
            Struct(request_id=request_id, outputs=[Struct(token_ids=list(tokens))])
            for request_id, tokens in self._tokens.items()
        ]
        self._tokens = {name: some for name, some in self._tokens.items() if len(some) < self._lengths[name]}
        return outputs
