"""Base class of every part of a spec, the form of names, and the ranges of all numbers that callers give, in one table
for the specs, OpenAPI, the command line and the docs.

Each number of a spec has a finite range, since it reaches shared parts: Ray Serve's controller, schedulers, databases.
A value that is finite here may overflow there: 5 / 1e-320 is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swiftkv_platform.errors import find_lone_surrogate
from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.limits import KEPT_CHECKPOINTS

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
MAX_STOP_STRINGS = 32
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
MAX_SPEC_BYTES = 256 << 10
"""Most bytes of a job spec as JSON, which has some 5,000 with all defaults."""
MAX_LAYERS = 10_000
"""Layers of a model."""
MAX_WORKERS = 100_000
"""Most workers of a job; operators usually allow far fewer."""
MAX_REPLICAS = 10_000
"""Most replicas of a deployment; operators usually allow far fewer."""
MIN_CORES = 0.1
"""Least share of a core that a worker reserves; a tenant's quota counts a whole core for it, since its thread may use
one."""
MIN_GPU = 0.01
"""Least share of a GPU. Ray rounds below a ten-thousandth, and a process that reserves none is not charged."""
_MAX_SHOWN_LENGTH = 40
"""Characters of a refused value in a message."""
STORED_CONTEXT: Mapping[str, Any] = {"stored": True}
"""Validation context for specs that an earlier version stored: a number out of range is replaced by the nearest
limit."""
_OUT_OF_RANGE = frozenset({"greater_than_equal", "less_than_equal"})


@dataclass(frozen=True)
class Range:
    """Least and largest accepted value of a number; metadata of its type. An error names both."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        bounded: Any = {**handler(source), "ge": self.low, "le": self.high}
        return core_schema.with_info_wrap_validator_function(self._validate_in_range, bounded)

    def _validate_in_range(self, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if error.errors()[0]["type"] not in _OUT_OF_RANGE:
                raise
            if info.context == STORED_CONTEXT:
                return self.clamp(value)
            raise _make_range_error(value, f"{_format_number(self.low)} to {_format_number(self.high)}") from error

    def clamp(self, value: float) -> float:
        """Return the value, or the nearer end of the range."""
        return min(max(value, self.low), self.high)


def make_field_error(field: str, value: Any, message: str) -> PydanticCustomError:
    """Return the error of a rule over several fields, of which `field` is the one to change."""
    return PydanticCustomError("fields", "{message}", {"field": field, "value": value, "message": message})


def _make_range_error(value: Any, accepted: str) -> PydanticCustomError:
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN_LENGTH else f"{shown[:_MAX_SHOWN_LENGTH]}..."
    return PydanticCustomError("out_of_range", "is {given}; {range} is accepted", {"given": shown, "range": accepted})


def _format_number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


Seed = Annotated[int, Range(0, MAX_SEED)]
"""Range of seeds that random generators, databases and JSON readers can all hold."""
SignedSeed = Annotated[int, Range(-MAX_SEED - 1, MAX_SEED)]
Epochs = Annotated[int, Range(1, 1_000_000)]
Count = Annotated[int, Range(1, 10**12)]
"""Number of steps, tokens or samples: more than any cluster will see, and small enough to be multiplied."""
Size = Annotated[int, Range(1, 1 << 24)]
"""Number of things held at a time: rows of a batch, prompts of a pass."""
KeptCheckpoints = Annotated[int, Range(1, KEPT_CHECKPOINTS.default)]
Layers = Annotated[int, Range(1, MAX_LAYERS)]
"""Layers of a model, or a part of them."""
Weight = Annotated[float, Range(0.0, 1e6)]
Positive = Annotated[float, Range(1e-30, 1e30)]
"""A positive rate, temperature or limit within the range of float32."""
NonNegative = Annotated[float, Range(0.0, 1e30)]
Rate = Annotated[float, Range(1e6, 1e24)]
"""FLOPs a second of a device."""

Workers = Annotated[int, Range(1, MAX_WORKERS)]
Cores = Annotated[float, Range(MIN_CORES, 10_000.0)]
"""Cores that Ray reserves for a worker or a replica."""
HostMemory = Annotated[int, Range(1 << 20, 1 << 50)]
"""Bytes that Ray reserves for a worker."""


def _validate_gpus(gpus: float, info: ValidationInfo) -> float:
    if gpus == 0 or MIN_GPU <= gpus < 1 or gpus == int(gpus):
        return gpus
    if info.context == STORED_CONTEXT:
        return max(MIN_GPU, gpus if gpus < 1 else math.ceil(gpus))
    raise _make_range_error(gpus, f"0, a share of one GPU from {MIN_GPU} to 1, or a whole number")


Gpus = Annotated[float, Range(0.0, 10_000.0), AfterValidator(_validate_gpus)]
"""GPUs that Ray reserves for a worker or a replica; it lends several only whole."""

Reserved = Annotated[float, Range(0.0, 1e6)]
"""Cores or GPUs of a replica, given apart from its engine options."""
MinReplicas = Annotated[int, Range(0, MAX_REPLICAS)]
MaxReplicas = Annotated[int, Range(1, MAX_REPLICAS)]
OngoingRequests = Annotated[float, Range(0.01, 1e6)]
"""Requests by which Serve's controller divides a deployment's ongoing requests."""
Delay = Annotated[float, Range(0.0, 1e9)]
"""Seconds, from 0 to some thirty years."""
Wait = Annotated[float, Range(1e-3, 1e9)]
"""Seconds, above 0."""

THREADS = Range(1, 1024)
Threads = Annotated[int, THREADS]
RANKS = Range(1, 64)
Ranks = Annotated[int, RANKS]
"""Devices of one machine."""
ContextLength = Annotated[int, Range(2, 1 << 30)]
Tokens = Annotated[int, Range(1, 1 << 30)]
StepTokens = Annotated[int, Range(1, 1 << 24)]
"""Tokens of one step; the engine allocates arrays for them."""
BlockSize = Annotated[int, Range(1, 1 << 16)]
Sequences = Annotated[int, Range(1, 1 << 20)]
"""Sequences that run at a time; the engine allocates arrays for them."""
Waiting = Annotated[int, Range(0, 1 << 20)]
CacheBytes = Annotated[int, Range(1, 1 << 50)]
PromptBytes = Annotated[int, Range(1, 1 << 30)]
GrammarSeconds = Annotated[float, Range(1e-6, 600.0)]

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
    def _validate_storable(cls, value: Any) -> Any:
        """Refuse text that UTF-8 or a database cannot hold, which would fail later when the spec is stored."""
        match value:
            case str():
                _check_storable(value)
            case tuple():
                for item in value:
                    cls._validate_storable(item)
            case dict():
                cls._validate_storable((*value.keys(), *value.values()))
        return value


def _check_storable(text: str) -> None:
    if "\0" in text:
        raise ValueError(f"has NUL at character {text.index(chr(0))}; leave it out")
    if (index := find_lone_surrogate(text)) is not None:
        raise ValueError(f"has a lone surrogate at character {index}, which is not valid text; leave it out")


def is_path_like(name: str, suffixes: Collection[str] = ()) -> bool:
    """Whether an unknown name cannot be a hub id because it looks like a path; `suffixes` mark files."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in suffixes
