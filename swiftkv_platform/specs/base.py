"""Base class of every part of a spec, a check of the form of names, and the limits of requests. Ranges of numbers are
in `limits.py`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from swiftkv_platform.errors import lone_surrogate
from swiftkv_platform.frozen import FiniteModel

MAX_SEED = (1 << 63) - 1
"""Largest seed of a request or an engine."""
MAX_N = 64
"""Most answers to one prompt."""
MAX_PROMPTS = 256
"""Most prompts of one HTTP request. Prompts times `n` are also limited by the sequences that the engine runs and
queues."""
MAX_MESSAGES = 4096
"""Most turns of a conversation."""
MAX_LOOKUP_TOKENS = 64
"""Most tokens drafted from the text at a time."""
MAX_TOP_K = (1 << 31) - 1
"""Largest `top_k`, more than any vocabulary has."""
MAX_LOGPROBS = 100
"""Most log-probabilities for each token."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities that the tokens of a prompt are given together."""
MAX_STREAM_INTERVAL_S = 10.0
"""Longest time for which a stream collects tokens, in seconds."""
MIN_TEMPERATURE = 1e-5
"""Lowest temperature for sampling. Below it logits over temperature leave the range of float32, and the most probable
token is taken, as at 0."""
MAX_STOPS = 32
"""Most stop strings; each is looked for at every token."""
MAX_STOP_LENGTH = 1024
"""Most characters of a stop string; a stream may hold back that many."""
MAX_STOP_TOKEN_IDS = 1024
"""Most stop token ids."""
MAX_ALLOWED_TOKEN_IDS = 1024
"""Most token ids that an answer may be restricted to."""
MAX_LOGIT_BIAS = 1024
"""Most tokens with a logit bias."""
MAX_TEMPERATURE = 2.0
"""Highest temperature of a request."""
MAX_PRIORITY = (1 << 63) - 1
"""Largest absolute priority of a request."""
MAX_GRAMMAR_BYTES = 1 << 16
"""Most bytes of a schema, expression, grammar or of all choices that are safe to compile, see `engine/grammars.py`."""
MAX_CHOICES = 4096
"""Most choices of a structured output."""
MAX_SCHEMA_DEPTH = 64
"""Deepest nesting of objects and lists in a JSON schema."""
MAX_BYTES_PER_TOKEN = 16
"""Most bytes of text per token, on average over a whole context, if `max_prompt_bytes` is not given. A single token may
be longer (runs of spaces); natural text has several times fewer."""

Name = Annotated[str, Field(max_length=1024)]
"""A model, data set, task or directory."""
Word = Annotated[str, Field(max_length=200)]
"""A revision, split, metric or tag."""
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
"""Key of `metadata`. Quotes and backslashes are refused since they would end a JSON path, by which lists are
filtered."""
LabelValue = Annotated[str, Field(max_length=4096)]


class Spec(FiniteModel):
    """Part of a spec. Every number and text in it has bounds (`tests/unit/specs/test_limits.py`)."""

    @field_validator("*")
    @classmethod
    def _is_storable(cls, value: Any) -> Any:
        """Refuse text that UTF-8 or a database cannot hold, which would fail later when the spec is stored."""
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
        raise ValueError(f"has a lone surrogate at character {place}, which is not valid text; leave it out")


def looks_like_a_path(name: str, suffixes: Collection[str] = ()) -> bool:
    """Whether an unknown name cannot be a hub id because it looks like a path; `suffixes` mark files."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in suffixes
