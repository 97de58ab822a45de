"""Read the configuration in a GGUF file's header in the form of Hugging Face's `config.json`. Reads no weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The library `gguf` takes seconds to
parse a vocabulary and trusts every length; this reader skips vocabularies, and stops at `LONGEST_HEADER`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.sources.untrusted_files import UNBOUNDED, Boundary

SUFFIX = ".gguf"
LONGEST_HEADER = 32 << 20
"""Most bytes of a header; a vocabulary of 256,000 tokens with its merges takes 12 MB."""
_LONGEST_TEXT = 1 << 20
"""Most bytes of one text; the longest is usually a chat template."""
_MOST_ENTRIES = 1 << 16
"""Most values, and most tensors, of a file."""
_MOST_TEXTS = 1 << 21
"""Most texts in all lists of a file; a vocabulary of 256,000 tokens has about 500,000 merges."""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format characters of `struct` by GGUF's value type."""
_STRING, _ARRAY = 8, 9

_FAMILIES = {family.gguf_architecture: family for family in FAMILIES.values() if family.gguf_architecture}
"""Families by the supported `general.architecture`."""
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS = "tokenizer.ggml.tokens"


def read_gguf_config(
    path: Path, name: str | None = None, *, field: str, boundary: Boundary = UNBOUNDED
) -> dict[str, Any]:
    """Return the configuration of the model in a GGUF file; `name` and `field` are for messages. Raises `ModelError` if
    there is no such file, or for another kind of file, another architecture, or scaled rotary embeddings."""
    name = str(path) if name is None else name
    try:
        file = boundary.check(path, field, error=ModelError)
        if not file.is_file():
            raise ModelError.for_field(field, name, ": no such file")
        with file.open("rb") as stream:
            values, tensors = _Header(stream).read()
        return _config(values, tensors)
    except OSError as error:
        raise ModelError.for_field(field, name, f": cannot be read ({error.strerror})") from error
    except _NotReadableError as error:
        raise ModelError.for_field(field, name, f": {error}") from error


@dataclass(frozen=True)
class _List:
    """A list in the header, whose values are skipped."""

    length: int


class _NotReadableError(Exception):
    """Reason why a file is not read."""


class _Header:
    """Reads the header's values (of lists only the length) and tensor names."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = min(os.fstat(stream.fileno()).st_size, LONGEST_HEADER)
        self._texts_left = _MOST_TEXTS

    def read(self) -> tuple[dict[str, Any], set[str]]:
        if self._bytes(4) != _MAGIC:
            raise _NotReadableError("it is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _NotReadableError(f"its GGUF version is {version}; {' and '.join(map(str, _VERSIONS))} are supported")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MOST_ENTRIES:
            raise _NotReadableError(f"its header declares {num_tensors} tensors and {num_values} values")
        values = {self._text(): self._value() for _ in range(num_values)}
        return values, {self._tensor() for _ in range(num_tensors)}

    def _value(self) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._text()
        return self._list() if kind == _ARRAY else self._number(_format(kind))

    def _list(self) -> _List:
        kind, length = self._number("I"), self._number("Q")
        if kind == _STRING:
            self._texts_left -= length
            if self._texts_left < 0:
                raise _NotReadableError(
                    f"a list in its header has {length} strings; at most {_MOST_TEXTS} are read in total"
                )
            for _ in range(length):
                self._bytes(self._number("Q"))
        else:
            self._bytes(length * struct.calcsize(_format(kind)))
        return _List(length)

    def _tensor(self) -> str:
        """Return a tensor's name, skipping its shape, type and offset."""
        name, num_dimensions = self._text(), self._number("I")
        self._bytes(8 * num_dimensions + 4 + 8)
        return name

    def _text(self) -> str:
        length = self._number("Q")
        if length > _LONGEST_TEXT:
            raise _NotReadableError(f"a string in its header has {length} bytes")
        return self._bytes(length).decode(errors="replace")

    def _number(self, kind: str) -> Any:
        layout = f"<{kind}"
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _bytes(self, length: int) -> bytes:
        if length > self._left:
            raise _NotReadableError("its header ends early, or is damaged")
        self._left -= length
        return self._stream.read(length)


def _format(kind: int) -> str:
    if kind not in _SCALARS:
        raise _NotReadableError(f"its header has a value of the unknown type {kind}")
    return _SCALARS[kind]


def _config(values: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    architecture = str(values.get("general.architecture"))
    family = _FAMILIES.get(architecture)
    if family is None:
        raise _NotReadableError(
            f"its architecture is {architecture}; {', '.join(_FAMILIES)} are read from GGUF; for others, use a "
            "Hugging Face model directory"
        )
    if values.get(f"{architecture}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        # transformers reads neither from GGUF, so the model would compute something else at every position.
        raise _NotReadableError("its rotary embeddings are scaled; use a Hugging Face model directory")
    shape = {ours: _number(values, f"{architecture}.{theirs}") for theirs, ours in _KEYS.items()}
    vocabulary = values.get(_TOKENS)
    if isinstance(vocabulary, _List):
        values = {f"{architecture}.vocab_size": vocabulary.length, **values}
    heads = {f"{architecture}.attention.key_length": shape["hidden_size"] // max(shape["num_attention_heads"], 1)}
    config = {
        "architectures": [family.teacher_class("ForCausalLM")],
        "model_type": family.model_type,
        **shape,
        "head_dim": _number({**heads, **values}, *heads),
        "vocab_size": _number(values, f"{architecture}.vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    base = values.get(f"{architecture}.rope.freq_base", 10000.0)
    return config | (_of_gemma(values, config, base) if architecture == "gemma3" else {"rope_theta": base})


def _of_gemma(values: Mapping[str, Any], config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Return the keys that only Gemma 3 has. llama.cpp fixes the RoPE base of sliding layers, and scales scores by
    `head_dim` except in the 27B model, whose scaled rotary embeddings are refused."""
    bases = {"full_attention": base, "sliding_attention": 10000.0}
    return {
        "sliding_window": _number(values, "gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": config["head_dim"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()},
    }


def _number(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    if not isinstance(value, int | float):  # a list if layers differ
        raise _NotReadableError(f"its header has no single number as {key}")
    return value
