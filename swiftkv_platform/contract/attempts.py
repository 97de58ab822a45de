"""The contract between control plane and training cluster: objects below `jobs/{id}/attempts/{n}/`. No I/O here.

    attempt.json                          the request (`AttemptRequest`), written by the control plane before it submits
    events/{writer}/{sequence}.json       events (`contract.events`), numbered from 1 per writer without gaps
    control/pause.json                    the control plane's request to save a checkpoint and end
    control/preempt.json                  the driver's request to save a checkpoint; the attempt then fails as preempted
    data/...                              prepared rows, until the job has ended; `manifest.json` is written last
    answers/{key}.jsonl                   the teacher's answers to prompts of the data, until the job has ended
    starts/{spec name}/...                the calibrated start, until the job has ended; `manifest.json` is written last
    checkpoints/{name}/...                sharded training state; its `manifest.json` is written last
    evaluation/{checkpoint}/{part}.json   measurements of a checkpoint, until the job has ended
    evaluation.json, evaluation.html      the report, even if a gate failed; `sweep.*` for a sweep
    rows/{name}.jsonl                     results of single rows (`contract.row_results`) of the report's tasks
    artifact/...                          the distilled model; its `manifest.json` is written last
    tracking/...                          W&B files that are not uploaded yet, for `swiftkv jobs wandb-sync`
    logs.txt, logs.json                   the entry point's log, saved when the attempt has ended, and its layout

Workers have no other channel to the control plane. An attempt writes only below its own prefix, so nothing reads what a
superseded attempt still writes. This module also defines uploaded files, parents and the protocol version, which both
sides share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json
from ulid import ULID

from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import drop_former_defaults, fill_former_defaults

MANIFEST = "manifest.json"
JOBS_PREFIX = "jobs"
"""Prefix of all jobs, below which each job has a directory."""
ADAPTER_LINEAGE = "base_digest"
"""Lineage key of adapters only: the digest of the base model's weights."""


class _AttemptObjectKey:
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

    request_key = _AttemptObjectKey("attempt.json")
    preempt_key = _AttemptObjectKey("control/preempt.json")
    """Object that exists while the attempt's machines are being preempted."""
    pause_key = _AttemptObjectKey("control/pause.json")
    """Object that exists if the attempt should pause."""
    events_prefix = _AttemptObjectKey("events")
    curve_key = _AttemptObjectKey("curve.json")
    """Losses by step, for the chart of the evaluation report."""
    checkpoints_prefix = _AttemptObjectKey("checkpoints")
    data_prefix = _AttemptObjectKey("data")
    answers_prefix = _AttemptObjectKey("answers")
    starts_prefix = _AttemptObjectKey("starts")
    evaluation_prefix = _AttemptObjectKey("evaluation")
    row_results_prefix = _AttemptObjectKey("rows")
    artifact_prefix = _AttemptObjectKey("artifact")
    tracking_prefix = _AttemptObjectKey("tracking")
    logs_key = _AttemptObjectKey("logs.txt")

    def event_key(self, writer: str, sequence: int) -> str:
        return f"{self.events_prefix}/{writer}/{sequence:08d}.json"

    def answers_key(self, key: str) -> str:
        return f"{self.answers_prefix}/{key}.jsonl"

    def get_calibrated_start_prefix(self, name: str) -> str:
        """Return the prefix of the calibrated start. `name`: of the job's spec, or of a sweep trial's spec."""
        return f"{self.starts_prefix}/{name}"

    def evaluation_key(self, digest: str, part: str) -> str:
        """Return the key of one part of a checkpoint's evaluation. `digest`: of the checkpoint."""
        return f"{self.evaluation_prefix}/{digest}/{part}.json"

    def row_results_key(self, name: str) -> str:
        """Return the key of the results of a task's rows. `name`: `row_results` of the task in the report."""
        return f"{self.row_results_prefix}/{name}.jsonl"

    def list_attempts_so_far(self) -> tuple[AttemptId, ...]:
        """Return the job's attempts from 1 to this one."""
        return tuple(AttemptId(self.job_id, number) for number in range(1, self.number + 1))


def attempts_prefix(job_id: str) -> str:
    """Return the prefix of all attempts of a job, below which each attempt has a directory named by its number."""
    return f"{JOBS_PREFIX}/{job_id}/attempts"


def trials_prefix(job_id: str) -> str:
    """Return the prefix of all trials of a sweep, below which each trial has a directory laid out like a job's
    store."""
    return f"{JOBS_PREFIX}/{job_id}/trials"


class AttemptRequest(FrozenBaseModel):
    """Input of an attempt, as stored in `attempt.json`."""

    job_id: str
    attempt: Annotated[int, Field(ge=1)]
    spec: JobSpec
    resume_from: str | None = None
    """Key of the directory of the checkpoint to resume from, of an earlier attempt; None starts at step 0."""
    run_id: str
    """W&B run id, the same for every attempt of a job."""
    allowed_roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that the job's tenant may read; None allows all. Workers check every file
    again, since links and data set cards may have changed since the spec was checked."""
    hub_organizations: tuple[str, ...] | None = None
    """Hub organizations whose models and data the tenant may use; None allows all."""
    publish_targets: tuple[str, ...] | None = None
    """Directories and addresses to which the job's tenant may publish models; None allows all. Workers resolve symbolic
    links before they check a target."""
    code_tasks: bool = False
    """Whether evaluation tasks may run code that the model generates."""
    files: dict[str, StoredFile] = {}
    """Uploaded files that the spec names, by id."""
    traffic: dict[str, str] = {}
    """Addresses of the captured traffic that the spec names, by deployment id."""
    parent: Parent | None = None
    """Model or checkpoint that `training.from` names; None once the job has its own checkpoint."""
    traceparent: str | None = None
    """W3C trace context of the attempt."""

    @model_validator(mode="before")
    @classmethod
    def _fill_former_defaults(cls, value: Any) -> Any:
        """Fill in defaults of earlier versions that `to_json` left out."""
        return (
            {**value, "spec": fill_former_defaults(value["spec"])}
            if isinstance(value, dict) and "spec" in value
            else value
        )

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.job_id, self.attempt)

    def to_json(self) -> bytes:
        """Serialize the request without default values, because older workers refuse unknown fields.

        Exception: of `swiftkv.decode_key_value`, the value `shared` is left out, which is the only one they know.
        """
        document = self.model_dump(mode="json", exclude_defaults=True)
        document["spec"] = drop_former_defaults(document["spec"], self.spec)
        return to_json(document)


ManifestKind = Literal["artifact", "checkpoint", "data"]


HELD_OUT_KL = "held_out_kl"
"""Lineage key of a checkpoint: held-out KL of its state in nats, if measured."""


class ManifestFile(FrozenBaseModel):
    """One file of an artifact or checkpoint."""

    size: Annotated[int, Field(ge=0)]
    """Size in bytes."""
    sha256: str


class Manifest(FrozenBaseModel):
    """List of the files of a directory in an object store. It is written last: a directory with a manifest is
    complete."""

    format_version: Literal[1] = 1
    kind: ManifestKind
    files: dict[str, ManifestFile]
    """Files by path relative to the directory, without the manifest itself."""
    created_at: float
    """Unix seconds."""
    lineage: dict[str, Any] = {}
    """Artifact: job_id, attempt, teacher, revision, data_fingerprint, code_version, spec, `parent` if the job continued
    from one, base_digest of an adapter. Checkpoint: step, tokens, world_size and `HELD_OUT_KL`."""
    metrics: dict[str, Any] = {}
    """Evaluation report (`evaluation.json`) of an artifact."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Parent(FrozenBaseModel):
    """Model or checkpoint in the jobs' object store that a job continues from."""

    name: str
    """`mdl_...` or `job_...:ckpt_...`."""
    kind: Literal["model", "checkpoint"]
    key: str
    """Key of the directory in the object store."""
    job_id: str
    """Job that made the parent. For an imported model: a job of another platform, or empty."""
    step: int | None = None
    """Optimizer step of a checkpoint."""
    sha256: str
    """SHA-256 digest of the manifest."""


FILES_PREFIX = "files"
"""Prefix of the uploaded files of all tenants."""
FILE_SUFFIX = ".jsonl"
_FILE_ID = re.compile(r"file-[0-7][0-9A-HJKMNP-TV-Z]{25}")


class StoredFile(FrozenBaseModel):
    """An uploaded file of rows: its object in the object store, and its checksum."""

    uri: str
    """Address of the object."""
    sha256: str
    size: Annotated[int, Field(ge=1)]
    """Size in bytes."""
    columns: tuple[str, ...] = ()
    """Columns of the first row."""


def new_file_id() -> str:
    """Return a new file id; ids sort by creation time."""
    return f"file-{ULID()}"


def is_file_id(name: str) -> bool:
    """Whether a name is an uploaded file's id; no hub repository has this form."""
    return _FILE_ID.fullmatch(name) is not None


def file_key(tenant: str, file_id: str) -> str:
    return f"{FILES_PREFIX}/{tenant}/{file_id}{FILE_SUFFIX}"


def parse_file_time(file_id: str) -> float:
    """Return the creation time in a file id, in Unix seconds."""
    return float(ULID.from_str(file_id.removeprefix("file-")).timestamp)


class StopRequest(IntEnum):
    """Request to a training run. Of several workers' requests the largest value applies to all."""

    NONE = 0
    SAVE = 1
    """Save a checkpoint and continue."""
    LEAVE = 2
    """Save a checkpoint and end, because a worker's machine leaves the cluster; new workers resume from it."""
    STOP = 3
    """Save a checkpoint and end, because the machines are preempted."""
    PAUSE = 4
    """Save a checkpoint and end; a later attempt resumes the job."""


PROTOCOL = 2
"""Version of the protocol between control plane and workers. Increase it if older workers cannot run new requests, or
if a default of the job spec changes, since requests leave defaults out.

1: releases up to 0.1.0, whose drivers do not know `PROTOCOL_OPTION`.
2: `attempt.json` also has the tenant's rules (`allowed_roots` and the fields after it), files, traffic and the parent.
"""

PROTOCOL_OPTION = "--protocol"
"""Driver option with the control plane's protocol version; 1 if missing."""

_UNKNOWN_OPTION = f"unrecognized arguments: {PROTOCOL_OPTION}"
"""Message of `argparse` in a driver of protocol 1."""


def describe_protocol_mismatch(*, workers: int, control_plane: int) -> str:
    """Return the error message for workers of another version."""
    return f"the workers' image has protocol {workers}, the control plane has protocol {control_plane}"


def describe_unknown_field(error: ValidationError) -> tuple[str, str]:
    """Return (first request field that these workers do not know, error message)."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return field, f"the workers' image does not support the job: {field}: {first['msg']}"


def is_from_protocol_1(output: str) -> bool:
    """Whether a failed driver's output says that it does not know `PROTOCOL_OPTION`."""
    return _UNKNOWN_OPTION in output
