"""Check that a model's directory names no code and no files outside of it. Reads its JSON files, no weights.

Loaders never see more of these files than `views` keep. If sources are restricted, a model may also consist only of
files of its own directory, and its code only of this package and `transformers`: `auto_map` is never followed, and no
pickle is read (`model.checkpoint` accepts only safetensors).
"""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.errors import ModelError
from swiftkv_platform.sources.boundary import Boundary
from swiftkv_platform.sources.loader_rules import ADAPTER, TOKENIZER_CONFIG
from swiftkv_platform.sources.names import leads_out
from swiftkv_platform.sources.views import check_files, read_config

_HARMLESS = frozenset({"special_tokens_map_file"})
"""Keys under which old configurations name their author's own file, which is never read."""


def check_model_files(directory: Path, boundary: Boundary, field: str) -> None:
    """Raise `ModelError`, with the file and the name in it, if a model leads out of `boundary` or asks for code."""
    boundary.check_tree(directory, field, error=ModelError)
    if (directory / ADAPTER).exists():
        raise _unusable(ADAPTER, field, f"the model's {ADAPTER} names another model; use merged weights")
    try:
        check_files(directory)
        tokenizer = read_config(directory, TOKENIZER_CONFIG)
    except ModelError as error:
        raise _unusable(str(error.field), field, f"the model's {error.message}") from error
    for key, value in tokenizer.items():
        if key.endswith("_file") and key not in _HARMLESS and isinstance(value, str) and leads_out(value):
            why = f"names {value[:200]!r}; leave {key} out to use the file in the model directory"
            raise _unusable(TOKENIZER_CONFIG, field, f"the model's {TOKENIZER_CONFIG} {why}")


def _unusable(name: str, field: str, why: str) -> ModelError:
    return ModelError(f"{field}: {why}", field=field, value=name)
