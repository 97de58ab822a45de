"""The contract between control plane and training cluster: objects below `jobs/{id}/attempts/{n}/`. No I/O here.

    attempt.json                          what to do (`AttemptRequest`), written by the control plane before it submits
    events/{writer}/{sequence}.json       what happened (`contract.events`), numbered from 1 by each writer without gaps
    control/pause.json                    the control plane's stop request that the attempt checkpoints and ends
    control/preempt.json                  the driver's, which has been told to stop: the same, and it ends as failed
    data/...                              prepared rows, until the job has ended; `manifest.json` is written last
    answers/{key}.jsonl                   what the teacher wrote to the prompts of its data, likewise
    starts/{spec name}/...                the calibrated start, likewise; its `manifest.json` is written last
    checkpoints/{name}/...                sharded training state; its `manifest.json` is written last
    evaluation/{checkpoint}/{part}.json   what has been measured of a checkpoint, until the job has ended
    evaluation.json, evaluation.html      the report, also of a model that a gate refused; of a sweep `sweep.*`
    artifact/...                          the distilled model; its `manifest.json` is written last
    tracking/...                          files of a run that W&B has not taken, for `swiftkv jobs wandb-sync`
    logs.txt, logs.json                   the entrypoint's log, saved when the attempt has ended; what of it was kept

Workers have no other channel to the control plane. An attempt writes below its own prefix only, so a stale one writes
where nothing is read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.files import StoredFile
from swiftkv_platform.contract.parents import Parent
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import JobSpec

MANIFEST = "manifest.json"
ADAPTER_LINEAGE = "base_digest"
"""Key of an artifact's lineage that an adapter alone has: the digest of the weights of `teacher`, its base model."""


class AttemptRequest(FrozenModel):
    """Work of one attempt."""

    job_id: str
    attempt: Annotated[int, Field(ge=1)]
    spec: JobSpec
    resume_from: str | None = None
    """Key of the complete checkpoint (its directory) of an earlier attempt to go on from; None starts at step 0."""
    run_id: str
    """W&B run id, the same for every attempt of a job."""
    allowed_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that the job's tenant may read; None opens everything. Workers hold every file
    to them, since a link or a card may have changed since the spec was checked."""
    hub_organizations: tuple[str, ...] | None = None
    """Organisations of the hub whose models and data the tenant may name; None opens the hub."""
    code_tasks: bool = False
    """Whether tasks of the evaluation may run the code that a model writes."""
    files: dict[str, StoredFile] = {}
    """Uploaded files that the spec names, by id."""
    parent: Annotated[Parent | None, Field(exclude_if=lambda value: value is None)] = None
    """Model or checkpoint that `training.from` names, for as long as the job has no checkpoint of its own. Like the
    next, it is left out where there is none, since workers of the version before refuse what they do not know."""
    traceparent: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    """W3C context of the trace that the attempt belongs to."""

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.job_id, self.attempt)


ManifestKind = Literal["artifact", "checkpoint", "data"]


class ManifestFile(FrozenModel):
    """One file of an artifact or checkpoint."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    sha256: str


class Manifest(FrozenModel):
    """List of the files of a directory of objects, which makes it complete: it is written after every file it names."""

    format_version: Literal[1] = 1
    kind: ManifestKind
    files: dict[str, ManifestFile]
    """Files by path relative to the directory, the manifest itself left out."""
    created_at: float
    """Unix seconds."""
    lineage: dict[str, Any] = {}
    """Artifact: job_id, attempt, teacher, revision, data_fingerprint, code_version, spec, the `parent` of a job that
    continued from one, and of an adapter base_digest. Checkpoint: step, tokens, world_size."""
    metrics: dict[str, Any] = {}
    """Artifact: the evaluation report (`evaluation.json`)."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())
