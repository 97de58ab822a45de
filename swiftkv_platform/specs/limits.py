"""Ranges of all numbers that callers give, in one table for the specs, OpenAPI, the command line and the docs.

Each number of a spec has a finite range, since it reaches shared parts: Ray Serve's controller, schedulers, databases.
A value that is finite here may overflow there: 5 / 1e-320 is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swiftkv_platform.limits import KEPT_CHECKPOINTS
from swiftkv_platform.specs.base import MAX_SEED

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
_LONGEST_SHOWN = 40
"""Characters of a refused value in a message."""
STORED: Mapping[str, Any] = {"stored": True}
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
        return core_schema.with_info_wrap_validator_function(self._checked, bounded)

    def _checked(self, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if error.errors()[0]["type"] not in _OUT_OF_RANGE:
                raise
            if info.context == STORED:
                return self.nearest(value)
            raise _refusal(value, f"{_shown(self.low)} to {_shown(self.high)}") from error

    def nearest(self, value: float) -> float:
        """Return the value, or the nearer end of the range."""
        return min(max(value, self.low), self.high)


def _refusal(value: Any, accepted: str) -> PydanticCustomError:
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
    return PydanticCustomError("out_of_range", "is {given}; {range} is accepted", {"given": shown, "range": accepted})


def _shown(number: float) -> str:
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


def _lendable(gpus: float, info: ValidationInfo) -> float:
    if gpus == 0 or MIN_GPU <= gpus < 1 or gpus == int(gpus):
        return gpus
    if info.context == STORED:
        return max(MIN_GPU, gpus if gpus < 1 else math.ceil(gpus))
    raise _refusal(gpus, f"0, a share of one GPU from {MIN_GPU} to 1, or a whole number")


Gpus = Annotated[float, Range(0.0, 10_000.0), AfterValidator(_lendable)]
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
