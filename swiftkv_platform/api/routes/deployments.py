"""`/deployments`: models in service."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from swiftkv_platform.api.catalog_schemas import DeploymentAnswer, DeploymentRequest
from swiftkv_platform.api.dependencies import NewestFirst, Parts, TheCaller, TheSettings
from swiftkv_platform.api.schemas import ListAnswer, list_answer
from swiftkv_platform.orchestration.service import DeploymentService

router = APIRouter(prefix="/deployments", tags=["deployments"])


def _service(parts: Parts) -> DeploymentService:
    return DeploymentService(parts.catalog, clock=parts.clock)


@router.post("", status_code=status.HTTP_201_CREATED)
def create_deployment(
    body: DeploymentRequest, parts: Parts, caller: TheCaller, settings: TheSettings, response: Response
) -> DeploymentAnswer:
    """Serve a model. Answers at once; `status` becomes `running` when it takes requests."""
    deployment = _service(parts).create(caller, **dict(body))
    response.headers["Location"] = f"/deployments/{deployment.spec.id}"
    return DeploymentAnswer.of(deployment, settings.serve_url)


@router.get("")
def list_deployments(
    parts: Parts, caller: TheCaller, settings: TheSettings, page: NewestFirst
) -> ListAnswer[DeploymentAnswer]:
    """Deployments, newest first."""
    found = parts.catalog.list_deployments(page, tenant=caller.tenant)
    return list_answer(found, lambda item: DeploymentAnswer.of(item, settings.serve_url), lambda item: item.id)


@router.get("/{deployment_id}")
def get_deployment(deployment_id: str, parts: Parts, caller: TheCaller, settings: TheSettings) -> DeploymentAnswer:
    """One deployment."""
    found = parts.catalog.get_deployment(deployment_id, tenant=caller.tenant)
    return DeploymentAnswer.of(found, settings.serve_url)


@router.delete("/{deployment_id}", status_code=status.HTTP_202_ACCEPTED)
def delete_deployment(deployment_id: str, parts: Parts, caller: TheCaller, settings: TheSettings) -> DeploymentAnswer:
    """Stop serving. It is `deleting` until its replicas are gone, and then unknown."""
    return DeploymentAnswer.of(_service(parts).delete(deployment_id, caller), settings.serve_url)
