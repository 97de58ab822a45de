"""Base class of every part of a spec, and a check of what a name in it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def looks_like_a_path(name: str, suffixes: Collection[str] = ()) -> bool:
    """Whether a name that nothing here has cannot be a hub id either; `suffixes` mark files."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in suffixes
