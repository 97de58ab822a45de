"""Base class of spec sections, and the types of all names and numbers, with the ranges used by the specs, OpenAPI, the
command line and the docs.

Each number has a finite range, because it reaches shared programs (Ray Serve's controller, schedulers, databases),
where a finite value may overflow: 5 / 1e-320 is infinite."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

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

from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.limits import KEPT_CHECKPOINTS

MAX_SEED = (1 << 63) - 1
MAX_N = 64
MAX_PROMPTS = 256
"""Max prompts per HTTP request. The engine also limits prompts x `n` by its running and waiting sequences."""
MAX_MESSAGES = 4096
MAX_LOOKUP_TOKENS = 64
"""Max tokens drafted by prompt lookup at a time."""
MAX_TOP_K = (1 << 31) - 1
MAX_LOGPROBS = 100
MAX_PROMPT_LOGPROBS = 1 << 18
MAX_STREAM_INTERVAL_S = 10.0
"""Max seconds for which a stream collects tokens."""
MIN_TEMPERATURE = 0.01
"""Min temperature for sampling; lower values are greedy, like 0, since vLLM samples at no lower one."""
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 1024
"""Max characters of a stop string; a stream may buffer that many."""
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_TEMPERATURE = 2.0
MAX_PRIORITY = (1 << 63) - 1
MAX_GRAMMAR_BYTES = 1 << 16
"""Max bytes of a schema, expression, grammar or all choices that are safe to compile, see `engine/grammars.py`."""
MAX_CHOICES = 4096
MAX_SCHEMA_DEPTH = 64
MAX_BYTES_PER_TOKEN = 16
"""Default limit of a prompt's bytes per token of the context. Natural text has several times fewer."""
MAX_SPEC_BYTES = 256 << 10
"""Max bytes of a job spec as JSON; with all defaults it has about 5,000."""
MAX_LAYERS = 10_000
MAX_WORKERS = 100_000
"""Max workers of a job; operators usually allow far fewer."""
MAX_REPLICAS = 10_000
"""Max replicas of a deployment; operators usually allow far fewer."""
MIN_CORES = 0.1
"""Min share of a core per worker. A tenant's quota counts at least one core, since the worker may use one."""
MIN_GPU = 0.01
"""Min share of a GPU. Ray rounds tiny shares to 0, and a process without a reservation is not charged."""
_MAX_SHOWN_LENGTH = 40
STORED_CONTEXT: Mapping[str, Any] = {"stored": True}
"""Validation context for stored specs of earlier versions: numbers out of range are clamped."""
_OUT_OF_RANGE = frozenset({"greater_than_equal", "less_than_equal"})


@dataclass(frozen=True)
class Range:
    """Accepted range of a number, as metadata of its type."""

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
        return min(max(value, self.low), self.high)


def make_field_error(field: str, value: Any, message: str) -> PydanticCustomError:
    """Return the error of a rule over several fields. `field`: path of the one to change, in the model with the
    rule."""
    return PydanticCustomError("fields", "{message}", {"field": field, "value": value, "message": message})


def _make_range_error(value: Any, accepted: str) -> PydanticCustomError:
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN_LENGTH else f"{shown[:_MAX_SHOWN_LENGTH]}..."
    return PydanticCustomError("out_of_range", "is {given}; {range} is accepted", {"given": shown, "range": accepted})


def _format_number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


Seed = Annotated[int, Range(0, MAX_SEED)]
"""Seeds that random generators, databases and JSON parsers support."""
SignedSeed = Annotated[int, Range(-MAX_SEED - 1, MAX_SEED)]
NumEpochs = Annotated[int, Range(1, 1_000_000)]
Count = Annotated[int, Range(1, 10**12)]
"""Number of steps, tokens or samples."""
Size = Annotated[int, Range(1, 1 << 24)]
"""Batch sizes, e.g. rows of a batch or prompts of a forward pass."""
NumKeptCheckpoints = Annotated[int, Range(1, KEPT_CHECKPOINTS.default)]
NumLayers = Annotated[int, Range(1, MAX_LAYERS)]
Weight = Annotated[float, Range(0.0, 1e6)]
Share = Annotated[float, Range(0.0, 1.0)]
Positive = Annotated[float, Range(1e-30, 1e30)]
"""A positive rate, temperature or limit within the range of float32."""
NonNegative = Annotated[float, Range(0.0, 1e30)]
PeakFlopsPerSecond = Annotated[float, Range(1e6, 1e24)]
"""Peak FLOPs per second of a worker's device in the model's dtype, for the metric `mfu`."""

NumWorkers = Annotated[int, Range(1, MAX_WORKERS)]
NumCores = Annotated[float, Range(MIN_CORES, 10_000.0)]
"""Cores that Ray reserves for a worker or a replica."""
HostMemory = Annotated[int, Range(1 << 20, 1 << 50)]
"""Bytes that Ray reserves for a worker."""


def _validate_gpus(gpus: float, info: ValidationInfo) -> float:
    if gpus == 0 or MIN_GPU <= gpus < 1 or gpus == int(gpus):
        return gpus
    if info.context == STORED_CONTEXT:
        return max(MIN_GPU, gpus if gpus < 1 else math.ceil(gpus))
    raise _make_range_error(gpus, f"0, a share of one GPU from {MIN_GPU} to 1, or a whole number")


NumGpus = Annotated[float, Range(0.0, 10_000.0), AfterValidator(_validate_gpus)]
"""GPUs that Ray reserves for a worker or a replica: a share of one GPU, or whole GPUs."""

Reserved = Annotated[float, Range(0.0, 1e6)]
"""Cores or GPUs of a replica."""
MinReplicas = Annotated[int, Range(0, MAX_REPLICAS)]
MaxReplicas = Annotated[int, Range(1, MAX_REPLICAS)]
NumOngoingRequests = Annotated[float, Range(0.01, 1e6)]
"""Target requests per replica for Ray Serve's autoscaling."""
RetentionDays = Annotated[int, Range(1, 3650)]
CaptureBytes = Annotated[int, Range(1 << 20, 1 << 50)]
DelaySeconds = Annotated[float, Range(0.0, 1e9)]
"""Seconds, 0 or more."""
WaitSeconds = Annotated[float, Range(1e-3, 1e9)]
"""Seconds, above 0."""

THREADS = Range(1, 1024)
NumThreads = Annotated[int, THREADS]
RANKS = Range(1, 64)
NumRanks = Annotated[int, RANKS]
"""Devices of one machine."""
ContextLength = Annotated[int, Range(2, 1 << 30)]
NumTokens = Annotated[int, Range(1, 1 << 30)]
NumStepTokens = Annotated[int, Range(1, 1 << 24)]
"""Tokens per engine step; the engine allocates arrays of this size."""
BlockSize = Annotated[int, Range(1, 1 << 16)]
NumSequences = Annotated[int, Range(1, 1 << 20)]
"""Concurrent sequences; the engine allocates arrays of this size."""
NumWaiting = Annotated[int, Range(0, 1 << 20)]
CacheBytes = Annotated[int, Range(1, 1 << 50)]
PromptBytes = Annotated[int, Range(1, 1 << 30)]
GrammarSeconds = Annotated[float, Range(1e-6, 600.0)]

Name = Annotated[str, Field(max_length=1024)]
"""Name of a model, data set, task or directory."""
Word = Annotated[str, Field(max_length=200)]
"""Name of a revision, split, metric or tag."""
_HOST = re.compile(r"[A-Za-z0-9.:-]+")


def _validate_url(url: str) -> str:
    unusable = next((character for character in url if not "!" <= character <= "~"), None)
    if unusable is not None:  # `urlsplit` drops some of these
        raise ValueError(f"it contains {unusable!a}, which is not valid in URLs; percent-encode it")
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not _HOST.fullmatch(parts.hostname or ""):
        raise ValueError("use an https:// URL")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("remove credentials, query and fragment, which would be stored and shown")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port is not a number from 0 to 65535") from error
    return url


HttpUrl = Annotated[str, Field(max_length=500), AfterValidator(_validate_url)]
"""URL without credentials, query and fragment."""
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
"""Key of `metadata`. No quotes or backslashes, because lists are filtered by JSON paths with the key."""
LabelValue = Annotated[str, Field(max_length=4096)]


class Spec(FiniteBaseModel):
    """Section of a spec. Every number and text has bounds (`tests/unit/specs/test_limits.py`)."""

    @field_validator("*")
    @classmethod
    def _validate_storable(cls, value: Any) -> Any:
        """Refuse text that cannot be stored: NUL and lone surrogates."""
        match value:
            case str():
                _check_storable(value)
            case tuple() | list():
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
    """Whether a name is a path rather than a hub id: `/`, `.` or `~` first, several `/`, or a suffix of `suffixes`."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in suffixes


def find_lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate in `text`, or None. JSON can contain one, UTF-8 cannot."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
