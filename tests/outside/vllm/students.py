"""Directories with tiny random students, as `swiftkv_platform.model` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swiftkv_platform.model import convert
from tests.tiny_models import disturb, family_teacher

SHAPE = {"num_key_value_layers": 2, "key_value_group_size": 2}
"""l and g for 5 layers: the last group is short."""


def make_student(
    directory: Path, name: str = "llama", *, shape: dict[str, int] = SHAPE, seed: int = 3, **changes: Any
) -> Path:
    """A student of `FAMILY_CONFIGS[name]` whose SwiftKV weights are not its teacher's."""
    student = disturb(convert(family_teacher(name, seed, **changes), **shape))
    student.save_pretrained(directory)
    return directory
