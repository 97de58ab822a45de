"""Small files that a name leads to, read within bounds: configurations, cards, indices. Knows no meaning of any.

Whoever may name a directory decides what lies in it. A file may be sparse and of any length, a pipe, or JSON nested as
deeply as its bytes go; reading one takes no more memory than its bound, and none of them blocks its reader.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

CONFIG_BYTES = 1 << 20
"""Longest `config.json`, and other JSON of a model or data set; the longest of real models have some 100 KB. Text of
brackets takes twenty times its length as objects."""
INDEX_BYTES = 32 << 20
"""Longest index of shards; that of 200,000 tensors has 20 MB."""
CARD_BYTES = 1 << 20
"""Longest part of a card that is read: its metadata stand at its beginning."""
METADATA_BYTES = 256 << 10
"""Longest metadata of a card; PyYAML takes seconds for it."""


class UnusableFileError(ValueError):
    """Refusal of a file, in words that continue "the file ...", such as "is longer than 10 bytes"."""


def read_small(path: Path, most: int) -> bytes:
    """Content of a regular file of at most `most` bytes. Raises `UnusableFileError`: it is longer, or no regular file;
    `OSError`."""
    return checked_length(read_head(path, most + 1), most)


def checked_length(data: bytes, most: int) -> bytes:
    """The data themselves. Raises `UnusableFileError`: there are more bytes."""
    if len(data) > most:
        raise UnusableFileError(f"is longer than {most} bytes")
    return data


def read_head(path: Path, most: int) -> bytes:
    """At most the first `most` bytes of a regular file. Raises `UnusableFileError`: it is none; `OSError`."""
    with open(path, "rb", opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise UnusableFileError("is no regular file")
        return stream.read(most)


def _without_waiting(path: str, flags: int) -> int:
    """Open what may be a pipe, which waits for its other end by default."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises `UnusableFileError`: there is none."""
    try:
        document = json.loads(data.decode())  # in other encodings transformers reads none
    except RecursionError as error:
        raise UnusableFileError("is nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise UnusableFileError(f"is no JSON ({error})") from error
    if not isinstance(document, dict):
        raise UnusableFileError("holds no object")
    return document


def read_object(path: Path, most: int = CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a small file. Raises as `read_small` and `parse_object`."""
    return parse_object(read_small(path, most))
