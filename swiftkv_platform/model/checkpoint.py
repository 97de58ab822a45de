"""What is in a safetensors checkpoint, read from its headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def tensor_names(name_or_path: str | Path, **kwargs: Any) -> frozenset[str] | None:
    """Names of a checkpoint's tensors (local directory or hub id), or None where it has no safetensors."""
    arguments = {key: kwargs[key] for key in _HUB_ARGUMENTS if kwargs.get(key) is not None}

    def find(filename: str) -> str | None:
        path: str | None = cached_file(
            str(name_or_path), filename, _raise_exceptions_for_missing_entries=False, **arguments
        )
        return path

    if index := find(SAFE_WEIGHTS_INDEX_NAME):
        return frozenset(json.loads(Path(index).read_text())["weight_map"])
    if weights := find(SAFE_WEIGHTS_NAME):
        with safe_open(weights, framework="pt") as file:
            return frozenset(file.keys())
    return None
