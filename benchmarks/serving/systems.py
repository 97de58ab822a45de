"""Systems under load: our engine on the dense model and its students, a cache merged into one; Hugging Face; vLLM.

All have one shape and the same random weights, saved once and loaded on first use.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from benchmarks.common import make_random_llama
from benchmarks.engine_worker import EngineWorker
from benchmarks.serving.loads import Figures, Request, RequestTimes, compute_figures
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.model import convert

Prompts = Sequence[list[int]]
System = Callable[[Sequence[Request], Prompts], list[RequestTimes]]
"""Plays requests in real time; returns the times of each."""
CONTEXT_LENGTH = 16384
"""Max tokens of a sequence; no request is longer."""


class SystemFactory:
    """Creates engines for models of one shape, which `directory` keeps for later runs."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args = args
        shape = "-".join(
            str(getattr(args, name))
            for name in ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size")
        )
        self._directory = directory / f"llama-{shape}-l{args.num_key_value_layers}"
        self._loaded: dict[str, LoadedModel] = {}

    def make_engine(self, name: str, **options: Any) -> LLMEngine:
        """Create an engine with its own cache.

        Args:
            name: `dense`, `swiftkv_g1`, `swiftkv_g2` and so on, or `merge_all_layers`.
            options: further options of `EngineConfig`, which override the arguments'.
        """
        if name == "merge_all_layers":
            return self._make_merged_engine(**options)
        return LLMEngine(self._load_model(name), self._make_config(options))

    def make_prompts(self, requests: Sequence[Request], seed: int) -> list[list[int]]:
        return make_random_prompts(requests, self._args.vocab_size, seed)

    def _make_config(self, options: dict[str, Any]) -> EngineConfig:
        defaults = {
            "kv_cache_bytes": self._args.kv_cache_mib << 20,
            "max_num_seqs": self._args.max_num_seqs,
            "max_num_batched_tokens": self._args.max_num_batched_tokens,
        }
        return EngineConfig(
            **(defaults | options), dtype="bfloat16", enable_prefix_caching=False, max_num_waiting=1 << 20, seed=0
        )

    def _make_merged_engine(self, **options: Any) -> LLMEngine:
        """Create an engine of the dense model whose layers share one layer's cache (Merge-all-Layers: paper, section
        5.1).

        Every layer computes its K and V and overwrites the previous layer's. The text is nonsense, as in the paper, but
        the cost is that of an ideal compression. The cache is allocated L times as large, and all but its first layer
        are freed.
        """
        config = self._make_config(options)
        assert config.kv_cache_bytes is not None
        num_layers = self._args.layers
        engine = LLMEngine(
            self._load_model("dense"), config.model_copy(update={"kv_cache_bytes": config.kv_cache_bytes * num_layers})
        )
        cache = engine._runner.kv_cache
        cache.layers = cache.layers[:1] * num_layers
        return engine

    def _load_model(self, name: str) -> LoadedModel:
        if name not in self._loaded:
            self._loaded[name] = load_model(self._prepare_model(name), self._make_config({}))
        return self._loaded[name]

    def _prepare_model(self, name: str) -> Path:
        path = self._directory / name
        if not (path / "config.json").is_file():
            dense: Any = make_random_llama(self._args, CONTEXT_LENGTH)
            dense = dense.to(torch.bfloat16)
            if name != "dense":
                group_size = int(name.removeprefix("swiftkv_g"))
                dense = convert(
                    dense, num_key_value_layers=self._args.num_key_value_layers, key_value_group_size=group_size
                )
            dense.save_pretrained(path)
        return path


def play_round(
    systems: Mapping[str, System], requests: Sequence[Request], prompts: Prompts, number: int
) -> dict[str, Figures]:
    """Play a load on every system in turn. Each round, counted by `number`, starts with another system, so that all see
    the same noise of the machine."""
    names = list(systems)
    first = number % len(names)
    return {name: compute_figures(systems[name](requests, prompts)) for name in names[first:] + names[:first]}


def make_random_prompts(requests: Sequence[Request], vocab_size: int, seed: int) -> list[list[int]]:
    """Return random prompts, reproducible by the seed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [request.num_input_tokens for request in requests]
    tokens = torch.randint(3, vocab_size, (sum(lengths),), generator=generator)
    return [part.tolist() for part in tokens.split(lengths)]


def make_engine_system(engine: LLMEngine) -> System:
    """Return our engine as a system: requests are sent when due, each by its own client that reads its stream."""

    def play(requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
        return asyncio.run(_play_requests(engine, requests, prompts))

    return play


async def _play_requests(engine: LLMEngine, requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
    server = AsyncLLMEngine(engine)
    start = time.perf_counter()

    async def play_request(request: Request, prompt: list[int]) -> RequestTimes:
        await asyncio.sleep(max(start + request.arrival - time.perf_counter(), 0.0))
        params = SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
        times: list[float] = []
        async for output in await server.submit(prompt, params):
            times += [time.perf_counter() - start] * (len(output.token_ids) - len(times))
        assert len(times) == request.num_output_tokens, f"{len(times)} tokens for {request}"
        return RequestTimes(request.arrival, request.num_input_tokens, tuple(times))

    try:
        return await asyncio.gather(*map(play_request, requests, prompts))
    finally:
        await server.aclose()


class _TokenClock(StoppingCriteria):
    """Records when `generate` has chosen a token for every row; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def make_generate_system(model: Any, batch_size: int) -> System:
    """Return Hugging Face `generate` as a system for requests that arrive all at once: in order, in padded batches.
    Tokens beyond a request's length are not counted."""

    def play(requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
        start = time.perf_counter()
        times: list[RequestTimes] = []
        for first in range(0, len(requests), batch_size):
            some = list(zip(requests, prompts, strict=True))[first : first + batch_size]
            longest = max(request.num_input_tokens for request, _ in some)
            input_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for _, prompt in some])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for _, prompt in some])
            clock, num_output = _TokenClock(), max(request.num_output_tokens for request, _ in some)
            model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            assert len(clock.times) == num_output
            at = [moment - start for moment in clock.times]
            times += [
                RequestTimes(0.0, request.num_input_tokens, tuple(at[: request.num_output_tokens]))
                for request, _ in some
            ]
        return times

    return play


def make_vllm_system(worker: EngineWorker) -> System:
    """Return vLLM's own batching as a system for requests that all arrive at once."""

    def play(requests: Sequence[Request], prompts: Prompts) -> list[RequestTimes]:
        times = worker.generate(prompts, [request.num_output_tokens for request in requests])
        return [
            RequestTimes(0.0, request.num_input_tokens, tuple(one))
            for request, one in zip(requests, times, strict=True)
        ]

    return play
