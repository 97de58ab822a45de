"""A model's `config.json` by any name a command takes: built-in, local, object store or hub. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import swiftkv_platform.demo
from swiftkv_platform.errors import ModelError
from swiftkv_platform.planning import read_config
from swiftkv_platform.specs import BUILTIN_TEACHER, looks_like_a_path
from swiftkv_platform.storage.object_store import open_store


def model_config(name: str) -> dict[str, Any]:
    """The configuration of a model directory, a `config.json`, an `s3://` prefix, `builtin:python-5m` or a hub id.

    Raises:
        ModelError: there is none, or the hub does not answer.
        StorageError: no such object, or the store does not answer.
    """
    if name.startswith("builtin:"):
        return read_config(builtin_teacher(name))
    if name.startswith("s3://"):
        return read_config(json.loads(open_store(name.rstrip("/")).get_bytes("config.json")))
    path = Path(name).expanduser()
    if path.exists() or looks_like_a_path(name, (".json",)):
        return read_config(path)
    return read_config(_from_hub(name))


def builtin_teacher(name: str) -> Path:
    """Where the teacher that ships with the package lies."""
    if name != BUILTIN_TEACHER:
        raise ModelError(f"the only built-in teacher is {BUILTIN_TEACHER}, not {name}", field="model", value=name)
    return Path(swiftkv_platform.demo.__path__[0]) / "teacher"


def _from_hub(name: str) -> str:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{name!r} is no file or directory here; a hub id needs huggingface_hub "
            "(pip install 'swiftkv-platform[model]')",
            field="model",
            value=name,
        ) from error
    try:
        return hf_hub_download(name, "config.json")
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{name!r} is no file or directory here, and the hub gives no config.json for it ({reason})",
            field="model",
            value=name,
        ) from error
