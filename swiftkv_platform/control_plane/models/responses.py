"""JSON responses and request bodies of models, comparisons, aliases and lineage. Knows no route and no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from swiftkv_platform.contract.row_results import ChangedRow, RowComparison
from swiftkv_platform.contract.verdicts import summarize_quality
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentStatus
from swiftkv_platform.control_plane.jobs.responses import AncestorResponse
from swiftkv_platform.control_plane.models.registry import ALIAS_PATTERN
from swiftkv_platform.control_plane.models.repository import Model, Promotion
from swiftkv_platform.control_plane.responses import ResponseModel, limit_page_bytes
from swiftkv_platform.frozen import FiniteBaseModel, FrozenBaseModel
from swiftkv_platform.specs.base import Label, LabelValue
from swiftkv_platform.specs.evaluation import EvaluationSpec
from swiftkv_platform.specs.job import JobName
from swiftkv_platform.specs.training import ParentReference, ResourcesSpec


class CreateModel(FiniteBaseModel):
    """Request to make a model of a checkpoint."""

    from_checkpoint: ParentReference
    """`job_...:STEP`, or the name that OpenAI's API gives the checkpoint (`fine_tuned_model_checkpoint`)."""
    name: JobName | None = None
    """Name of the model; by default, the name of the checkpoint's job and the step."""
    evaluation: EvaluationSpec | None = None
    """Changed fields of the evaluation; other fields come from the checkpoint's job."""
    resources: ResourcesSpec | None = None
    """Changed fields of the resources; other fields come from the checkpoint's job."""
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=32)] | None = None
    """Metadata that replaces the job's."""

    def dump_set_fields(self) -> dict[str, Any]:
        """Return the fields of a job spec that the request sets."""
        given = self.model_dump(mode="json", exclude={"from_checkpoint"}, exclude_unset=True)
        return {name: value for name, value in given.items() if value is not None}


class ImportModel(FiniteBaseModel):
    """Request to import a student that was trained outside of the platform."""

    source: Annotated[str, Field(min_length=1, max_length=1000)]
    """Directory on the control plane's machine, or `s3://` prefix, that the caller's jobs may read."""
    name: JobName | None = None
    """Name of the model; by default, the name in its training spec, or of its directory."""


class ModelResponse(ResponseModel):
    """A distilled model and its origin."""

    id: str
    object: Literal["model"] = "model"
    name: str
    created_at: int
    job_id: str | None
    """Job that trained the model; null for an imported model, whose source is `lineage.imported_from`."""
    attempt: int
    """0 for an imported model."""
    artifact_uri: str
    manifest_digest: str
    size: int
    """Bytes."""
    lineage: dict[str, Any]
    metrics: dict[str, Any]
    verdict: str | None
    """One-sentence summary of the model's evaluation; null if it was not evaluated."""

    @classmethod
    def from_model(cls, model: Model) -> Self:
        return cls.model_validate({**vars(model), "verdict": summarize_quality(model.metrics)})


Reason = Annotated[str, Field(min_length=1, max_length=1000)]


class PromotionRequest(FrozenBaseModel):
    alias: Annotated[str, Field(pattern=ALIAS_PATTERN)] = "production"
    """Alias to promote the model to."""
    reason: Reason
    """Reason of the promotion; stored with its author and time."""
    accept_undecided: bool = False
    """Promote a model despite inconclusive quality gates; otherwise the response is 409."""


class RollbackRequest(FrozenBaseModel):
    reason: Reason
    """Reason of the rollback; stored with its author and time."""


class PromotionResponse(ResponseModel):
    """One change of an alias: a promotion or a rollback."""

    id: str
    object: Literal["promotion"] = "promotion"
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias points to from then on."""
    previous: str | None
    """Model that the alias pointed to before."""
    reason: str
    by: str
    """Name of the caller's key."""
    created_at: int
    version: int
    """Version of the alias from then on; also in `ETag`, for `If-Match`."""


class AliasResponse(ResponseModel):
    """An alias, the model that it points to, and its history."""

    id: str
    """The alias."""
    object: Literal["alias"] = "alias"
    version: int
    """Increases with every promotion and rollback; also in `ETag`, for `If-Match`."""
    model: str
    history: list[PromotionResponse]
    """Oldest first. Only the newest changes if the history is longer than a page of a list."""

    @classmethod
    def from_history(cls, alias: str, history: Sequence[Promotion]) -> Self:
        newest = {"version": history[-1].version, "model": history[-1].model}
        shown = limit_page_bytes(map(PromotionResponse.model_validate, reversed(history)))
        return cls.model_validate({"id": alias, **newest, "history": shown[::-1]})


class LineageDeployment(ResponseModel):
    id: str
    route_prefix: str
    alias: str | None
    status: DeploymentStatus
    unknown_since: int | None
    """As in `GET /deployments/{id}`."""


class LineageResponse(ResponseModel):
    """Lineage from data and teacher to deployments."""

    object: Literal["lineage"] = "lineage"
    data_fingerprint: str | None
    """Fingerprint of the training rows."""
    teacher: str | None
    revision: str | None
    code_version: str | None
    spec: dict[str, Any] | None
    ancestors: list[AncestorResponse]
    """Models and checkpoints that the model was trained from, nearest first."""
    imported_from: str | None
    """Source of an imported model."""
    job_id: str | None
    attempt: int
    model: str
    artifact_uri: str
    manifest_digest: str
    aliases: list[str]
    """Aliases that point to the model now."""
    promotions: list[PromotionResponse]
    """Promotions of aliases to or from the model, oldest first."""
    deployments: list[LineageDeployment]

    @classmethod
    def from_model(
        cls,
        model: Model,
        deployments: Sequence[Deployment],
        history: Sequence[Promotion],
        ancestors: Sequence[AncestorResponse],
    ) -> Self:
        newest = {item.alias: item.model for item in history}
        origin = ("data_fingerprint", "teacher", "revision", "code_version", "spec", "imported_from")
        return cls.model_validate(
            {
                **vars(model),
                **{name: model.lineage.get(name) for name in origin},
                "model": model.id,
                "ancestors": ancestors,
                "aliases": sorted(alias for alias, current in newest.items() if current == model.id),
                "promotions": [item for item in history if model.id in (item.model, item.previous)],
                "deployments": [{**dict(item.spec), **vars(item.state)} for item in deployments],
            }
        )


_STUDENT_SUFFIX = ".student"
"""Suffix of the name of a student's task score."""
_BETTER_DIRECTION: Mapping[str, Literal["lower", "higher"]] = {
    "distilled.perplexity": "lower",
    "distilled.kl": "lower",
    "distilled.top1_agreement": "higher",
    "prefill_flops_ratio": "lower",
    "kv_bytes_ratio": "lower",
}
"""Metrics of `evaluation.json` that comparisons show."""
_COMPARABLE_KEYS = ("teacher", "revision", "data_fingerprint")
"""Keys of the lineage that must be equal for quality to be comparable."""


class ComparedMetricResponse(ResponseModel):
    name: str
    """Path in `evaluation.json`."""
    a: float | None
    b: float | None
    better: Literal["a", "b"] | None


class DifferenceResponse(ResponseModel):
    name: str
    a: Any
    b: Any


class ComparedTaskResponse(ResponseModel):
    """The students of two models on the rows of an evaluation task that both have answered."""

    task: str
    metric: str
    num_rows: int
    """Rows of both models. The figures below are over these rows."""
    num_only_a: int
    """Rows that only model a has answered."""
    num_only_b: int
    a: float | None
    """Mean score of model a; null without common rows."""
    b: float | None
    interval: tuple[float, float] | None
    """95% interval of b - a, from the paired differences of the rows; null for fewer than 30 rows of a score that is
    not within 0..1."""
    num_worse: int
    """Rows on which b has a worse score. For scores of 0 and 1: rows that went from pass to fail."""
    num_better: int

    @classmethod
    def from_comparison(cls, score: Mapping[str, Any], found: RowComparison) -> Self:
        counts = {"num_worse": found.count_changes("worse"), "num_better": found.count_changes("better")}
        return cls.model_validate({**vars(found), **counts, "task": score["task"], "metric": score["metric"]})


class ModeResultResponse(ResponseModel):
    score: float
    answer: str | None
    """Null if the metric generates none."""


class ChangedRowResponse(ResponseModel):
    """A row on which two models have different scores. Long texts are cut."""

    id: str
    """Hash of the prompt."""
    object: Literal["changed_row"] = "changed_row"
    prompt: str
    """End of the prompt."""
    expected: str | None
    """Expected answer; null if the metric needs none."""
    change: Literal["worse", "better"]
    """Whether model b is worse or better than model a."""
    a: ModeResultResponse
    b: ModeResultResponse

    @classmethod
    def from_row(cls, row: ChangedRow) -> Self:
        return cls.model_validate({**vars(row), "id": row.key})


class ComparisonResponse(ResponseModel):
    """Two models side by side."""

    object: Literal["comparison"] = "comparison"
    a: str
    b: str
    figures: list[ComparedMetricResponse]
    differences: list[DifferenceResponse]
    """Differences of teacher, revision and data. If there are any, the quality metrics are not comparable."""
    spec_differences: list[DifferenceResponse]
    """Differences by dotted path of the spec."""
    tasks: list[ComparedTaskResponse]
    """Tasks of both evaluations, compared row by row; only those whose rows both jobs have stored."""


def make_comparison(a: Model, b: Model, tasks: Sequence[ComparedTaskResponse] = ()) -> ComparisonResponse:
    """Compare quality, prefill compute and cache size of two models, and the lineage and specs they were made from.
    `tasks`: comparisons of their rows."""
    return ComparisonResponse(
        a=a.id,
        b=b.id,
        figures=[_compare_metric(name, a, b) for name in [*_BETTER_DIRECTION, *_list_common_scores(a, b)]],
        differences=_list_differences(
            *({name: model.lineage.get(name) for name in _COMPARABLE_KEYS} for model in (a, b))
        ),
        spec_differences=_list_differences(*(_flatten(model.lineage.get("spec") or {}) for model in (a, b))),
        tasks=list(tasks),
    )


def _compare_metric(name: str, a: Model, b: Model) -> ComparedMetricResponse:
    figures = _flatten(a.metrics)
    first, second = _to_number(figures.get(name)), _to_number(_flatten(b.metrics).get(name))
    less_is_better = (
        _BETTER_DIRECTION.get(name) == "lower"
        or figures.get(f"{name.removesuffix(_STUDENT_SUFFIX)}.higher_is_better") is False
    )
    better: Literal["a", "b"] | None = None
    if first is not None and second is not None and first != second:
        better = "a" if (first < second) == less_is_better else "b"
    return ComparedMetricResponse(name=name, a=first, b=second, better=better)


def _list_common_scores(a: Model, b: Model) -> list[str]:
    """Return the names of student scores on the tasks of both evaluations."""
    flat = [_flatten(model.metrics) for model in (a, b)]
    return sorted(name for name in flat[0].keys() & flat[1].keys() if name.endswith(_STUDENT_SUFFIX))


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        elif name == "tasks" and all(isinstance(each, Mapping) and "task" in each for each in value):
            flat.update(_flatten({each["task"]: each for each in value}, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _to_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _list_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[DifferenceResponse]:
    pairs = ((name, a.get(name), b.get(name)) for name in sorted({*a, *b}))
    return [DifferenceResponse(name=name, a=ours, b=theirs) for name, ours, theirs in pairs if ours != theirs]
