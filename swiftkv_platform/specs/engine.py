"""Configuration of an engine. Frozen; loads no tensor and reads no file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ValidationInfo, field_validator

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.limits import WAITING_SEQUENCES
from swiftkv_platform.specs.base import (
    MAX_GRAMMAR_BYTES,
    MAX_STREAM_INTERVAL_S,
    BlockSize,
    CacheBytes,
    ContextLength,
    GrammarSeconds,
    PromptBytes,
    Range,
    Ranks,
    Seed,
    Sequences,
    StepTokens,
    Threads,
    Tokens,
    Wait,
    Waiting,
)

Backend = Literal["native", "vllm"]
"""Engines that a replica can run."""
NATIVE_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("float32", "int8"),
    "fuse_weights": (False,),
    "native_kernels": (False,),
    "weights": ("bfloat16", "int8", "int4"),
}
"""Option values that vLLM does not support."""


class EngineConfig(FiniteModel):
    """Settings for loading and running a model. Unknown keys are refused."""

    backend: Literal["auto", "native", "vllm"] = "auto"
    """Engine of a deployment's replicas: `native` is this project's own, `vllm` is vLLM with this project's plugin.
    `auto` uses vLLM on a GPU if it is installed and supports the model and these options, otherwise native."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory; `auto` keeps the checkpoint's."""
    weights: Literal["auto", "bfloat16", "int8", "int4"] = "auto"
    """Format of the projections' weights on a CPU. `auto` multiplies with the integers of a quantised checkpoint;
    `bfloat16` converts them back to floats. `int8` and `int4` round float weights on loading, and the heads to int8;
    `int4` keeps queries, keys and values in int8. `swiftkv export --quantize --calibration` rounds better."""
    swiftkv: bool = True
    """False serves the teacher that a student's checkpoint contains; no effect on a dense model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto` takes a GPU if there is one. A deployment's replicas see only the GPUs that they
    reserve: one for each rank with `cuda`, none with `auto`."""
    max_model_len: ContextLength | None = None
    """Most tokens of prompt and answer together, at most the model's own context; None: the model's own."""
    max_num_seqs: Sequences = 64
    """Sequences that run at the same time; more wait."""
    max_num_batched_tokens: StepTokens = 2048
    """Most tokens of one step, decodes and chunks of prompts together. May be smaller than `max_num_seqs`."""
    kv_cache_bytes: CacheBytes | None = None
    """Memory of the KV cache in bytes, on each device. None: as much as `max_num_seqs` sequences of `max_model_len`
    tokens need, at most a quarter of a host's free memory; on a GPU what the largest step leaves of 0.9 of its memory.
    """
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Dtype of K and V in the cache; `auto` is that of the weights, and the only one on a GPU. `fp8` and `int8` add one
    scale per token and head."""
    block_size: BlockSize | None = None
    """Tokens of a block, the unit of allocation and of prefix caching in the KV cache. None: 16, and 256 on a GPU,
    where attention reads blocks of a multiple of 256."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that share a prefix."""
    fuse_weights: bool = True
    """Fuse the matrix products of q, k and v and of gate and up; on a CPU in bfloat16 also prepack weights, which
    replaces the originals in memory."""
    native_kernels: bool = True
    """Run attention, norms, RoPE and SiLU on a CPU in bfloat16 by the engine's own operators, compiled on first use.
    Without a C++ compiler, or on a processor without AVX-512, PyTorch's are used, as with false."""
    max_num_waiting: Waiting = WAITING_SEQUENCES.default
    """Most sequences of one caller that may wait in `AsyncLLMEngine`, each of a request's `n` samples counting as one;
    further ones are refused at once. While others hold some, a caller may hold less by half of that."""
    max_waiting_prompt_tokens: Tokens | None = None
    """Prompt tokens of one caller that may wait for prefill in `AsyncLLMEngine`, less by half of those of others; once
    there are that many, its requests are refused. None: only `max_num_waiting` limits the queue."""
    max_queue_s: Wait | None = None
    """Longest estimated time in seconds that a request may wait in `AsyncLLMEngine`, from the rate at which places
    become free; a request that would wait longer is refused at once. None: only `max_num_waiting` limits the queue."""
    max_prompt_bytes: PromptBytes | None = None
    """Bytes of a prompt's text, or of a conversation's messages together; a longer one is refused before it is
    tokenized. None: `max_model_len` times the longest token of the vocabulary, at most 16 bytes
    (`limits.MAX_BYTES_PER_TOKEN`)."""
    stream_interval_s: Annotated[float, Range(0.0, MAX_STREAM_INTERVAL_S)] | None = None
    """Seconds for which a stream of `AsyncLLMEngine` may collect tokens before it sends them together, to save the
    engine time. The first and the last are sent at once. 0: send every token by itself. None: by load, from every token
    for a single stream up to 0.05 s."""
    seed: Seed | None = None
    """Seed from which requests without their own seed draw theirs; None: different in every process."""
    tensor_parallel_size: Ranks = 1
    """Devices, of one machine, that share the model; the engine starts a process for each beyond the first."""
    max_grammar_bytes: Annotated[int, Range(1, MAX_GRAMMAR_BYTES)] = MAX_GRAMMAR_BYTES
    """Most bytes of a schema, expression or grammar that constrains an answer; a longer one is refused."""
    grammar_timeout_s: GrammarSeconds = 5.0
    """Most seconds to compile a grammar; the engine keeps running meanwhile."""
    num_threads: Threads | None = None
    """Threads of one CPU operator; None leaves torch's setting (one thread per core, or `OMP_NUM_THREADS`)."""

    @field_validator(*NATIVE_ONLY_VALUES)
    @classmethod
    def _validate_backend(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("backend") == "vllm" and value in NATIVE_ONLY_VALUES[info.field_name or ""]:
            raise ValueError(f"{value!r} is an option of backend native only; backend is 'vllm'")
        return value

    @property
    def native_only_options(self) -> tuple[str, ...]:
        """Names of the options whose values vLLM does not support."""
        return tuple(name for name, values in NATIVE_ONLY_VALUES.items() if getattr(self, name) in values)
