"""Conversion of GGUF files (llama.cpp's format) to model directories, cached on each machine. Needs `gguf`.

Quantised weights are dequantised to bfloat16.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.directories import new_directory

CACHE = Path(HF_HOME) / "swiftkv" / "gguf"
"""Cache of converted directories by digest of their file, next to the hub's cache, which operators size and mount."""
_FORMAT = 1
"""Version of the conversion, part of a directory's name."""


def gguf_directory(
    file: Path, config: Mapping[str, Any], *, field: str = "model.name_or_path", cache: Path | None = None
) -> Path:
    """Return the model directory for a GGUF file, converting the file if this machine has not done so before.

    The conversion holds the whole model in memory, in bfloat16.

    Args:
        config: fields of a `config.json` from the file's header (`sources.gguf`).
        field: name of the file in error messages.
        cache: parent of the directories; None: `CACHE`.

    Raises:
        ModelError: transformers cannot read the model, or the package `gguf` is missing.
    """
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = CACHE if cache is None else cache
    directory = cache / f"{digest[:32]}-{_FORMAT}"
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{directory.name}.lock"):
            if not directory.exists():
                with new_directory(directory) as target:
                    _convert(file, config, target, field)
    return directory


def _convert(file: Path, config: Mapping[str, Any], target: Path, field: str) -> None:
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with tempfile.TemporaryDirectory(prefix="swiftkv-gguf-") as alone:
            # transformers also reads the files beside it, such as a tokenizer_config.json.
            (Path(alone) / "model.gguf").symlink_to(file.resolve())
            location = {"pretrained_model_name_or_path": alone, "gguf_file": "model.gguf"}
            tokenizer = AutoTokenizer.from_pretrained(**location)
            model, report = load(
                **location,
                config=AutoConfig.for_model(**config),
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
            )
    except ImportError as error:
        raise ModelError.of(
            field, str(file), ": GGUF files are read with the package gguf: pip install gguf"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ModelError.of(field, str(file), f": transformers cannot read it ({type(error).__name__})") from error
    if wrong := {kind: names for kind, names in report.items() if names}:  # transformers would use random weights
        raise ModelError.of(field, str(file), f": its tensors do not match the model in its header: {wrong}")
    _plain(model, tokenizer).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _plain(loaded: Any, tokenizer: Any) -> Any:
    """Move the weights to a model that was never quantised, since transformers saves only such models."""
    values = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.device("meta"):
        model = type(loaded)._from_config(type(loaded.config).from_dict(values), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model
