"""Check that the tokenizer beside a model fits its vocabulary. It knows ids, no text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from swiftkv_platform.errors import ModelError

_FAST, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_SLOW = ("tokenizer.model", "vocab.json", "tekken.json")


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Check the tokenizer of a model directory, where it has one.

    Raises:
        ModelError: it cannot be read, or makes ids that the model has no embedding for.
    """
    try:
        highest = _highest_id(directory)
    except Exception as error:  # a broken file: the tokenizers library raises no narrower type
        raise ModelError(
            f"cannot read the tokenizer of {str(directory)!r}: {str(error).splitlines()[0]}",
            field="model.name_or_path",
            value=str(directory),
        ) from error
    if highest >= vocab_size:
        raise ModelError(
            f"the tokenizer of {str(directory)!r} makes ids up to {highest}, the model's vocab_size is {vocab_size}; "
            "give the tokenizer that the model was trained with",
            field="model.name_or_path",
            value=str(directory),
        )


def _highest_id(directory: Path) -> int:
    """The highest id that the files name, -1 without files. What a tokenizer class would add by itself is its own."""
    if (directory / _FAST).is_file():
        ids = list(Tokenizer.from_file(str(directory / _FAST)).get_vocab(with_added_tokens=True).values())
    elif any((directory / name).is_file() for name in _SLOW):
        ids = list(AutoTokenizer.from_pretrained(directory).get_vocab().values())
    else:
        return -1
    if (directory / _CONFIG).is_file():
        added = json.loads((directory / _CONFIG).read_text(encoding="utf-8")).get("added_tokens_decoder") or {}
        ids += [int(token_id) for token_id in added]
    return max(ids, default=-1)
