"""Read small files within bounds: configurations, cards, indices. Does not interpret them.

These files come from untrusted directories. A file may be sparse and of any length, a pipe, or deeply nested JSON;
reading it takes no more memory than its bound, and never blocks.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from swiftkv_platform import limits

CONFIG_BYTES = 1 << 20
"""Most bytes of a `config.json` or other JSON of a model or data set; the longest of real models have about 100 KB. As
objects, a text of brackets takes twenty times its length."""
TOKENIZER_BYTES = limits.TOKENIZER_BYTES.default
"""Most bytes of a `tokenizer_config.json`; Gemma 3's has 1.2 MB."""
INDEX_BYTES = 32 << 20
"""Most bytes of an index of shards; one for 200,000 tensors has 20 MB."""
CARD_BYTES = 1 << 20
"""Bytes of a card that are read at most; its metadata are at the beginning."""
METADATA_BYTES = 256 << 10
"""Most bytes of a card's metadata; PyYAML takes seconds for that much."""


class UnusableFileError(ValueError):
    """Refusal of a file; the message continues "the file ...", such as "is longer than 10 bytes"."""


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises `OSError`, and `UnusableFileError` if it is
    longer or not a regular file."""
    return checked_length(read_head(path, most + 1), most)


def checked_length(data: bytes, most: int) -> bytes:
    """Return `data`. Raises `UnusableFileError` if it has more than `most` bytes."""
    if len(data) > most:
        raise UnusableFileError(f"is longer than {most} bytes")
    return data


def read_head(path: Path, most: int) -> bytes:
    """Return at most the first `most` bytes of a regular file. Raises `OSError`, and `UnusableFileError` if it is not
    one."""
    with open(path, "rb", opener=open_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise UnusableFileError("is not a regular file")
        return stream.read(most)


def open_without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe without waiting for the pipe's other end."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises `UnusableFileError` if it is not one."""
    try:
        document = json.loads(data.decode())  # in other encodings transformers reads none
    except RecursionError as error:
        raise UnusableFileError("is nested too deeply") from error
    except ValueError as error:  # includes UnicodeDecodeError
        raise UnusableFileError(f"is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise UnusableFileError("is not a JSON object")
    return document


def read_object(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a small file. Raises as `read_small` and `parse_object`."""
    return parse_object(read_small(path, most))
