"""`/recipes`: job specs that ship with the platform, as starting points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from typing import Literal

import yaml
from fastapi import APIRouter

from swiftkv_platform.control_plane.access.callers import Reader
from swiftkv_platform.control_plane.http.answers import Answer, ListAnswer, OldestFirst, list_answer
from swiftkv_platform.control_plane.jobs.answers import page_of
from swiftkv_platform.sources.recipes import recipes as shipped_recipes
from swiftkv_platform.specs import JobSpec

router = APIRouter(tags=["jobs"])

_EDITOR_LINE = "# yaml-language-server:"


class RecipeAnswer(Answer):
    """A job spec that ships with the platform."""

    id: str
    object: Literal["recipe"] = "recipe"
    description: str
    """Its purpose, and known results."""
    text: str
    """The spec as YAML, with comments."""
    spec: JobSpec


@cache
def recipes() -> Sequence[RecipeAnswer]:
    """Return all recipes by id; they are part of the installation, and read once."""
    return [_recipe(name, path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()]


def _recipe(name: str, text: str) -> RecipeAnswer:
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_EDITOR_LINE))
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    description = " ".join(line.removeprefix("#").strip() for line in head)
    spec = JobSpec.model_validate(yaml.safe_load(text))
    return RecipeAnswer(id=name, description=description, text=text, spec=spec)


@router.get("/recipes")
def list_recipes(_caller: Reader, page: OldestFirst) -> ListAnswer[RecipeAnswer]:
    """List the job specs that ship with the platform, by id."""
    kept = page_of(recipes(), lambda recipe: recipe.id, page)
    return list_answer(kept, lambda recipe: recipe, order=page.order)
