"""Base class of every part of a spec, a check of what a name in it is, and the limits of requests. Ranges of numbers
are in `limits.py`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from swiftkv_platform.errors import lone_surrogate
from swiftkv_platform.frozen import FiniteModel

MAX_SEED = (1 << 63) - 1
"""Largest seed a request or an engine accepts."""
MAX_N = 64
"""Most answers to one prompt."""
MAX_PROMPTS = 256
"""Most prompts of one HTTP request; its prompts times `n` are also bounded by what the engine runs and lets wait."""
MAX_MESSAGES = 4096
"""Most turns of a conversation."""
MAX_LOOKUP_TOKENS = 64
"""Most tokens drafted from the text at a time."""
MAX_TOP_K = (1 << 31) - 1
"""Largest `top_k`, more than any vocabulary has."""
MAX_LOGPROBS = 100
"""Most log-probabilities a token is given."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities that the tokens of a prompt are given together."""
MAX_STREAM_INTERVAL_S = 10.0
"""Longest time for which tokens are collected."""
MIN_TEMPERATURE = 1e-5
"""Lowest temperature that is sampled at; below it logits over temperature leave the range of float32, and the most
probable token is taken, as at 0."""
MAX_STOPS = 32
"""Most stop strings; each is looked for at every token."""
MAX_STOP_LENGTH = 1024
"""Characters of the longest stop string; as many may be held back from a stream."""
MAX_STOP_TOKEN_IDS = 1024
"""Most stop token ids."""
MAX_ALLOWED_TOKEN_IDS = 1024
"""Most token ids that an answer is held to."""
MAX_LOGIT_BIAS = 1024
"""Most tokens whose logits are changed."""
MAX_TEMPERATURE = 2.0
"""Highest temperature of a request."""
MAX_PRIORITY = (1 << 63) - 1
"""Largest priority of a request, either way."""
MAX_GRAMMAR_BYTES = 1 << 16
"""Longest schema, expression or grammar, or choices together, that is safe to compile: see `engine/grammars.py`."""
MAX_CHOICES = 4096
"""Most choices of a structured output."""
MAX_SCHEMA_DEPTH = 64
"""Objects and lists within each other in a JSON schema."""
MAX_BYTES_PER_TOKEN = 16
"""Bytes of text a token may stand for, on average over a whole context, where `max_prompt_bytes` is not given. A
vocabulary's longest token may be longer (runs of spaces), text that is written is several times denser."""

Name = Annotated[str, Field(max_length=1024)]
"""A model, data set, task or directory."""
Word = Annotated[str, Field(max_length=200)]
"""A revision, split, metric or tag."""
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
"""A key of `metadata`. Quotes and backslashes would end a JSON path, by which lists are filtered."""
LabelValue = Annotated[str, Field(max_length=4096)]


class Spec(FiniteModel):
    """Part of a spec. Every number and text in it has bounds (`tests/unit/specs/test_limits.py`)."""

    @field_validator("*")
    @classmethod
    def _is_storable(cls, value: Any) -> Any:
        """Text that neither UTF-8 nor a database can hold would fail later, when the spec is written somewhere."""
        match value:
            case str():
                _check_storable(value)
            case tuple():
                for item in value:
                    cls._is_storable(item)
            case dict():
                cls._is_storable((*value.keys(), *value.values()))
        return value


def _check_storable(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"has NUL at character {text.index(chr(0))}; leave it out")
    if (place := lone_surrogate(text)) is not None:
        raise ValueError(f"has a lone surrogate at character {place}, which is no text; leave it out")


def looks_like_a_path(name: str, suffixes: Collection[str] = ()) -> bool:
    """Whether a name that nothing here has cannot be a hub id either; `suffixes` mark files."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in suffixes
