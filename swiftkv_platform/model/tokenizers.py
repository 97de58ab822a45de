"""Effects of a tokenizer on a text: the ids it makes, the bytes a token stands for. Knows no model but its size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.configuration import FIELD, refusing

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(source: str | Path, vocab_size: int, *, field: str = FIELD, revision: str | None = None) -> Any:
    """The tokenizer of a model, which makes no id that the model has no embedding for.

    Args:
        source: directory or hub id.
        vocab_size: rows of the model's embedding.
        field: what messages call `source`.

    Raises:
        ModelError: a tokenizer that cannot be read, or makes such ids.
    """
    with refusing(source, "its tokenizer cannot be read", field):
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        # As loaded: a class, or tokenizer_config.json, may add tokens that tokenizer.json does not have.
        token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if highest >= vocab_size:
        raise ModelError.of(
            field,
            str(source),
            f": its tokenizer makes ids up to {highest} ({token!r}), and the model's vocab_size is {vocab_size}; give "
            "the tokenizer that the model was trained with, or the model embeddings for all tokens "
            "(resize_token_embeddings)",
        )
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _FILES)


def max_bytes_per_token(tokenizer: Any) -> int | None:
    """Most bytes of a text that one token stands for, so that a longer text has more tokens than a context holds.

    None where it may stand for any number: where a normalizer or a pre-tokenizer takes text away, an unknown word is
    one token however long it is, or a special token takes the spaces around it. Also where that is not known.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    vocabulary, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder().values()
    normalizers, pre_tokenizers = steps(backend.normalizer), steps(backend.pre_tokenizer)
    shrinks = [_SHRINKS.get(step["type"]) if not _is_deleting(step) else None for step in normalizers]
    kept = all(step["type"] in _KEEPING and not _is_deleting(step) for step in pre_tokenizers)
    if None in shrinks or not kept or any(token.lstrip or token.rstrip for token in added):
        return None
    if any(step["type"] == "ByteLevel" for step in [*normalizers, *pre_tokenizers]):
        whole = set(ByteLevel.alphabet()) <= vocabulary.keys()
        longest = max(map(len, vocabulary))  # a character for each byte
    else:
        whole = getattr(backend.model, "byte_fallback", False) and {f"<0x{byte:02X}>" for byte in range(256)} <= set(
            vocabulary
        )
        longest = max(len(token.encode()) for token in vocabulary)
    if not whole or not isinstance(backend.model, BPE):
        return None
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return longest * math.prod(shrink for shrink in shrinks if shrink is not None)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Token ids that `decode` leaves out with `skip_special_tokens`."""
    if not getattr(tokenizer, "is_fast", False):
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def end_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """The ids in an `eos_token_id`: none, one or several."""
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())


_SHRINKS = {"NFC": 3, "NFD": 3, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
"""Normalizers that keep text, by how many bytes may become one: three Hangul letters of nine bytes are one of three."""
_KEEPING = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
"""Pre-tokenizers that keep text."""


def _is_deleting(step: dict[str, Any]) -> bool:
    """Whether a step takes text away, as its options say."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is None or len(step["content"].encode()) < len(pattern.encode())
    return step.get("behavior") == "Removed"


def steps(component: Any) -> list[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder, one after another; nothing for None."""
    unvisited = [] if component is None else [json.loads(component.__getstate__())]
    found = []
    while unvisited:
        step = unvisited.pop(0)
        inner = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders")
        unvisited += inner or []
        if inner is None:
            found.append(step)
    return found
