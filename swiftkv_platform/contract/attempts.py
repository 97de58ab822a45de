"""The contract between control plane and training cluster: objects below `jobs/{id}/attempts/{n}/`. No I/O here.

    attempt.json                          what to do (`AttemptRequest`), written by the control plane before it submits
    events/{writer}/{sequence}.json       what happened (`contract.events`), numbered from 1 by each writer without gaps
    control/pause.json                    the control plane's request to save a checkpoint and end
    control/preempt.json                  the same from the driver when it is told to stop; the attempt then fails
    data/...                              prepared rows, until the job has ended; `manifest.json` is written last
    answers/{key}.jsonl                   the teacher's answers to the prompts of its data, likewise
    starts/{spec name}/...                the calibrated start, likewise; its `manifest.json` is written last
    checkpoints/{name}/...                sharded training state; its `manifest.json` is written last
    evaluation/{checkpoint}/{part}.json   measurements of a checkpoint, until the job has ended
    evaluation.json, evaluation.html      the report, even if a gate failed; `sweep.*` for a sweep
    artifact/...                          the distilled model; its `manifest.json` is written last
    tracking/...                          files of a run that W&B has not taken, for `swiftkv jobs wandb-sync`
    logs.txt, logs.json                   the entry point's log, saved when the attempt has ended; which part was kept

Workers have no other channel to the control plane. An attempt writes only below its own prefix, so a stale attempt
writes where nothing is read. This module also has what both sides share about uploaded files, parents and protocol
versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json
from ulid import ULID

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import with_former_defaults, without_former_defaults

MANIFEST = "manifest.json"
ADAPTER_LINEAGE = "base_digest"
"""Lineage key that only adapters have: the digest of the weights of `teacher`, their base model."""


class _Below:
    """Key of an object, or prefix of objects, below the prefix of an attempt."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, attempt: AttemptId, _owner: object = None) -> str:
        return f"{attempt.prefix}/{self._path}"


@dataclass(frozen=True)
class AttemptId:
    """One attempt of a job, with the keys of its objects."""

    job_id: str
    number: int
    """Number of the attempt, from 1."""

    @property
    def prefix(self) -> str:
        """Prefix of all objects that the attempt writes."""
        return f"{attempts_prefix(self.job_id)}/{self.number}"

    @property
    def submission_id(self) -> str:
        """Ray's submission id, unique per attempt, so that Ray refuses to submit an attempt twice."""
        return f"{self.job_id}-{self.number}"

    request_key = _Below("attempt.json")
    preempt_key = _Below("control/preempt.json")
    """Key of an object that exists if the attempt's machines are being taken away."""
    pause_key = _Below("control/pause.json")
    """Key of an object that exists if the attempt is to pause."""
    events_prefix = _Below("events")
    curve_key = _Below("curve.json")
    """Key of the losses by step, which the evaluation's page draws."""
    checkpoints_prefix = _Below("checkpoints")
    data_prefix = _Below("data")
    answers_prefix = _Below("answers")
    starts_prefix = _Below("starts")
    evaluation_prefix = _Below("evaluation")
    artifact_prefix = _Below("artifact")
    tracking_prefix = _Below("tracking")
    logs_key = _Below("logs.txt")

    def event_key(self, writer: str, sequence: int) -> str:
        return f"{self.events_prefix}/{writer}/{sequence:08d}.json"

    def answers_key(self, key: str) -> str:
        return f"{self.answers_prefix}/{key}.jsonl"

    def start_prefix(self, name: str) -> str:
        """Return the prefix of the calibrated start for the spec `name`: the job's own, or a sweep trial's. Trials
        share one store."""
        return f"{self.starts_prefix}/{name}"

    def evaluation_key(self, digest: str, part: str) -> str:
        """Return the key of a part of the evaluation of the checkpoint that `digest` names."""
        return f"{self.evaluation_prefix}/{digest}/{part}.json"

    def so_far(self) -> tuple[AttemptId, ...]:
        """Return the job's attempts up to and including this one, in order."""
        return tuple(AttemptId(self.job_id, number) for number in range(1, self.number + 1))


def attempts_prefix(job_id: str) -> str:
    """Return the prefix of all attempts of a job; each has its objects below its number."""
    return f"jobs/{job_id}/attempts"


def trials_prefix(job_id: str) -> str:
    """Return the prefix of all trials of a sweep; each has a store below its name, laid out like the job's."""
    return f"jobs/{job_id}/trials"


class AttemptRequest(FrozenModel):
    """Everything that an attempt needs to do its work."""

    job_id: str
    attempt: Annotated[int, Field(ge=1)]
    spec: JobSpec
    resume_from: str | None = None
    """Key of the complete checkpoint (its directory) of an earlier attempt to resume from; None starts at step 0."""
    run_id: str
    """W&B run id, the same for every attempt of a job."""
    allowed_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that the job's tenant may read; None opens everything. Workers hold every file
    to them, since a link or a card may have changed since the spec was checked."""
    hub_organizations: tuple[str, ...] | None = None
    """Organisations on the hub whose models and data the tenant may name; None allows all."""
    publish_targets: tuple[str, ...] | None = None
    """Places that the job's tenant may publish to; None opens everything. Workers follow links before they write."""
    code_tasks: bool = False
    """Whether tasks of the evaluation may run the code that a model writes."""
    files: dict[str, StoredFile] = {}
    """Uploaded files that the spec names, by id."""
    parent: Parent | None = None
    """Model or checkpoint that `training.from` names, for as long as the job has no checkpoint of its own."""
    traceparent: str | None = None
    """W3C trace context of the attempt."""

    @model_validator(mode="before")
    @classmethod
    def _names_the_form(cls, value: Any) -> Any:
        """Fill in the paper's form for requests that name no form of the student, see `to_json`."""
        return (
            {**value, "spec": with_former_defaults(value["spec"])}
            if isinstance(value, dict) and "spec" in value
            else value
        )

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.job_id, self.attempt)

    def to_json(self) -> bytes:
        """Serialise the request without default values: workers of an older version refuse unknown fields. They know
        only the paper's form of student, so that form is left out instead."""
        document = self.model_dump(mode="json", exclude_defaults=True)
        document["spec"] = without_former_defaults(document["spec"], self.spec)
        return to_json(document)


ManifestKind = Literal["artifact", "checkpoint", "data"]


HELD_OUT_KL = "held_out_kl"
"""Lineage key of a checkpoint: held-out KL of its state in nats, if measured."""


class ManifestFile(FrozenModel):
    """One file of an artifact or checkpoint."""

    size: Annotated[int, Field(ge=0)]
    """Size in bytes."""
    sha256: str


class Manifest(FrozenModel):
    """List of the files of a directory of objects. It is written after all of them, so its presence makes the directory
    complete."""

    format_version: Literal[1] = 1
    kind: ManifestKind
    files: dict[str, ManifestFile]
    """Files by path relative to the directory, without the manifest itself."""
    created_at: float
    """Unix seconds."""
    lineage: dict[str, Any] = {}
    """Artifact: job_id, attempt, teacher, revision, data_fingerprint, code_version, spec, the `parent` of a job that
    continued from one, and of an adapter base_digest. Checkpoint: step, tokens, world_size, and `HELD_OUT_KL`."""
    metrics: dict[str, Any] = {}
    """Artifact: the evaluation report (`evaluation.json`)."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Parent(FrozenModel):
    """Model or checkpoint in the jobs' object store that a job continues from."""

    name: str
    """`mdl_...` or `job_...:ckpt_...`."""
    kind: Literal["model", "checkpoint"]
    key: str
    """Key of its directory, which has a manifest."""
    job_id: str
    """Job that made it; of an imported model another platform's, or empty."""
    step: int | None = None
    """Step of a checkpoint."""
    sha256: str
    """Digest of its manifest."""


PREFIX = "files"
"""Prefix of all tenants' files in the object store."""
SUFFIX = ".jsonl"
_ID = re.compile(r"file-[0-7][0-9A-HJKMNP-TV-Z]{25}")


class StoredFile(FrozenModel):
    """Rows of an uploaded file in the object store."""

    uri: str
    """Address of the object."""
    sha256: str
    size: Annotated[int, Field(ge=1)]
    """Size in bytes."""
    columns: tuple[str, ...] = ()
    """Columns of its first row."""


def new_file_id() -> str:
    """Make a new file id. Ids sort by creation time."""
    return f"file-{ULID()}"


def is_file_id(name: str) -> bool:
    """Whether a name has the form of an uploaded file's id, which no repository of the hub is given."""
    return _ID.fullmatch(name) is not None


def file_key(tenant: str, file_id: str) -> str:
    return f"{PREFIX}/{tenant}/{file_id}{SUFFIX}"


def made_at(file_id: str) -> float:
    """Unix seconds at which an id was made."""
    return float(ULID.from_str(file_id.removeprefix("file-")).timestamp)


class StopRequest(IntEnum):
    """Stop request from outside a run. The largest one of all workers counts."""

    NONE = 0
    SAVE = 1
    """Save a checkpoint now."""
    LEAVE = 2
    """Save a checkpoint, then end these workers because one has to leave; new ones resume from it."""
    STOP = 3
    """A checkpoint, then the end: the machines are taken away."""
    PAUSE = 4
    """Save a checkpoint, then end: the job will resume later."""


PROTOCOL = 2
"""Version of the protocol between control plane and workers. Raise it if older workers cannot do what they are asked,
or if a default of the job spec changes, since requests leave defaults out.

1: releases up to 0.1.0, whose drivers do not know `PROTOCOL_OPTION`.
2: `attempt.json` has the tenant's rules, which workers keep (`AttemptRequest.allowed_roots` and what follows it),
uploaded files, and what the job continues from.
"""

PROTOCOL_OPTION = "--protocol"
"""Command-line option of the driver with the control plane's version; 1 if it is missing."""

_UNKNOWN_OPTION = f"unrecognized arguments: {PROTOCOL_OPTION}"
"""Text that `argparse` prints in a driver of protocol 1."""


def refusal(*, workers: int, control_plane: int) -> str:
    """Return why workers of an older version do not work for a control plane."""
    return f"the workers' image speaks protocol {workers} and the control plane protocol {control_plane}"


def misunderstanding(error: ValidationError) -> tuple[str, str]:
    """Return the first field of a request that workers of another version do not understand, and an explanation."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return field, f"the workers' image does not understand the job: {field}: {first['msg']}"


def is_from_protocol_1(output: str) -> bool:
    """Whether the output of a failed driver shows that it does not know `PROTOCOL_OPTION`."""
    return _UNKNOWN_OPTION in output
