"""Read the header of a GGUF file as a Hugging Face `config.json`. Reads no weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The library `gguf` takes seconds to
parse a vocabulary and trusts every length; this reader skips vocabularies, and stops at `MAX_HEADER_BYTES`.
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

GGUF_SUFFIX = ".gguf"
MAX_HEADER_BYTES = 32 << 20
"""Max bytes of a header; a vocabulary of 256,000 tokens with its merges takes 12 MB."""
_MAX_STRING_BYTES = 1 << 20
"""Max bytes of a string; the longest is usually a chat template."""
_MAX_ENTRIES = 1 << 16
"""Max values, and max tensors, of a file."""
_MAX_LIST_STRINGS = 1 << 21
"""Max strings in all lists of a file; a vocabulary of 256,000 tokens has about 500,000 merges."""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRUCT_FORMAT_BY_TYPE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format characters of `struct` by GGUF's value type."""
_STRING, _ARRAY = 8, 9

_FAMILY_BY_ARCHITECTURE = {family.gguf_architecture: family for family in FAMILIES.values() if family.gguf_architecture}
"""Families by the supported `general.architecture`."""
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_VOCABULARY_KEY = "tokenizer.ggml.tokens"


def read_gguf_config(
    path: Path, name: str | None = None, *, field: str, boundary: Boundary = UNBOUNDED
) -> dict[str, Any]:
    """Return the configuration of the model in a GGUF file; `name` and `field` are for messages. Raises `ModelError`
    for a missing or invalid file, an unsupported architecture, and scaled rotary embeddings."""
    name = str(path) if name is None else name
    try:
        file = boundary.check_path(path, field, error=ModelError)
        if not file.is_file():
            raise ModelError.for_field(field, name, ": no such file")
        with file.open("rb") as stream:
            values, tensors = _HeaderReader(stream).read()
        return _build_config(values, tensors)
    except OSError as error:
        raise ModelError.for_field(field, name, f": cannot be read ({error.strerror})") from error
    except _UnreadableFileError as error:
        raise ModelError.for_field(field, name, f": {error}") from error


@dataclass(frozen=True)
class _SkippedList:
    """A list in the header, whose values are skipped."""

    length: int


class _UnreadableFileError(Exception):
    """The message says why the file cannot be read."""


class _HeaderReader:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._num_bytes_left = min(os.fstat(stream.fileno()).st_size, MAX_HEADER_BYTES)
        self._num_strings_left = _MAX_LIST_STRINGS

    def read(self) -> tuple[dict[str, Any], set[str]]:
        if self._read_bytes(4) != _MAGIC:
            raise _UnreadableFileError("it is not a GGUF file")
        version = self._read_number("I")
        if version not in _VERSIONS:
            raise _UnreadableFileError(
                f"its GGUF version is {version}; {' and '.join(map(str, _VERSIONS))} are supported"
            )
        num_tensors, num_values = self._read_number("Q"), self._read_number("Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise _UnreadableFileError(f"its header declares {num_tensors} tensors and {num_values} values")
        values = {self._read_string(): self._read_value() for _ in range(num_values)}
        return values, {self._read_tensor_name() for _ in range(num_tensors)}

    def _read_value(self) -> Any:
        kind = self._read_number("I")
        if kind == _STRING:
            return self._read_string()
        return self._skip_list() if kind == _ARRAY else self._read_number(_get_scalar_format(kind))

    def _skip_list(self) -> _SkippedList:
        kind, length = self._read_number("I"), self._read_number("Q")
        if kind == _STRING:
            self._num_strings_left -= length
            if self._num_strings_left < 0:
                raise _UnreadableFileError(
                    f"a list in its header has {length} strings; at most {_MAX_LIST_STRINGS} are read in total"
                )
            for _ in range(length):
                self._read_bytes(self._read_number("Q"))
        else:
            self._read_bytes(length * struct.calcsize(_get_scalar_format(kind)))
        return _SkippedList(length)

    def _read_tensor_name(self) -> str:
        """Return a tensor's name, skipping its shape, type and offset."""
        name, num_dimensions = self._read_string(), self._read_number("I")
        self._read_bytes(8 * num_dimensions + 4 + 8)
        return name

    def _read_string(self) -> str:
        length = self._read_number("Q")
        if length > _MAX_STRING_BYTES:
            raise _UnreadableFileError(f"a string in its header has {length} bytes")
        return self._read_bytes(length).decode(errors="replace")

    def _read_number(self, kind: str) -> Any:
        layout = f"<{kind}"
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]

    def _read_bytes(self, length: int) -> bytes:
        if length > self._num_bytes_left:
            raise _UnreadableFileError("its header is truncated or damaged")
        self._num_bytes_left -= length
        return self._stream.read(length)


def _get_scalar_format(kind: int) -> str:
    if kind not in _STRUCT_FORMAT_BY_TYPE:
        raise _UnreadableFileError(f"its header has a value of the unknown type {kind}")
    return _STRUCT_FORMAT_BY_TYPE[kind]


def _build_config(values: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    # 1. check the architecture
    architecture = str(values.get("general.architecture"))
    family = _FAMILY_BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise _UnreadableFileError(
            f"its architecture is {architecture}; {', '.join(_FAMILY_BY_ARCHITECTURE)} are read from GGUF; for others, "
            "use a Hugging Face model directory"
        )
    if values.get(f"{architecture}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        # transformers reads neither from GGUF, so the model would compute something else at every position.
        raise _UnreadableFileError("its rotary embeddings are scaled; use a Hugging Face model directory")
    # 2. translate its keys
    shape = {key: _require_number(values, f"{architecture}.{gguf_key}") for gguf_key, key in _CONFIG_KEYS.items()}
    vocabulary = values.get(_VOCABULARY_KEY)
    if isinstance(vocabulary, _SkippedList):
        values = {f"{architecture}.vocab_size": vocabulary.length, **values}
    heads = {f"{architecture}.attention.key_length": shape["hidden_size"] // max(shape["num_attention_heads"], 1)}
    config = {
        "architectures": [family.get_teacher_class_name("ForCausalLM")],
        "model_type": family.model_type,
        **shape,
        "head_dim": _require_number({**heads, **values}, *heads),
        "vocab_size": _require_number(values, f"{architecture}.vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    base = values.get(f"{architecture}.rope.freq_base", 10000.0)
    return config | (_build_gemma_config(values, config, base) if architecture == "gemma3" else {"rope_theta": base})


def _build_gemma_config(values: Mapping[str, Any], config: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Return the keys that only Gemma 3 has. llama.cpp fixes the RoPE base of sliding layers, and scales scores by
    `head_dim` except in the 27B model, whose scaled rotary embeddings are refused."""
    bases = {"full_attention": base, "sliding_attention": 10000.0}
    return {
        "sliding_window": _require_number(values, "gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": config["head_dim"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()},
    }


def _require_number(values: Mapping[str, Any], key: str) -> Any:
    value = values.get(key)
    if not isinstance(value, int | float):  # a list if layers differ
        raise _UnreadableFileError(f"its header has no single number as {key}")
    return value
