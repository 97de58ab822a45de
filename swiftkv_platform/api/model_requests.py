"""Requests that make models of checkpoints. Knows no route and no database."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.specs.base import Label, LabelValue
from swiftkv_platform.specs.evaluation import EvaluationSpec
from swiftkv_platform.specs.job import JobName, ResourcesSpec
from swiftkv_platform.specs.training import ParentReference


class CreateModel(FiniteModel):
    """A model made of a checkpoint."""

    from_checkpoint: ParentReference
    """`job_...:STEP`, or the name that OpenAI's API gives the checkpoint (`fine_tuned_model_checkpoint`)."""
    name: JobName | None = None
    """Name of the model; by default that of the checkpoint's job and the step."""
    evaluation: EvaluationSpec | None = None
    """Fields of the evaluation that differ from the job's; the others stay."""
    resources: ResourcesSpec | None = None
    """Fields of the resources that differ, likewise."""
    metadata: Annotated[dict[Label, LabelValue], Field(max_length=32)] | None = None
    """Metadata instead of the job's."""

    def changes(self) -> dict[str, Any]:
        """Return what the request names of a job spec."""
        given = self.model_dump(mode="json", exclude={"from_checkpoint"}, exclude_unset=True)
        return {name: value for name, value in given.items() if value is not None}
