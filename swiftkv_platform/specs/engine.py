"""Engine options. Frozen; no I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ValidationInfo, field_validator

from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.limits import WAITING_SEQUENCES
from swiftkv_platform.specs.base import (
    MAX_GRAMMAR_BYTES,
    MAX_STREAM_INTERVAL_S,
    BlockSize,
    CacheBytes,
    ContextLength,
    GrammarSeconds,
    NumRanks,
    NumSequences,
    NumStepTokens,
    NumThreads,
    NumTokens,
    NumWaiting,
    PromptBytes,
    Range,
    Seed,
    WaitSeconds,
)

Backend = Literal["native", "vllm"]
"""Engines of replicas."""
NATIVE_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("float32", "int8"),
    "fuse_weights": (False,),
    "native_kernels": (False,),
    "weights": ("bfloat16", "int8", "int4"),
}
"""Option values that vLLM does not support, by option."""


class EngineConfig(FiniteBaseModel):
    """Options for loading and running a model. Unknown options are refused."""

    backend: Literal["auto", "native", "vllm"] = "auto"
    """Engine of a deployment's replicas: `native` (this project's engine) or `vllm` (vLLM with this project's plugin).
    `auto`: vLLM on a GPU if it is installed and supports the model and these options, otherwise native."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights in memory; `auto`: that of the checkpoint, or float32 on a CPU that has neither kernels nor
    instructions for it."""
    weights: Literal["auto", "bfloat16", "int8", "int4"] = "auto"
    """Format of linear weights on a CPU. `auto`: integer matrix products for a quantized checkpoint; `bfloat16`:
    dequantize it. `int8` and `int4` quantize float weights on loading (output heads, and with `int4` also q, k and v,
    to int8), and save time only with the native kernels. `swiftkv export --quantize --calibration` preserves more
    quality."""
    swiftkv: bool = True
    """False: serve the teacher that a student's checkpoint contains. No effect on a dense model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; `auto`: a GPU if available. Replicas of a deployment see only the GPUs that they reserve:
    one per rank with `cuda`, none with `auto`."""
    max_model_len: ContextLength | None = None
    """Max tokens of prompt and answer together, at most the model's context; null: the model's context."""
    max_num_seqs: NumSequences = 64
    """Max concurrent sequences; further ones wait."""
    max_num_batched_tokens: NumStepTokens = 2048
    """Max tokens per step, decodes and chunks of prompts together. May be smaller than `max_num_seqs`."""
    kv_cache_bytes: CacheBytes | None = None
    """Bytes of the KV cache per device. Null: enough for `max_num_seqs` sequences of `max_model_len` tokens, at most a
    quarter of a host's free memory; on a GPU, 0.9 of its memory minus weights and activations of the largest step."""
    max_adapter_bytes: CacheBytes | None = None
    """Max bytes of resident adapters, as in their files, which the KV cache leaves free; the least recently used idle
    adapter is unloaded for another one. Null: all adapters stay resident."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8", "int8"] = "auto"
    """Dtype of the KV cache; `auto`: that of the weights, the only one on a GPU. `fp8` and `int8` add one scale per
    token and head."""
    block_size: BlockSize | None = None
    """Tokens per KV cache block, the unit of allocation and prefix caching. Null: 16, or 256 on a GPU, where it must be
    a multiple of 256."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of prompts with a common prefix."""
    fuse_weights: bool = True
    """Fuse the projections q, k, v and gate, up into one matrix product each; for the native kernels, also prepack the
    weights in place."""
    native_kernels: bool = True
    """On a CPU in bfloat16, use this project's kernels for matrix products, attention, norms, RoPE and SiLU, compiled
    on first use. False, without a C++ compiler or without AVX2: use PyTorch's."""
    max_num_waiting: NumWaiting = WAITING_SEQUENCES.default
    """Max waiting sequences per caller, minus half of the waiting sequences of all other callers; further requests are
    refused. Each of a request's `n` samples is a sequence."""
    max_waiting_prompt_tokens: NumTokens | None = None
    """Max waiting prompt tokens per caller, less half of all other callers' waiting ones; further requests are refused.
    Null: only `max_num_waiting` limits the queue."""
    max_queue_s: WaitSeconds | None = None
    """Max estimated queue time in seconds; a request that would wait longer is refused. Null: only `max_num_waiting`
    limits the queue."""
    max_prompt_bytes: PromptBytes | None = None
    """Max bytes of a prompt, or of all messages of a conversation; longer ones are refused before tokenization. Null:
    `max_model_len` times the bytes of the longest token, at most 16 (`MAX_BYTES_PER_TOKEN`)."""
    stream_interval_s: Annotated[float, Range(0.0, MAX_STREAM_INTERVAL_S)] | None = None
    """Seconds for which a stream may collect tokens and send them together, to save CPU time. The first and the last
    token are sent at once. 0: send each token. Null: by load, from 0 for a single stream up to 0.05 s."""
    seed: Seed | None = None
    """Seed for requests without a seed; null: random."""
    tensor_parallel_size: NumRanks = 1
    """Number of tensor-parallel devices, on one machine; the engine starts a process for each beyond the first."""
    max_grammar_bytes: Annotated[int, Range(1, MAX_GRAMMAR_BYTES)] = MAX_GRAMMAR_BYTES
    """Max bytes of a JSON schema, regular expression or grammar of structured outputs."""
    grammar_timeout_s: GrammarSeconds = 5.0
    """Max seconds to compile a grammar; other requests continue meanwhile."""
    num_threads: NumThreads | None = None
    """Threads per CPU operator; null: PyTorch's default (one per core, or `OMP_NUM_THREADS`)."""

    @field_validator(*NATIVE_ONLY_VALUES)
    @classmethod
    def _validate_backend(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("backend") == "vllm" and value in NATIVE_ONLY_VALUES[info.field_name or ""]:
            raise ValueError(f"{value!r} needs backend native; backend is 'vllm'")
        return value

    @property
    def native_only_options(self) -> tuple[str, ...]:
        """Names of the options whose values vLLM does not support."""
        return tuple(name for name, values in NATIVE_ONLY_VALUES.items() if getattr(self, name) in values)
