"""Steps of our engine in which FlashAttention 2 would divide the keys of a run, over small random models.

A large model's heads and runs fill a GPU, so its keys are not split, and its answers do not show whether parts are
combined correctly (pytorch/pytorch#194167). Here two prompts of several blocks of keys are prefilled in one step and
decoded; then short prompts arrive and are prefilled in a step together with the decodes; finally all four decode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.agreement import Answer, answers_of, greedy, judge
from benchmarks.gpu.models import SMALL, prepare, release_memory
from benchmarks.serving.loads import Request
from benchmarks.serving.systems import random_prompts
from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput

WAVES = (700, 300), (40, 5)
"""Tokens of the prompts that arrive together."""
STEPS_BETWEEN = 4
NUM_TOKENS = 32


def agreements(directory: Path, dtype: torch.dtype, device: str) -> dict[str, dict[str, Any]]:
    """Compare each model of `SMALL` and its students with PyTorch; results by name. Models are saved in `directory`."""
    found = {}
    for shape in SMALL:
        for model in prepare(shape, directory / shape, dtype=dtype, device=device, group_sizes=[1]):
            answers = _answers(model.directory, dtype, device)
            release_memory()
            found[f"{shape}, {model.name}"] = judge(model.directory, answers, dtype, device)
    return found


def _answers(model: Path, dtype: torch.dtype, device: str) -> list[Answer]:
    config = EngineConfig(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_num_batched_tokens=2048,
        kv_cache_bytes=64 << 20,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_pretrained(model, config)
    try:
        return _answers_in_waves(engine)
    finally:
        engine.close()


def _answers_in_waves(engine: LLMEngine) -> list[Answer]:
    vocab_size, finished = engine.model_config.vocab_size, list[RequestOutput]()
    for seed, lengths in enumerate(WAVES):
        for prompt in random_prompts([Request(0.0, length, 1) for length in lengths], vocab_size, seed):
            engine.add_request(prompt, greedy(NUM_TOKENS))
        for _ in range(STEPS_BETWEEN):
            engine.step()
    while engine.has_unfinished_requests:
        finished += [output for output in engine.step() if output.finished]
    return answers_of(finished)
