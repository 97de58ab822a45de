"""Engine options of deployments, checked before a replica is started that would refuse them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from swiftkv_platform.errors import InvalidInputError, did_you_mean
from swiftkv_platform.specs.engine import EngineConfig

_MOST = (1 << 63) - 1


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raises `InvalidInputError` for the first option that no engine knows, or with a value that none takes."""
    try:
        EngineConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        options_known = sorted(EngineConfig.model_fields)
        nearest = did_you_mean(str(first["loc"][-1]), options_known)
        known = f"unknown option{nearest}; accepted here: {', '.join(options_known)}"
        place = ".".join(["engine", *map(str, first["loc"])])
        why = known if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidInputError(f"{place}: {why}", field=place, value=first["input"]) from error
    for name, value in options.items():
        if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= _MOST):
            raise InvalidInputError(
                f"engine.{name} is {value:g}; a finite number of at most 63 bits would do",
                field=f"engine.{name}",
                value=str(value),
            )
