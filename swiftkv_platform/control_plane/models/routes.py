"""`/models` and `/aliases`: distilled models, their lineage, promotion, publication and comparison.

Two models are compared on the rows of an evaluation that both have answered, from the results that their jobs have
stored. The job of a model that continues from the other one has results of both, on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Response, status
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.row_results import (
    MAX_COMPARED_BYTES,
    MAX_FILE_BYTES,
    RowComparison,
    compare_rows,
    find_shared_tasks,
    load_rows,
)
from swiftkv_platform.control_plane.access.callers import (
    DeployingCaller,
    FetchingCaller,
    ReadingCaller,
    SubmittingCaller,
    UploadingCaller,
)
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.components import ComponentsDep, DeletionsDep, ImportParsersDep, SettingsDep
from swiftkv_platform.control_plane.jobs.responses import JobResponse
from swiftkv_platform.control_plane.jobs.routes import JobSubmission, Presenter, set_location_header
from swiftkv_platform.control_plane.merge_patch import IfMatch, set_etag
from swiftkv_platform.control_plane.models.imports import ModelImporter
from swiftkv_platform.control_plane.models.parents import make_checkpoint_evaluation_spec, make_publication_spec
from swiftkv_platform.control_plane.models.registry import ALIAS_PATTERN, RegistryService
from swiftkv_platform.control_plane.models.repository import Model
from swiftkv_platform.control_plane.models.responses import (
    AliasResponse,
    ChangedRowResponse,
    ComparedTaskResponse,
    ComparisonResponse,
    CreateModel,
    ImportModel,
    LineageResponse,
    ModelResponse,
    PromotionRequest,
    PromotionResponse,
    RollbackRequest,
    make_comparison,
)
from swiftkv_platform.control_plane.responses import (
    ListResponse,
    NewestFirst,
    OldestFirst,
    make_list_response,
    make_page_query,
)
from swiftkv_platform.errors import InvalidInputError, NotFoundError, ObjectNotFoundError
from swiftkv_platform.sources.untrusted_files import UnusableFileError
from swiftkv_platform.specs.job import PublicationSpec
from swiftkv_platform.storage.object_store import ObjectStore, read_small_object
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.limiters import ConnectedClient

Score = Mapping[str, Any]
"""Entry of `tasks` of a report."""


@dataclass(frozen=True)
class _Results:
    """Results of a model's student, and the job that has them."""

    job: Model
    report: Mapping[str, Any]
    """Report with the scores as `tasks`."""


@dataclass(frozen=True)
class RowComparisons:
    """Comparisons of models `a` and `b`, of the same tenant."""

    store: ObjectStore
    a: Model
    b: Model

    def list_tasks(self) -> list[ComparedTaskResponse]:
        """Return the comparison of each shared task with stored rows, as far as `MAX_COMPARED_BYTES` allow."""
        return [ComparedTaskResponse.from_comparison(score, found) for score, found in self._iter_comparisons()]

    def list_changed_rows(self, task: str, change: str | None, page: PageQuery) -> Page[ChangedRowResponse]:
        """Return a page of the rows of a task with different scores, the largest difference first (last in descending
        order). `change`: only rows on which b is `worse` or `better`.

        Raises `NotFoundError` for a task that the models do not share, and `InvalidInputError` for an unknown row
        after which the page begins.
        """
        pair = next((pair for pair in self._find_pairs() if pair[0]["task"] == task), None)
        found = None if pair is None else self._compare(*pair, max_bytes=2 * MAX_FILE_BYTES)
        if found is None:
            raise NotFoundError(
                f"task is {task!r}, but only tasks with stored rows of both models can be compared; GET "
                f"/models/{self.a.id}/compare/{self.b.id} lists these tasks",
                field="task",
                value=task,
            )
        rows = [row for row in found[0].changed if change in (None, row.change)]
        rows = rows[::-1] if page.order == "desc" else rows
        begin = 0
        if page.after is not None:
            keys = [row.key for row in rows]
            if page.after not in keys:
                message = f"after is {page.after!r}, which is no row of this list; use last_id of the previous page"
                raise InvalidInputError(message, field="after", value=page.after)
            begin = keys.index(page.after) + 1
        end = begin + page.limit
        return Page([ChangedRowResponse.from_row(row) for row in rows[begin:end]], has_more=len(rows) > end)

    def _find_pairs(self) -> list[tuple[Score, Score]]:
        a, b = self._results
        return find_shared_tasks(a.report, b.report)

    @property
    def _results(self) -> tuple[_Results, _Results]:
        a, b = _Results(self.a, self.a.metrics), _Results(self.b, self.b.metrics)
        for model, other in ((self.a, self.b), (self.b, self.a)):
            parent, scores = model.lineage.get("parent"), model.metrics.get("parent_tasks")
            if scores and isinstance(parent, Mapping) and parent.get("name") == other.id:
                of_parent = _Results(model, {"tasks": scores})
                return (a, of_parent) if model is self.a else (of_parent, b)
        return a, b

    def _iter_comparisons(self) -> Iterator[tuple[Score, RowComparison]]:
        left = 2 * MAX_COMPARED_BYTES
        for pair in self._find_pairs():
            found = self._compare(*pair, max_bytes=left)
            if found is not None:
                left -= found[1]
                yield pair[0], found[0]

    def _compare(self, ours: Score, theirs: Score, *, max_bytes: int) -> tuple[RowComparison, int] | None:
        """Return (comparison, bytes read); None if the rows of either model are missing, unreadable or too large."""
        files = []
        for results, score in zip(self._results, (ours, theirs), strict=True):
            job = results.job
            if job.job_id is None:  # an imported model has a report, but no job
                return None
            key = AttemptId(job.job_id, job.attempt).row_results_key(score["row_results"])
            try:
                files.append(read_small_object(self.store, key, min(MAX_FILE_BYTES, max_bytes)))
            except (ObjectNotFoundError, UnusableFileError):
                return None
            max_bytes -= len(files[-1])
        try:
            a, b = map(load_rows, files)
        except ValueError:  # of another version of the workers
            return None
        better = ours.get("higher_is_better", True) is not False
        return compare_rows(a, b, higher_is_better=better), sum(map(len, files))


router = APIRouter(tags=["models"], route_class=BodyRoute)


def _get_registry(parts: ComponentsDep) -> RegistryService:
    return RegistryService(parts.registry, clock=parts.clock, policies=parts.policies)


Service = Annotated[RegistryService, Depends(_get_registry)]
Alias = Annotated[str, Path(pattern=ALIAS_PATTERN)]

_MAX_LINEAGE_ITEMS = 1000
"""Max deployments, and max alias changes, in a model's lineage."""
_MAX_LISTED_CHANGES = 20
"""Max changes of each alias in a list."""


@router.get("/models")
def list_models(parts: ComponentsDep, caller: ReadingCaller, page: NewestFirst) -> ListResponse[ModelResponse]:
    """List models, newest first."""
    found = parts.registry.list_models(page, tenant=caller.tenant)
    return make_list_response(found, ModelResponse.from_model)


@router.post("/models", status_code=status.HTTP_201_CREATED)
def create_model(
    body: CreateModel,
    parts: ComponentsDep,
    caller: SubmittingCaller,
    submission: JobSubmission,
    presenter: Presenter,
    response: Response,
) -> JobResponse:
    """Submit a job that evaluates a checkpoint and registers it as a model. Returns the job.

    The job trains nothing, takes the rest of its spec from the checkpoint's job, and counts toward quotas as any
    other job. After it has succeeded, its `distilled_model` is the model.
    """
    found = parts.parents.find_by_name(body.from_checkpoint, caller.tenant)
    try:
        spec = make_checkpoint_evaluation_spec(found, body.dump_set_fields())
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error
    return set_location_header(response, presenter.render(submission.submit(spec)))


@router.post("/models/import", status_code=status.HTTP_201_CREATED)
def import_model(
    body: ImportModel,
    parts: ComponentsDep,
    settings: SettingsDep,
    parsers: ImportParsersDep,
    caller: UploadingCaller,  # before the client, since watching it reads from its connection
    client: ConnectedClient,
) -> ModelResponse:
    """Copy a student that was trained outside of this platform into the object store, and register it as a model.

    If the directory has a `manifest.json`, as written by `swiftkv distill`, its digests are checked, and its lineage
    and report are kept. The request lasts until the copy is complete; the copy stops if the client disconnects.
    """
    imports = ModelImporter(parts, settings, client, parsers)
    with parsers.limiter.hold(caller.tenant, caller.name):
        return ModelResponse.from_model(imports.import_model(body.source, body.name, caller))


@router.get("/models/{model_id}")
def get_model(model_id: str, caller: ReadingCaller, service: Service) -> ModelResponse:
    """Return a model. All routes except `DELETE` accept, instead of a model's id, its alias, its job's id, or its
    name if it is unique."""
    return ModelResponse.from_model(service.find_model(model_id, caller.tenant))


@router.get("/models/{model_id}/lineage")
def get_lineage(model_id: str, parts: ComponentsDep, caller: ReadingCaller, service: Service) -> LineageResponse:
    """Return a model's lineage, from the data and the teacher to the deployments that serve it."""
    model = service.find_model(model_id, caller.tenant)
    deployments = parts.deployments.list_deployments_of_model(model.id, tenant=caller.tenant, limit=_MAX_LINEAGE_ITEMS)
    history = parts.registry.list_model_promotions(model.id, tenant=caller.tenant, limit=_MAX_LINEAGE_ITEMS)
    return LineageResponse.from_model(
        model, deployments, history, parts.parents.list_ancestors(model.job_id, caller.tenant)
    )


@router.get("/models/{model_id}/compare/{other_id}")
def compare_models(
    model_id: str, other_id: str, parts: ComponentsDep, caller: FetchingCaller, service: Service
) -> ComparisonResponse:
    """Compare two models: quality, prefill compute, cache size, the rows of shared evaluation tasks, and how their
    jobs differ."""
    a, b = (service.find_model(each, caller.tenant) for each in (model_id, other_id))
    return make_comparison(a, b, RowComparisons(parts.objects, a, b).list_tasks())


@router.get("/models/{model_id}/compare/{other_id}/rows/{task:path}")
def list_changed_rows(
    model_id: str,
    other_id: str,
    task: str,
    parts: ComponentsDep,
    caller: FetchingCaller,
    service: Service,
    page: OldestFirst,
    change: Annotated[
        Literal["worse", "better"] | None, Query(description="only rows on which the other model is worse, or better")
    ] = None,
) -> ListResponse[ChangedRowResponse]:
    """List the rows of a task that went from pass to fail and back between two models, or for other scores all rows
    with different scores, the largest difference first."""
    a, b = (service.find_model(each, caller.tenant) for each in (model_id, other_id))
    found = RowComparisons(parts.objects, a, b).list_changed_rows(task, change, page)
    return make_list_response(found, lambda row: row, order=page.order)


@router.post("/models/{model_id}/publish", status_code=status.HTTP_201_CREATED)
def publish_model(
    model_id: str,
    body: PublicationSpec,
    service: Service,
    parts: ComponentsDep,
    caller: SubmittingCaller,
    submission: JobSubmission,
    presenter: Presenter,
    response: Response,
) -> JobResponse:
    """Submit a job that copies the model to a hub repository, a bucket or a directory. Returns the job. Copying a model
    again changes nothing.

    Returns 422 if the operator allows no such target.
    """
    model = service.find_model(model_id, caller.tenant)
    spec = make_publication_spec(parts.parents.find_by_name(model.id, caller.tenant), body)
    return set_location_header(response, presenter.render(submission.submit(spec)))


@router.post("/models/{model_id}/promote")
def promote_model(
    model_id: str,
    body: PromotionRequest,
    caller: DeployingCaller,
    service: Service,
    expected: IfMatch,
    response: Response,
) -> PromotionResponse:
    """Point an alias to the model. Deployments that follow the alias swap to it without failed requests.

    Returns 409 if another model is promoted at the same time, or if the model has an inconclusive quality gate and
    the request does not set `accept_undecided`. With `If-Match`, the alias is changed only at that version (else
    412).
    """
    promotion = service.promote(
        model_id,
        body.alias,
        tenant=caller.tenant,
        by=caller.name,
        reason=body.reason,
        expected=expected,
        accept_undecided=body.accept_undecided,
    )
    set_etag(response, promotion.version)
    return PromotionResponse.model_validate(promotion)


@router.delete("/models/{model_id}", status_code=status.HTTP_204_NO_CONTENT)
def delete_model(model_id: str, deletions: DeletionsDep, parts: ComponentsDep, caller: DeployingCaller) -> None:
    """Delete a model. Its job remains; retention removes its objects in its next round.

    Returns 409 if the model is deployed, in the history of an alias, or used by a job; the response says by which.
    """
    deletions.delete_model(model_id, by=caller.name, now=parts.clock(), tenant=caller.tenant)


@router.get("/aliases")
def list_aliases(
    parts: ComponentsDep, caller: ReadingCaller, page: Annotated[PageQuery, Depends(make_page_query(100, "asc"))]
) -> ListResponse[AliasResponse]:
    """List aliases by name, with their model and newest changes; `GET /aliases/{alias}` returns all changes."""
    found = parts.registry.list_aliases(page, tenant=caller.tenant, newest=_MAX_LISTED_CHANGES)
    return make_list_response(found, lambda history: AliasResponse.from_history(history[-1].alias, history))


@router.get("/aliases/{alias}")
def get_alias(alias: Alias, caller: ReadingCaller, service: Service, response: Response) -> AliasResponse:
    """Return an alias with its history, or the newest part of a long history."""
    found = AliasResponse.from_history(alias, service.get_history(alias, caller.tenant))
    set_etag(response, found.version)
    return found


@router.post("/aliases/{alias}/rollback")
def roll_back(
    alias: Alias,
    body: RollbackRequest,
    caller: DeployingCaller,
    service: Service,
    expected: IfMatch,
    response: Response,
) -> PromotionResponse:
    """Roll the alias, and the deployments that follow it, back to the previous model.

    `If-Match` works as for promotions.
    """
    promotion = service.roll_back(alias, tenant=caller.tenant, by=caller.name, reason=body.reason, expected=expected)
    set_etag(response, promotion.version)
    return PromotionResponse.model_validate(promotion)
