"""Check that a model's directory names no code and no files outside of it. Reads its JSON files, no weights.

`transformers` follows names in such files: an adapter's base model, a tokenizer's `vocab_file`, a repository of kernels
as attention implementation, shards of an index. If sources are restricted, a model may consist only of files of its own
directory, and its code only of this package and `transformers`: `auto_map` is never followed, and no pickle is read
(`model.checkpoint` accepts only safetensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.sources.boundary import Boundary
from swiftkv_platform.sources.names import leads_out
from swiftkv_platform.sources.small_files import CONFIG_BYTES, INDEX_BYTES, UnusableFileError, read_object

_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_HARMLESS = frozenset({"special_tokens_map_file"})
"""Keys under which old configurations name their author's own file, which is never read."""


def check_model_files(directory: Path, boundary: Boundary, field: str) -> None:
    """Raise `ModelError`, with the file and the name in it, if a model leads out of `boundary` or asks for code."""
    boundary.check_tree(directory, field, error=ModelError)
    if (directory / _ADAPTER).exists():
        raise _unusable(_ADAPTER, field, "names another model; use merged weights")
    _check_index(directory / _INDEX, field)
    _check_config(directory / "config.json", field)
    _check_tokenizer(directory / "tokenizer_config.json", field)


def _check_index(path: Path, field: str) -> None:
    shards = _json(path, field).get("weight_map")
    for shard in set(map(str, shards.values())) if isinstance(shards, Mapping) else ():
        if PurePosixPath(shard).name != shard:
            raise _unusable(path.name, field, f"names the shard {shard[:200]!r}; a file beside it is accepted")


def _check_config(path: Path, field: str) -> None:
    for section in _mappings(_json(path, field)):
        for name in _IMPLEMENTATIONS:
            for key in (name, f"_{name}", f"_{name}_internal"):
                if "/" in str(section.get(key)):
                    raise _unusable(path.name, field, f"names the code {str(section[key])[:200]!r}; leave {key} out")


def _check_tokenizer(path: Path, field: str) -> None:
    for key, value in _json(path, field).items():
        if key.endswith("_file") and key not in _HARMLESS and isinstance(value, str) and leads_out(value):
            raise _unusable(path.name, field, f"names {value[:200]!r}; without {key} the file beside it is read")


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return every JSON object in `value`, including itself."""
    found: list[Mapping[str, Any]] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            found.append(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return found


def _json(path: Path, field: str) -> Mapping[str, Any]:
    """Return the JSON object in a file; an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        return read_object(path, INDEX_BYTES if path.name == _INDEX else CONFIG_BYTES)
    except OSError as error:
        raise _unusable(path.name, field, f"cannot be read ({error.strerror})") from error
    except UnusableFileError as error:
        raise _unusable(path.name, field, str(error)) from error


def _unusable(name: str, field: str, why: str) -> ModelError:
    return ModelError(f"{field}: the model's {name} {why}", field=field, value=name)
