"""Distill and serve SwiftKV models: `Client`, `JobSpec`, `LLMEngine`, `convert`.

Each name is imported on first access, so the client and the job specification do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftkv_platform.client import Client
    from swiftkv_platform.engine import LLMEngine
    from swiftkv_platform.model import convert
    from swiftkv_platform.specs import JobSpec

    __version__: str

__all__ = ["Client", "JobSpec", "LLMEngine", "__version__", "convert"]

_SUBPACKAGES = {"Client": "client", "JobSpec": "specs", "LLMEngine": "engine", "convert": "model"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("swiftkv-platform")
    if name not in _SUBPACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBPACKAGES[name]}"), name)
