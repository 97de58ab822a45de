"""The JSON of aliases, lineage and comparisons. Knows no route and no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from swiftkv_platform.api.schemas import Answer
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.orchestration.comparison import Comparison
from swiftkv_platform.orchestration.deployment import Deployment, DeploymentStatus
from swiftkv_platform.orchestration.job import Model
from swiftkv_platform.orchestration.parents import Ancestor
from swiftkv_platform.orchestration.registry import ALIAS_PATTERN, Promotion

Reason = Annotated[str, Field(min_length=1, max_length=1000)]


class PromotionRequest(FrozenModel):
    alias: Annotated[str, Field(pattern=ALIAS_PATTERN)] = "production"
    """Alias that the model is promoted to."""
    reason: Reason
    """Reason of the promotion; kept with its author and time."""


class RollbackRequest(FrozenModel):
    reason: Reason
    """Reason of the rollback; kept with its author and time."""


class PromotionAnswer(Answer):
    """One change of what an alias stands for."""

    id: str
    object: Literal["promotion"] = "promotion"
    alias: str
    action: Literal["promote", "rollback"]
    model: str
    """Model that the alias stands for from then on."""
    previous: str | None
    """Model that it stood for before."""
    reason: str
    by: str
    """Name of the key that asked."""
    created_at: int
    version: int
    """Version of the alias from then on; `ETag` has it too, for `If-Match`."""

    @classmethod
    def of(cls, promotion: Promotion) -> Self:
        return cls(**{name: getattr(promotion, name) for name in cls.model_fields if name != "object"})


class AliasAnswer(Answer):
    """Model that an alias stands for, and its history."""

    id: str
    """The alias."""
    object: Literal["alias"] = "alias"
    version: int
    """Rises with every promotion and rollback; `ETag` has it too, for `If-Match`."""
    model: str
    history: list[PromotionAnswer]
    """Oldest first."""

    @classmethod
    def of(cls, alias: str, history: Sequence[Promotion]) -> Self:
        newest = history[-1]
        answers = [PromotionAnswer.of(item) for item in history]
        return cls(id=alias, version=newest.version, model=newest.model, history=answers)


class LineageDeployment(Answer):
    id: str
    route_prefix: str
    alias: str | None
    status: DeploymentStatus


class AncestorAnswer(Answer):
    """A model or checkpoint that another one was trained from."""

    name: str
    """`mdl_...` or `job_...:ckpt_...`."""
    job_id: str
    """Job that made it."""


class LineageAnswer(Answer):
    """Lineage from data and teacher to deployments."""

    object: Literal["lineage"] = "lineage"
    data_fingerprint: str | None
    """Fingerprint of the rows that were trained on."""
    teacher: str | None
    revision: str | None
    code_version: str | None
    spec: dict[str, Any] | None
    ancestors: list[AncestorAnswer]
    """Models and checkpoints that it continued from, the nearest first."""
    job_id: str
    attempt: int
    model: str
    artifact_uri: str
    manifest_digest: str
    aliases: list[str]
    """Aliases that stand for it now."""
    promotions: list[PromotionAnswer]
    """Promotions that concern it, oldest first."""
    deployments: list[LineageDeployment]

    @classmethod
    def of(
        cls,
        model: Model,
        deployments: Sequence[Deployment],
        history: Sequence[Promotion],
        ancestors: Sequence[Ancestor],
    ) -> Self:
        newest = {item.alias: item.model for item in history}
        return cls(
            data_fingerprint=model.lineage.get("data_fingerprint"),
            teacher=model.lineage.get("teacher"),
            revision=model.lineage.get("revision"),
            code_version=model.lineage.get("code_version"),
            spec=model.lineage.get("spec"),
            ancestors=[AncestorAnswer(name=each.name, job_id=each.job_id) for each in ancestors],
            job_id=model.job_id,
            attempt=model.attempt,
            model=model.id,
            artifact_uri=model.artifact_uri,
            manifest_digest=model.manifest_digest,
            aliases=sorted(alias for alias, current in newest.items() if current == model.id),
            promotions=[PromotionAnswer.of(item) for item in history if model.id in (item.model, item.previous)],
            deployments=[
                LineageDeployment(
                    id=item.spec.id,
                    route_prefix=item.spec.route_prefix,
                    alias=item.spec.alias,
                    status=item.state.status,
                )
                for item in deployments
            ],
        )


class FigureAnswer(Answer):
    name: str
    """Path in `evaluation.json`."""
    a: float | None
    b: float | None
    better: Literal["a", "b"] | None


class DifferenceAnswer(Answer):
    name: str
    a: Any
    b: Any


class ComparisonAnswer(Answer):
    """Two models side by side."""

    object: Literal["comparison"] = "comparison"
    a: str
    b: str
    figures: list[FigureAnswer]
    differences: list[DifferenceAnswer]
    """Differences of teacher, revision and data: where there are any, quality was not measured alike."""
    spec_differences: list[DifferenceAnswer]
    """Differences by dotted path of the spec."""

    @classmethod
    def of(cls, found: Comparison) -> Self:
        return cls(
            a=found.a.id,
            b=found.b.id,
            figures=[FigureAnswer(name=each.name, a=each.a, b=each.b, better=each.better) for each in found.figures],
            differences=[DifferenceAnswer(name=name, a=a, b=b) for name, (a, b) in found.differences.items()],
            spec_differences=[DifferenceAnswer(name=name, a=a, b=b) for name, (a, b) in found.spec_differences.items()],
        )
