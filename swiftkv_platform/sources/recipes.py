"""Job specs that ship with the package, and the number type that suits this machine's CPU."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.machines import multiplies_bfloat16


def recipes() -> dict[str, Path]:
    """Files of all recipes, by name and in its order."""
    directory = Path(str(files("swiftkv_platform.jobs") / "recipes"))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def recipe(name: str) -> Path:
    """The file of a recipe. Raises `InvalidInputError` for a name that none has."""
    paths = recipes()
    if name not in paths:
        raise InvalidInputError.of("recipe", name, f"; one of these is accepted: {', '.join(paths)}")
    return paths[name]


def suited_to_cpu(document: dict[str, Any]) -> dict[str, Any]:
    """The job spec in float32 where this machine's CPU has no fast products in bfloat16."""
    return document if multiplies_bfloat16() else {**document, "model": {**document["model"], "dtype": "float32"}}
