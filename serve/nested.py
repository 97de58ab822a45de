"""Parts of a body as clients of many versions write them: what is not known of them is kept apart, and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, model_validator

from swiftkv_platform.frozen import FrozenModel

MAX_NAME_LENGTH = 64
"""Characters of a name that are repeated; a longer one resembles no field."""


def without_nulls(part: Any) -> Any:
    """An object without its keys that are null."""
    return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


class Nested(FrozenModel, strict=True, extra="allow"):
    """Part of a body. `null` is the same as leaving a key out; unknown keys are without effect (`unknown_keys`)."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        return without_nulls(part)


def unknown_keys(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the keys below `value` that no model has: `messages.parsed`, whichever message it is of."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from unknown_keys(getattr(value, name), f"{path}{name}.")
        if path:
            yield from (path + key for key in value.model_extra or ())
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):  # a prompt has many numbers
        for one in value:
            yield from unknown_keys(one, path)
