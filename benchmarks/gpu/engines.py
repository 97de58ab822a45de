"""Models under test, as directories that share the dense model's weight files, and engines that run one on a device:
our own in this process, vLLM with the plugin in another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine_worker import EngineWorker, engine_arguments
from benchmarks.gpu.agreement import Answer, engine_answers
from benchmarks.serving.systems import System, engine_system, vllm_system
from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.model import convert_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    },
}
"""Shapes of random Llamas: Llama 3.1 8B's, and one for tests."""
_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
SMALL: dict[str, dict[str, Any]] = {
    "multi_head": _SMALL,
    "grouped": _SMALL | {"num_key_value_heads": 2},
    "windows": _SMALL | {"num_key_value_heads": 2, "model_type": "mistral", "sliding_window": 300},
}
"""Shapes of random models that leave most of a GPU idle, so that attention splits keys (`benchmarks.gpu.steps`)."""


@dataclass(frozen=True)
class Model:
    """A model under test."""

    name: str
    """Name: `dense`, or `swiftkv_gG` for a student with groups of G layers, plus `_own` if deep tokens keep their own K
    and V."""
    directory: Path


def prepare(
    model: Path | str, directory: Path, *, dtype: torch.dtype, device: str, group_sizes: list[int]
) -> list[Model]:
    """Make the dense model and its students, half of whose layers compute no KV of their own.

    The students are converted, not distilled: a step costs the same whatever the weights are.

    Args:
        model: a dense model's directory, or one of `SHAPES` and `SMALL`, which is made with random weights.
        device: device on which random weights are drawn.

    Raises:
        ModelError: the model's family is unknown.
    """
    dense = Path(model)
    shapes = SHAPES | SMALL
    if isinstance(model, str) and model in shapes:
        dense = directory / "dense"
        _save_random(shapes[model], dense, dtype, device)
    num_layers = AutoConfig.from_pretrained(dense).num_hidden_layers
    models = [Model("dense", dense)]
    for group_size, form in [(group_sizes[0], "own"), *((g, "shared") for g in group_sizes)]:
        name = f"swiftkv_g{group_size}{'_own' * (form == 'own')}"
        student = Model(name, directory / name)
        convert_checkpoint(
            dense,
            student.directory,
            num_key_value_layers=num_layers // 2,
            key_value_group_size=group_size,
            decode_key_value=form,
        )
        models.append(student)
    return models


def _save_random(shape: dict[str, Any], directory: Path, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama"} | shape))
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(directory)


@dataclass(frozen=True)
class Limits:
    """Limits for both engines."""

    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    """Whether vLLM skips compiling, which takes most of the time of a short run."""


@dataclass(frozen=True)
class Running:
    """An engine that has loaded its model."""

    play: System
    answers: Callable[[Sequence[list[int]], int], list[Answer]]
    """Greedy answers to prompts, each of a given number of tokens."""
    num_blocks: int
    block_size: int


Start = Callable[[Path, Limits], AbstractContextManager[Running]]


@contextmanager
def own_engine(model: Path, limits: Limits) -> Iterator[Running]:
    """This project's engine."""
    release_memory()
    config = EngineConfig(
        device=limits.device,
        dtype=limits.dtype,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_waiting=1 << 20,
        kv_cache_bytes=limits.kv_cache_bytes,
        kv_cache_dtype=limits.kv_cache_dtype,
        enable_prefix_caching=False,
        seed=0,
    )
    engine = LLMEngine(load_model(model, config), config)
    try:
        yield Running(
            play=engine_system(engine),
            answers=lambda prompts, num_tokens: engine_answers(engine, prompts, num_tokens),
            num_blocks=engine.num_blocks,
            block_size=engine.block_size,
        )
    finally:
        engine.close()


def release_memory() -> None:
    """Free device memory that no model in this process uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def vllm_engine(python: Path) -> Start:
    """Return a starter for vLLM in another interpreter, with this project's plugin installed there."""

    @contextmanager
    def started(model: Path, limits: Limits) -> Iterator[Running]:
        release_memory()  # vLLM's process uses the same device
        arguments = engine_arguments(
            model,
            kv_cache_bytes=limits.kv_cache_bytes,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            dtype=limits.dtype,
        )
        arguments |= {"kv_cache_dtype": limits.kv_cache_dtype, "enforce_eager": limits.enforce_eager}
        with EngineWorker(python, arguments, num_threads=torch.get_num_threads()) as worker:

            def answers(prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
                found = worker.logprobs(prompts, [num_tokens] * len(prompts))
                return [Answer(prompt, *answer) for prompt, answer in zip(prompts, found, strict=True)]

            yield Running(
                play=vllm_system(worker),
                answers=answers,
                num_blocks=worker.made["num_blocks"],
                block_size=worker.made["block_size"],
            )

    return started
