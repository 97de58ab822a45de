"""Inference: prompts in, text out, with any causal language model of transformers. Knows no HTTP and no Ray.

Options are here at once; what needs torch is imported when it is first asked for, since a process that only reads or
checks options (a Serve application being built) should not pay seconds for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swiftkv_platform.engine.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from swiftkv_platform.engine.async_engine import AsyncLLMEngine
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

_NEEDS_TORCH = {
    "AsyncLLMEngine": "async_engine",
    "LLMEngine": "llm_engine",
    "Prompt": "llm_engine",
    "RequestMetrics": "sequence",
    "RequestOutput": "sequence",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
