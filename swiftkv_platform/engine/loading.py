"""A model directory or hub id to a model and its tokenizer, ready for inference. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import swiftkv_platform.model  # noqa: F401  # registers the SwiftKV classes with AutoModelForCausalLM
from swiftkv_platform.engine.config import EngineConfig
from swiftkv_platform.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A directory with none of these has no tokenizer."""


@dataclass(frozen=True)
class LoadedModel:
    """What the engine needs of a checkpoint."""

    model: PreTrainedModel
    tokenizer: Any | None
    """None where the directory has none: only token-id prompts can be served."""
    eos_token_ids: frozenset[int]
    """Tokens that end an answer."""
    context_length: int
    """Tokens of prompt and answer together that the model's positions allow."""


def load_model(path: str | Path, config: EngineConfig) -> LoadedModel:
    """Read a Hugging Face directory, SwiftKV or not, or fetch it from the hub first.

    Raises:
        ModelError: the checkpoint cannot be read, or `max_model_len` exceeds its context.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    directory = _local_directory(str(path))
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=config.dtype)
        tokenizer = AutoTokenizer.from_pretrained(directory) if _has_tokenizer(directory) else None
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model {str(path)!r} cannot be loaded: {error}; a Hugging Face directory of a causal language model is "
            "accepted, with config.json and safetensors",
            field="model",
            value=str(path),
        ) from error
    context_length = _context_length(model)
    if config.max_model_len is not None and config.max_model_len > context_length:
        raise ModelError(
            f"max_model_len is {config.max_model_len}; model {str(path)!r} accepts 2..{context_length}",
            field="max_model_len",
            value=config.max_model_len,
        )
    return LoadedModel(
        model=_prepared(model, config),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        context_length=config.max_model_len or context_length,
    )


def _local_directory(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {path!r} is neither a directory nor a model on the hub that can be reached: {error}",
            field="model",
            value=path,
        ) from error


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def _context_length(model: PreTrainedModel) -> int:
    text_config = model.config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelError(
            "config.json names no max_position_embeddings; set max_model_len to the model's context",
            field="max_model_len",
            value=None,
        )
    return length


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """The generation config's, else the model config's, else the tokenizer's."""
    candidates = (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    eos = next((candidate for candidate in candidates if candidate is not None), ())
    return frozenset([eos] if isinstance(eos, int) else eos)


def _prepared(model: PreTrainedModel, config: EngineConfig) -> PreTrainedModel:
    """On its device, K and V projections of all groups fused where the model has such."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is 'cuda', but torch sees no GPU; 'auto' and 'cpu' are accepted", field="device")
    module: torch.nn.Module = model  # whose `to`, unlike transformers' wrapper, is typed
    module.to(device)
    fuse = getattr(model.base_model, "fuse_shared_key_value", None)
    if fuse is not None:
        fuse()
    return model
