"""Inference: prompts in, text out, with any causal language model of transformers. Knows no HTTP and no Ray."""

from swiftkv_platform.engine.async_engine import AsyncLLMEngine
from swiftkv_platform.engine.config import EngineConfig, SamplingParams
from swiftkv_platform.engine.llm_engine import LLMEngine, Prompt
from swiftkv_platform.engine.sequence import RequestMetrics, RequestOutput

__all__ = [
    "AsyncLLMEngine",
    "EngineConfig",
    "LLMEngine",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
