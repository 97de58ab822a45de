"""Job specs that ship with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.machines import has_fast_bfloat16


def find_recipes() -> dict[str, Path]:
    directory = Path(str(files("swiftkv_platform.jobs") / "recipes"))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """Return the file of a recipe. Raises `InvalidInputError` for an unknown name."""
    paths = find_recipes()
    if name not in paths:
        raise InvalidInputError.for_field("recipe", name, f"; one of these is accepted: {', '.join(paths)}")
    return paths[name]


def adapt_dtype_to_cpu(document: dict[str, Any]) -> dict[str, Any]:
    """Return the job spec, with dtype float32 if this machine's CPU has no fast bfloat16 matrix products."""
    return document if has_fast_bfloat16() else {**document, "model": {**document["model"], "dtype": "float32"}}
