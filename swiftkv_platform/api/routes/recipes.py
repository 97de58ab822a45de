"""`/recipes`: job specs to begin from."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from swiftkv_platform.api.dependencies import Reader
from swiftkv_platform.api.recipes import recipes
from swiftkv_platform.api.schemas import Answer, ListAnswer, list_answer
from swiftkv_platform.orchestration.ports import Slice
from swiftkv_platform.specs import JobSpec

router = APIRouter(tags=["jobs"])


class RecipeAnswer(Answer):
    """A job spec that ships with the platform."""

    id: str
    object: Literal["recipe"] = "recipe"
    description: str
    """Its purpose, and what is known of its result."""
    text: str
    """The spec as YAML, with comments."""
    spec: JobSpec


@router.get("/recipes")
def list_recipes(_caller: Reader) -> ListAnswer[RecipeAnswer]:
    """List the job specs that ship with the platform, by id."""
    return list_answer(
        Slice(recipes(), has_more=False),
        lambda recipe: RecipeAnswer(id=recipe.id, description=recipe.description, text=recipe.text, spec=recipe.spec),
        lambda recipe: recipe.id,
    )
