"""Rules on where tenants may publish models, and the job that copies one there. Reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.parents import FoundParent
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.publish import PublicationSpec, PublishSpec
from swiftkv_platform.specs.training import TrainingSpec

_TENANT = "{tenant}"
_FIELD = "publish.to"
_LONGEST_STEM = 90
"""Characters of a model's name that go into the name of a job that publishes it."""


@dataclass(frozen=True)
class PublishRules:
    """Places that the operator opens, since the platform writes there with its own credentials."""

    targets: Sequence[str] = ()
    """Prefixes of `publish.to`, in which `{tenant}` stands for the caller's tenant."""

    def check(self, publish: PublicationSpec, tenant: str) -> None:
        """Raises `InvalidInputError` for a place that is closed."""
        opened = [target.replace(_TENANT, tenant).rstrip("/") for target in self.targets]
        if any(publish.to == each or publish.to.startswith(f"{each}/") for each in opened):
            return
        raise InvalidInputError(
            f"{_FIELD} is {publish.to!r}, where tenant {tenant!r} may not publish; open to it are "
            f"{', '.join(opened) or 'no places (SWIFTKV_PUBLISH_TARGETS)'}",
            field=_FIELD,
            value=publish.to,
        )


NOWHERE = PublishRules()


def copying_spec(found: FoundParent, publish: PublicationSpec) -> JobSpec:
    """The spec of a job that copies a model, and neither trains nor measures."""
    theirs = found.spec
    training = TrainingSpec.model_validate({"from": found.parent.name, "max_steps": 0})
    return JobSpec(
        name=f"publish-{theirs.name[:_LONGEST_STEM]}",
        model=theirs.model,
        swiftkv=theirs.swiftkv,
        distillation=theirs.distillation,
        training=training,
        resources=theirs.resources.model_copy(
            update={"num_workers": 1, "gpus_per_worker": 0, "accelerator_type": None}
        ),
        publish=PublishSpec(to=publish.to, private=publish.private),
    )
