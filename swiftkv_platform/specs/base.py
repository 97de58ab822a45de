"""Base class of every part of a spec, and a check of what a name in it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from swiftkv_platform.errors import lone_surrogate
from swiftkv_platform.frozen import FiniteModel

MOST_WORKERS = 100_000
"""Workers of a job; what an operator allows is usually far less."""


Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Whatever a random generator, a database and JSON's other readers can hold."""
Count = Annotated[int, Field(ge=1, le=10**12)]
"""Steps, tokens, samples: more than any cluster will see, and few enough to be multiplied by each other."""
Size = Annotated[int, Field(ge=1, le=1 << 24)]
"""Number of things held at a time: rows of a batch, prompts of a pass."""
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""Layers of a model, or a part of them."""
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
Amount = Annotated[float, Field(ge=0.0, le=10_000.0)]
"""Cores or devices of one worker."""
Weight = Annotated[float, Field(ge=0.0, le=1e6)]

Name = Annotated[str, Field(max_length=1024)]
"""A model, data set, task or directory."""
Word = Annotated[str, Field(max_length=200)]
"""A revision, split, metric or tag."""
Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
"""A key of `metadata`. Quotes and backslashes would end a JSON path, by which lists are filtered."""
LabelValue = Annotated[str, Field(max_length=4096)]


class Spec(FiniteModel):
    """Part of a spec. Every number and text in it has bounds (`tests/unit/test_spec_bounds.py`)."""

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
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in suffixes
