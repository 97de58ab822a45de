"""Configuration of an engine and of a request. Frozen; knows no tensor and reads no file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ValidationInfo, field_validator

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.base import MAX_GRAMMAR_BYTES, MAX_STREAM_INTERVAL_S
from swiftkv_platform.specs.limits import (
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
NATIVE_ONLY: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("float32", "int8"),
    "fuse_weights": (False,),
    "native_kernels": (False,),
    "weights": ("bfloat16", "int8", "int4"),
}
"""Values of options that vLLM has not."""


class EngineConfig(FiniteModel):
    """Settings for loading and running a model. Unknown keys are refused."""

    backend: Literal["auto", "native", "vllm"] = "auto"
    """Engine of a deployment's replicas: `native` is this project's own, `vllm` is vLLM with this project's plugin.
    `auto` is vLLM on a GPU, where it is installed and has all that the model and these options offer, else native."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory; `auto` keeps the checkpoint's."""
    weights: Literal["auto", "bfloat16", "int8", "int4"] = "auto"
    """Form of the layers' projections on a CPU. `auto` multiplies in the integers of a quantised checkpoint, and
    `bfloat16` turns them back into floats. `int8` and `int4` round what is stored in floats when the model is loaded,
    and the heads to int8; `int4` leaves queries, keys and values in int8. `swiftkv export --quantize --calibration`
    rounds better."""
    swiftkv: bool = True
    """False serves the teacher that a student's checkpoint carries; a dense model is one anyway."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on; `auto` takes the GPU where there is one. A deployment's replicas see the GPUs that
    they reserve alone: one for each rank with `cuda`, none with `auto`."""
    max_model_len: ContextLength | None = None
    """Tokens of prompt and answer together; None is the model's own context, which it may not exceed."""
    max_num_seqs: Sequences = 64
    """Sequences that run at the same time; more wait."""
    max_num_batched_tokens: StepTokens = 2048
    """Tokens of one step, decodes and chunks of prompts together. May be smaller than `max_num_seqs`."""
    kv_cache_bytes: CacheBytes | None = None
    """Memory of the KV cache in bytes, on each device; None takes what `max_num_seqs` sequences of `max_model_len`
    tokens need, at most a quarter of a host's free memory, or what a GPU has left beside the largest step, 0.9 of its
    memory being used."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Type of K and V in the cache; `auto` is that of the weights, and the only one on a GPU. `fp8` and `int8` add one
    scale a token and head."""
    block_size: BlockSize | None = None
    """Tokens of a block, the unit in which the KV cache is given out and prefixes are found again. None: 16, and 256 on
    a GPU, where attention reads blocks of a multiple of 256."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    fuse_weights: bool = True
    """One matrix product for q, k and v and one for gate and up; on a CPU in bfloat16 also prepacked weights, which
    replace the originals in memory."""
    native_kernels: bool = True
    """Run attention, norms, RoPE and SiLU on a CPU in bfloat16 by the engine's own operators, compiled on first use.
    Without a C++ compiler, or on a processor without AVX-512, PyTorch's are used, as with false."""
    max_num_waiting: Waiting = 64
    """Sequences, each of a request's `n` samples being one, that may wait for their turn in `AsyncLLMEngine`; one more
    is refused at once."""
    max_waiting_prompt_tokens: Tokens | None = None
    """Prompt tokens that may wait to be read in `AsyncLLMEngine`; while there are as many, requests are refused at
    once. None: no limit but `max_num_waiting`."""
    max_queue_s: Wait | None = None
    """Seconds that a request may have to wait for its turn in `AsyncLLMEngine`, judged by how often a place becomes
    free; one that would wait longer is refused at once. None: no limit but `max_num_waiting`."""
    max_prompt_bytes: PromptBytes | None = None
    """Bytes of a prompt's text, or of a conversation's messages together; a longer one is refused before it is
    tokenized. None: `max_model_len` times the longest token of the vocabulary, at most 16 bytes
    (`limits.MAX_BYTES_PER_TOKEN`)."""
    stream_interval_s: Annotated[float, Range(0.0, MAX_STREAM_INTERVAL_S)] | None = None
    """Seconds for which a stream of `AsyncLLMEngine` may collect tokens and hand them over together, the first and the
    last apart, which come at once; each handing over takes time from the engine. 0: every token by itself. None: by
    load, from every token by itself for a stream that runs alone to 0.05 s."""
    seed: Seed | None = None
    """Seed that requests without one of their own draw theirs from; None draws differently in every process."""
    tensor_parallel_size: Ranks = 1
    """Devices, of one machine, that share the model; the engine starts a process for each beyond the first."""
    max_grammar_bytes: Annotated[int, Range(1, MAX_GRAMMAR_BYTES)] = MAX_GRAMMAR_BYTES
    """Bytes of a schema, expression or grammar that constrains an answer; a longer one is refused."""
    grammar_timeout_s: GrammarSeconds = 5.0
    """Seconds that compiling one may take; the engine steps on meanwhile."""
    num_threads: Threads | None = None
    """Threads of one CPU operator; None leaves torch's setting (one thread per core, or `OMP_NUM_THREADS`)."""

    @field_validator(*NATIVE_ONLY)
    @classmethod
    def _vllm_has_it(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("backend") == "vllm" and value in NATIVE_ONLY[info.field_name or ""]:
            raise ValueError(f"{value!r} is an option of backend native alone; backend is 'vllm'")
        return value

    @property
    def native_only(self) -> tuple[str, ...]:
        """Names of the options whose values vLLM has not."""
        return tuple(name for name, values in NATIVE_ONLY.items() if getattr(self, name) in values)
