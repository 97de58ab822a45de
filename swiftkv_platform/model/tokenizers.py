"""Loading of tokenizers from checked files, and their properties: special ids, max bytes per token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swiftkv_platform.errors import ModelError
from swiftkv_platform.planning.config import MODEL_FIELD
from swiftkv_platform.sources.loader_rules import TOKENIZER
from swiftkv_platform.sources.model_directories import fetch_tokenizer_directory, open_tokenizer_view

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


def load_tokenizer(
    source: str | Path, vocab_size: int, *, field: str = MODEL_FIELD, revision: str | None = None
) -> Any:
    """Load a model's tokenizer and check that the model has an embedding for each id.

    Without a `tokenizer.json`, the class in `tokenizer_config.json` reads its own files.

    Args:
        source: directory or hub id.
        vocab_size: rows of the model's embedding.
        field: name of `source` in error messages.

    Raises:
        ModelError: the tokenizer cannot be read, or has ids without an embedding.
    """
    directory = fetch_tokenizer_directory(str(source), revision, field=field)
    try:
        with open_tokenizer_view(directory) as view:
            tokenizer = _read_tokenizer(view, directory)
        # Its class or tokenizer_config.json may add tokens that tokenizer.json lacks.
        token, highest = find_highest_token_id(tokenizer)
    except ModelError as error:
        raise ModelError.for_field(field, str(source), f": its {error.message}") from error
    except Exception as error:  # its text may quote a file
        raise ModelError.for_field(
            field,
            str(source),
            f": its tokenizer cannot be read ({type(error).__name__}); save it again with transformers, which writes "
            f"a {TOKENIZER}",
        ) from error
    tokenizer.name_or_path = str(source)
    if highest >= vocab_size:
        raise ModelError.for_field(
            field,
            str(source),
            f": its tokenizer has ids up to {highest} ({token!r}), and the model's vocab_size is {vocab_size}; give "
            "the tokenizer that the model was trained with, or give the model embeddings for all tokens "
            "(resize_token_embeddings)",
        )
    return tokenizer


def _read_tokenizer(view: Path, directory: Path) -> Any:
    """Read the tokenizer from a view of a directory, and make its file names point to the directory."""
    has_file = (view / TOKENIZER).is_file()
    tokenizer = (PreTrainedTokenizerFast if has_file else AutoTokenizer).from_pretrained(view, trust_remote_code=False)
    for values in (tokenizer.init_kwargs, vars(tokenizer)):  # transformers copies vocabularies when it saves them
        for key, value in values.items():
            if isinstance(value, str) and Path(value).parent == view:
                values[key] = str(directory / Path(value).name)
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def get_max_bytes_per_token(tokenizer: Any) -> int | None:
    """Return the max bytes of text per token, or None if there is no maximum or it is unknown.

    There is no maximum if a normalizer or a pre-tokenizer removes text, if an unknown word of any length is one token,
    or if a special token absorbs the spaces around it.
    """
    if not getattr(tokenizer, "is_fast", False):
        return None
    backend = tokenizer.backend_tokenizer
    vocabulary, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder().values()
    normalizers, pre_tokenizers = list_tokenizer_steps(backend.normalizer), list_tokenizer_steps(backend.pre_tokenizer)
    shrinks = [_NORMALIZER_SHRINK.get(step["type"]) if not _may_delete_text(step) else None for step in normalizers]
    kept = all(step["type"] in _LOSSLESS_PRE_TOKENIZERS and not _may_delete_text(step) for step in pre_tokenizers)
    if None in shrinks or not kept or any(token.lstrip or token.rstrip for token in added):
        return None
    if any(step["type"] == "ByteLevel" for step in [*normalizers, *pre_tokenizers]):
        whole = set(ByteLevel.alphabet()) <= vocabulary.keys()
        longest = max(map(len, vocabulary))  # one character per byte
    else:
        whole = getattr(backend.model, "byte_fallback", False) and {f"<0x{byte:02X}>" for byte in range(256)} <= set(
            vocabulary
        )
        longest = max(len(token.encode()) for token in vocabulary)
    if not whole or not isinstance(backend.model, BPE):
        return None
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return longest * math.prod(shrink for shrink in shrinks if shrink is not None)


def find_highest_token_id(tokenizer: Any) -> tuple[str, int]:
    """Return the token with the highest id, and the id; ("", -1) for an empty vocabulary."""
    return max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))


def get_special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the token ids that `decode(skip_special_tokens=True)` omits."""
    if not getattr(tokenizer, "is_fast", False):
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def get_end_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """Return the ids of an `eos_token_id`, which may be None, an id or several ids."""
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())


_NORMALIZER_SHRINK = {"NFC": 3, "NFD": 3, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
"""Max factor by which a normalizer that keeps all text shrinks it, in bytes: NFC composes three Hangul letters of 9
bytes to one of 3."""
_LOSSLESS_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}
"""Pre-tokenizers that keep all text by default."""


def _may_delete_text(step: dict[str, Any]) -> bool:
    """Whether a step with these options removes text."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is None or len(step["content"].encode()) < len(pattern.encode())
    return step.get("behavior") == "Removed"


def list_tokenizer_steps(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened; empty for None."""
    unvisited = [] if component is None else [json.loads(component.__getstate__())]
    found = []
    while unvisited:
        step = unvisited.pop(0)
        inner = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders")
        unvisited += inner or []
        if inner is None:
            found.append(step)
    return found
