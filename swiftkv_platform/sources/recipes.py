"""Job specs that ship with the package."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.machines import has_fast_bfloat16

JOB_SCHEMA = Path(str(files("swiftkv_platform.jobs") / "schemas" / "job.json")).resolve()
"""JSON schema of a job spec, for editors."""


def find_recipes() -> dict[str, Path]:
    directory = Path(str(files("swiftkv_platform.jobs") / "recipes"))
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


_EDITOR_COMMENT = "# yaml-language-server:"


def remove_editor_comment(text: str) -> str:
    """Return a recipe without the line that names its schema by a path, which is valid only in this repository."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_EDITOR_COMMENT))


def read_description(text: str) -> str:
    """Return the comment at the beginning of a recipe: its purpose, known results, and `Time: ...`."""
    head = takewhile(lambda line: line.startswith("#"), remove_editor_comment(text).splitlines())
    return " ".join(line.removeprefix("#").strip() for line in head)


def split_description(description: str) -> tuple[str, str]:
    """Return (purpose in one sentence, expected time) of a recipe's description."""
    purpose, time = re.split(r"[.:](?: |$)", description, maxsplit=1)[0], re.search(r"Time: ([^.]+)", description)
    return purpose, time[1] if time else ""


def find_recipe(name: str) -> Path:
    """Return the file of a recipe. Raises `InvalidInputError` for an unknown name."""
    paths = find_recipes()
    if name not in paths:
        raise InvalidInputError.for_field("recipe", name, f"; one of these is accepted: {', '.join(paths)}")
    return paths[name]


def adapt_dtype_to_cpu(document: dict[str, Any]) -> dict[str, Any]:
    """Return the job spec, with dtype float32 if this machine's CPU has no fast bfloat16 matrix products."""
    return document if has_fast_bfloat16() else {**document, "model": {**document["model"], "dtype": "float32"}}
