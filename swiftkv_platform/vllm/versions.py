"""The vLLM versions that the plugin was written for. It knows version numbers alone."""

from __future__ import annotations

import re

from swiftkv_platform.errors import ModelError

KNOWN_VERSIONS = ("0.29", "0.30")
"""Minor versions whose model code, fast prefill and registries this plugin follows."""


def check_version(version: str) -> None:
    """Refuse a vLLM of another minor version than `KNOWN_VERSIONS`. Raises `ModelError`: naming the version that is
    installed and those that are accepted."""
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in KNOWN_VERSIONS:
        known = " or ".join(f"{known}.*" for known in KNOWN_VERSIONS)
        raise ModelError(
            f"this plugin does not know vLLM {version}: SwiftKV models are served by vLLM {known}, "
            "or by this project's own engine",
            field="vllm.version",
            value=version,
        )
