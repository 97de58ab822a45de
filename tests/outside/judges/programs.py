"""Programs of other authors as processes, and what they are asked for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
MAX_TOKENS = 400
"""Enough for any answer within a schema; each of its values has a bound."""


class City(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


class Weather(BaseModel):
    """Weather of a city; an answer's form, and a tool's arguments."""

    model_config = ConfigDict(extra="forbid")  # random weights would write further fields without end
    city: City
    days: int = Field(ge=1, le=14)
    celsius: bool


def run(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Return what the program wrote; one that fails is the test's failure, with its own words."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=500.0,
    )
    assert result.returncode == 0, f"{command[:4]} ended with {result.returncode}:\n{result.stdout[-8000:]}"
    return result.stdout
