"""Models and checkpoints that jobs continue from (parents), and checks that a job fits its parent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import ValidationError

from swiftkv_platform.contract.attempts import Parent
from swiftkv_platform.control_plane.jobs.job import Job
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.jobs.responses import AncestorResponse
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.errors import InvalidInputError, NotFoundError
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Boundary
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.base import STORED_CONTEXT
from swiftkv_platform.specs.job import PublicationSpec, PublishSpec
from swiftkv_platform.specs.training import ParentName, TrainingSpec
from swiftkv_platform.storage.attempt_store import AttemptStore, StoredCheckpoint

PARENT_FIELD = "training.from"
_MAX_STEM_CHARS = 80
"""Characters of a job's name that are used in the name of a model of its checkpoint."""
_TRAINABLE_BY_SIZE = ("kv", "qkv", "tail", "all")
"""Values of `distillation.trainable`; each includes what the values before it train."""
_MAX_ANCESTORS = 64
_MAX_NAMED_STEPS = 20
"""Max steps that a message lists."""


@dataclass(frozen=True)
class FoundParent:
    """A parent, and the job that made it."""

    parent: Parent
    job: Job | None
    """None for an imported model."""
    spec: JobSpec
    """Spec of the parent's training; for a sweep's model, the spec of its trial."""
    attempt: int


@dataclass(frozen=True)
class Parents:
    """Looks up parents in database and store."""

    jobs: JobRepository
    models: ModelRepository
    objects: AttemptStore

    def find_parent(self, spec: JobSpec, tenant: str) -> FoundParent | None:
        """Find a spec's parent; None for a spec that starts from its teacher. Raises as `find_by_name`."""
        return None if spec.training.from_ is None else self.find_by_name(spec.training.from_, tenant)

    def find_by_name(self, reference: str, tenant: str) -> FoundParent:
        """Find a parent by its name. Raises `InvalidInputError` if the tenant does not have it, and `StorageError`."""
        name = ParentName.parse(reference)
        if name.job is not None:
            return self._find_checkpoint(name, tenant)
        return self._find_model(name.model or self._find_served_model(str(name.deployment), tenant), tenant)

    def _find_served_model(self, deployment_id: str, tenant: str) -> str:
        try:
            return self.models.get_deployment(deployment_id, tenant=tenant).spec.model
        except NotFoundError as error:
            why = "there is no such deployment; GET /deployments lists them"
            raise _make_parent_error(deployment_id, why) from error

    def list_ancestors(self, job_id: str | None, tenant: str) -> list[AncestorResponse]:
        """List the parents of a job, of the parent's job, and so on, until a job is not stored."""
        found: list[AncestorResponse] = []
        while job_id is not None and len(found) < _MAX_ANCESTORS:
            try:
                name = self.jobs.get(job_id, tenant=tenant).spec.training.from_
                if name is None:
                    break
                parsed = ParentName.parse(name)
                job_id = parsed.job or self.models.get_model(name, tenant=tenant).job_id
            except NotFoundError:  # deleted since
                break
            found.append(AncestorResponse(name=name, job_id=job_id))
        return found

    def _find_model(self, model_id: str, tenant: str) -> FoundParent:
        try:
            model = self.models.get_model(model_id, tenant=tenant)
            job = None if model.job_id is None else self.jobs.get(model.job_id, tenant=tenant)
        except NotFoundError as error:
            raise _make_parent_error(model_id, "there is no such model; GET /models lists them") from error
        if self.objects.read_manifest_at(model.prefix) is None:
            raise _make_parent_error(model_id, "its files are not in the object store; use another model")
        parent = Parent(
            name=model.id,
            kind="model",
            key=model.prefix,
            job_id=model.job_id or str(model.lineage.get("job_id", "")),
            sha256=model.manifest_digest,
        )
        return FoundParent(parent, job, _find_training_spec(model, job), model.attempt)

    def _find_checkpoint(self, name: ParentName, tenant: str) -> FoundParent:
        assert name.job is not None, "a name is a model's or a checkpoint's"
        try:
            job = self.jobs.get(name.job, tenant=tenant)
        except NotFoundError as error:
            raise _make_parent_error(str(name), f"there is no job {name.job}; GET /jobs lists them") from error
        if job.spec.sweep is not None:
            raise _make_parent_error(
                str(name), f"{job.id} is a sweep; use its model, since its trials' checkpoints are not accepted"
            )
        newest_first = self.objects.list_checkpoint_names(job.id)[::-1]
        wanted = [each for each in newest_first if each.step == name.step and name.attempt in (None, each.attempt)]
        newest = next(iter(self.objects.read_checkpoints(wanted, 1)), None)
        if newest is None:
            checkpoints = self.objects.read_checkpoints(newest_first, _MAX_NAMED_STEPS)
            raise _make_parent_error(
                str(name), f"{job.id} has no such checkpoint; {_describe_checkpoint_steps(checkpoints)}"
            )
        parent = Parent(
            name=str(ParentName(job=job.id, step=newest.step, attempt=newest.attempt)),
            kind="checkpoint",
            key=newest.key,
            job_id=job.id,
            step=newest.step,
            sha256=newest.sha256,
        )
        return FoundParent(parent, job, job.spec, newest.attempt)


def make_checkpoint_evaluation_spec(found: FoundParent, changes: Mapping[str, Any]) -> JobSpec:
    """Return the spec of a job that makes a model of a checkpoint: the checkpoint's own spec with no steps. `changes`
    replace `metadata` as a whole, and single fields of other objects.

    Raises `InvalidInputError` for a parent that is already a model, and `ValidationError` for changes that do not fit.
    """
    parent, parent_spec = found.parent, found.spec
    if parent.kind == "model":
        message = f"from_checkpoint is {parent.name!r}, which is a finished model; use a checkpoint (JOB:STEP)"
        raise InvalidInputError(message, field="from_checkpoint", value=parent.name)
    document = parent_spec.model_dump(mode="json")
    document["name"] = f"{parent_spec.name[:_MAX_STEM_CHARS]}-step-{parent.step}"
    document["training"] |= {"from": parent.name, "max_steps": 0, "load_optimizer_state": False}
    document["rollout"] = None
    for name, value in changes.items():
        merges = isinstance(value, Mapping) and name != "metadata"
        document[name] = {**document[name], **value} if merges else value
    return JobSpec.model_validate(document)


def check_parent(spec: JobSpec, found: FoundParent, *, num_hidden_layers: int | None) -> None:
    """Raise `InvalidInputError`, naming the field to change, for a job that cannot continue from its parent.

    Without the teacher's `num_hidden_layers`, l is compared as the specs have it.
    """
    parent, parent_spec = found.parent, found.spec
    of_parent = _list_student_fields(parent_spec, num_hidden_layers)
    for field, ours in _list_student_fields(spec, num_hidden_layers).items():
        if ours != of_parent[field]:
            raise _make_mismatch_error(field, ours, of_parent[field], parent)
    own, trained = spec.distillation.trainable, parent_spec.distillation.trainable
    if _TRAINABLE_BY_SIZE.index(own) < _TRAINABLE_BY_SIZE.index(trained):
        raise _make_mismatch_error("distillation.trainable", own, trained, parent)
    if spec.training.load_optimizer_state:
        _check_optimizer(spec, found)
    if spec.training.max_steps == 0 and parent.kind == "model" and spec.publish.to is None:
        raise InvalidInputError(
            f"training.max_steps is 0, but {PARENT_FIELD} is {parent.name}, a finished model; set training.max_steps "
            "to 1 or more, training.from to a checkpoint, or publish.to to copy the model",
            field="training.max_steps",
            value=0,
        )
    if (
        found.job
        and parent.kind == "checkpoint"
        and found.job.status.is_on_cluster
        and found.attempt == found.job.attempt.number
    ):
        raise _make_parent_error(
            parent.name,
            f"{found.job.id} is {found.job.status}, and may delete its checkpoints while it runs (checkpoint.keep); "
            "pause it, or wait for its end",
        )


def _check_optimizer(spec: JobSpec, found: FoundParent) -> None:
    if found.parent.kind == "model":
        raise InvalidInputError(
            f"training.load_optimizer_state is true, and {PARENT_FIELD} is {found.parent.name}, a model, which has no "
            "optimizer state; set training.from to a checkpoint (JOB:STEP), or load_optimizer_state to false",
            field="training.load_optimizer_state",
            value=True,
        )
    for field in ("optimizer.name", "distillation.trainable"):
        ours, needed = attrgetter(field)(spec), attrgetter(field)(found.spec)
        if ours != needed:
            raise _make_mismatch_error(
                field, ours, needed, found.parent, unless=", or training.load_optimizer_state false"
            )


def _list_student_fields(spec: JobSpec, num_hidden_layers: int | None) -> dict[str, Any]:
    """Return the fields, and their values, that must be equal in a job and its parent. The deep tail has no weights."""
    shape = spec.swiftkv.request.to_comparable(num_hidden_layers)
    del shape["deep_tail"]
    of_model = {"model.name_or_path": spec.model.name_or_path, "model.revision": spec.model.revision}
    return of_model | {f"swiftkv.{name}": value for name, value in shape.items()}


def _find_training_spec(model: Model, job: Job | None) -> JobSpec:
    if job is not None and job.spec.sweep is None:
        return job.spec
    try:
        return JobSpec.model_validate(model.lineage.get("spec"), context=STORED_CONTEXT)
    except ValidationError as error:
        raise _make_parent_error(model.id, "its lineage does not contain the spec of its training") from error


def _describe_checkpoint_steps(checkpoints: Sequence[StoredCheckpoint]) -> str:
    if not checkpoints:
        return "it has none; use a job whose checkpoints have not been removed"
    return f"it has steps {', '.join(map(str, sorted({each.step for each in checkpoints})))}"


def _make_parent_error(name: str, problem: str) -> InvalidInputError:
    return InvalidInputError(f"{PARENT_FIELD} is {name!r}: {problem}", field=PARENT_FIELD, value=name)


def _make_mismatch_error(field: str, ours: Any, needed: Any, parent: Parent, *, unless: str = "") -> InvalidInputError:
    return InvalidInputError.for_field(
        field, ours, f", but {PARENT_FIELD} is {parent.name}, which was trained with {needed!r}; use {needed!r}{unless}"
    )


_TENANT_PLACEHOLDER = "{tenant}"
_PUBLISH_FIELD = "publish.to"
_MAX_MODEL_NAME_CHARS = 90
"""Characters of a model's name that are used in the name of a job that publishes it."""


def list_publish_targets(settings: Settings, tenant: str) -> tuple[str, ...]:
    """Return the prefixes of `publish.to` that the operator opens to a tenant, since the platform writes there with its
    own credentials; its workers check their writes against them."""
    return tuple(target.replace(_TENANT_PLACEHOLDER, tenant).rstrip("/") for target in settings.publish_targets)


def check_publish_target(publish: PublicationSpec, tenant: str, settings: Settings) -> str:
    """Return the target, a directory with its links resolved. Raises `InvalidInputError` for one that is not
    allowed."""
    opened = list_publish_targets(settings, tenant)
    if publish.to.startswith("/"):  # a symbolic link may lead anywhere
        real = os.path.realpath(publish.to)
        if Boundary.from_directories(*(each for each in opened if each.startswith("/"))).contains(real):
            return real
    elif any(publish.to == each or publish.to.startswith(f"{each}/") for each in opened):
        return publish.to
    raise InvalidInputError(
        f"{_PUBLISH_FIELD} is {publish.to!r}, where tenant {tenant!r} may not publish; it may publish to "
        f"{', '.join(opened) or 'no target (SWIFTKV_PUBLISH_TARGETS)'}",
        field=_PUBLISH_FIELD,
        value=publish.to,
    )


def make_publication_spec(found: FoundParent, publish: PublicationSpec) -> JobSpec:
    """Return the spec of a job that copies a model, and neither trains nor evaluates."""
    parent_spec = found.spec
    training = TrainingSpec.model_validate({"from": found.parent.name, "max_steps": 0})
    return JobSpec(
        name=f"publish-{parent_spec.name[:_MAX_MODEL_NAME_CHARS]}",
        model=parent_spec.model,
        swiftkv=parent_spec.swiftkv,
        distillation=parent_spec.distillation,
        training=training,
        resources=parent_spec.resources.model_copy(
            update={"num_workers": 1, "gpus_per_worker": 0, "accelerator_type": None}
        ),
        publish=PublishSpec(to=publish.to, private=publish.private),
    )
