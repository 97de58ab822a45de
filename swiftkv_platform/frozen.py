"""Base classes of all frozen pydantic models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenBaseModel(BaseModel):
    """Immutable values: unknown keys are refused, and the fields' docstrings become their descriptions in schemas."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FiniteBaseModel(FrozenBaseModel):
    """Frozen values from outside, such as a request or an operator's file: infinity and NaN are refused."""

    model_config = ConfigDict(allow_inf_nan=False)
