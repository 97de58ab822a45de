"""Base classes of the frozen pydantic models in all rooms."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Values that do not change; unknown keys are refused, and docstrings of fields go into schemas."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class FiniteModel(FrozenModel):
    """Frozen values from outside, such as a request or an operator's file: infinity and NaN are refused."""

    model_config = ConfigDict(allow_inf_nan=False)
