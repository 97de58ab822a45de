"""Inference with SwiftKV models and the dense models they come from: prompts in, text out. Knows no HTTP and no Ray.

Option classes are imported directly; names that need torch are imported on first access, since a process that only
reads or checks options (a Serve application being built) should not spend seconds on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.sampling import EarlyExit, SamplingParams
from swiftkv_platform.specs.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from swiftkv_platform.engine.llm_engine import AsyncLLMEngine, LLMEngine
    from swiftkv_platform.engine.outputs import RequestMetrics, RequestOutput, RequestStream
    from swiftkv_platform.engine.requests import Prompt

__all__ = [
    "AsyncLLMEngine",
    "EarlyExit",
    "EngineConfig",
    "LLMEngine",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "StructuredOutputs",
]

_LAZY_MODULES = {
    "AsyncLLMEngine": "llm_engine",
    "LLMEngine": "llm_engine",
    "Prompt": "requests",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestStream": "outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_MODULES[name]}"), name)
