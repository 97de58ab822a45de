"""`/models`: distilled models with their lineage."""

from __future__ import annotations

from fastapi import APIRouter

from swiftkv_platform.api.catalog_schemas import ModelAnswer
from swiftkv_platform.api.dependencies import NewestFirst, Parts, Reader
from swiftkv_platform.api.schemas import ListAnswer, list_answer

router = APIRouter(prefix="/models", tags=["models"])


@router.get("")
def list_models(parts: Parts, caller: Reader, page: NewestFirst) -> ListAnswer[ModelAnswer]:
    """Models, newest first."""
    return list_answer(parts.catalog.list_models(page, tenant=caller.tenant), ModelAnswer.of, lambda model: model.id)


@router.get("/{model_id}")
def get_model(model_id: str, parts: Parts, caller: Reader) -> ModelAnswer:
    """One model."""
    return ModelAnswer.of(parts.catalog.get_model(model_id, tenant=caller.tenant))
