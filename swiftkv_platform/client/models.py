"""Objects that the control plane and `/generate` return. Fields added by a newer server are kept."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FINISHED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())


class StatusReason(_Answer):
    code: str
    message: str = ""
    field: str | None = None


class JobProgress(_Answer):
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    percent: float | None = None
    seconds_remaining: float | None = None


class JobPhaseProgress(_Answer):
    part: str = ""
    done: int = 0
    total: int = 0
    seconds_remaining: float | None = None


class JobError(_Answer):
    code: str
    message: str = ""
    param: str | None = None
    """Dotted path of the field that caused the error, if one did."""
    cure: str = ""
    """Advice on which fields to change, with their values and what to use instead."""


class Recipe(_Answer):
    """A job spec that ships with the platform."""

    id: str
    object: str = "recipe"
    description: str = ""
    text: str
    """The spec as YAML, with comments."""
    spec: dict[str, Any] = {}


class Job(_Answer):
    """A distillation job.

    Live: a client has one object per id, and every later answer about that job updates it.
    """

    id: str
    object: str = "distillation.job"
    name: str
    status: str
    status_reason: StatusReason | None = None
    phase: str | None = None
    """Phase of a job on the cluster: `write`, `prepare`, `calibrate`, `train`, `evaluate` or `publish`."""
    phase_progress: JobPhaseProgress | None = None
    """Progress of that phase; for steps of `train` see `progress`."""
    queue_place: int | None = None
    """Position of a queued job among its tenant's, from 1."""
    waiting_since: int | None = None
    """Time since which a queued job waits for resources of the cluster; `status_reason` says for which."""
    created_at: int
    """Unix seconds, as all times here."""
    started_at: int | None = None
    finished_at: int | None = None
    estimated_finish: int | None = None
    progress: JobProgress | None = None
    attempt: int = 0
    spec: dict[str, Any] = {}
    distilled_model: str | None = None
    """Id of the model (`mdl_...`) to deploy."""
    result: dict[str, Any] | None = None
    verdict: str | None = None
    """Sentence that sums up the evaluation of its model."""
    tracking: dict[str, Any] | None = None
    artifact_uri: str | None = None
    submission_id: str | None = None
    cost: float | None = None
    """Cost so far, at the operator's prices."""
    estimated_cost: float | None = None
    error: JobError | None = None
    metadata: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        """Whether the job has reached a final status."""
        return self.status in FINISHED


class JobEvent(_Answer):
    """Something that happened to a job."""

    id: str
    created_at: int
    level: Literal["info", "warn", "error"] = "info"
    type: str
    message: str = ""
    data: dict[str, Any] = {}

    @property
    def time(self) -> float:
        """Unix seconds, by the clock of the machine that wrote the event."""
        return float(self.created_at)


class MetricPoint(_Answer):
    """The metrics of one step; evaluation metrics (`eval_*`) are extra fields."""

    step: int
    tokens: int | None = None
    loss: float | None = None
    logits_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None


class Estimate(_Answer):
    """Answer of `POST /jobs/validate`."""


class AuditEntry(_Answer):
    """A request that changed something, tried to, or was refused access."""

    id: str
    created_at: float
    request_id: str
    actor: str | None = None
    credential: str | None = None
    tenant: str | None = None
    address: str
    method: str
    route: str
    about: str | None = None
    status: int
    left_out: int = 0


class ClusterUse(_Answer):
    """GPUs and CPUs of the jobs' cluster, and those in use by all tenants together."""

    gpus: float
    total_gpus: float
    cpus: float
    total_cpus: float


class Quota(_Answer):
    """Limits of a tenant (None: no limit) and their use."""

    tenant: str
    weight: float
    max_queued_jobs: int | None = None
    max_running_jobs: int | None = None
    max_gpus: float | None = None
    max_cpus: float | None = None
    max_replicas: int | None = None
    queued_jobs: int
    """Jobs that wait or are paused."""
    running_jobs: int
    replicas: int = 0
    """Replicas of its deployments, each deployment counted with its maximum."""
    gpus: float
    """GPUs of jobs and deployments together."""
    cpus: float
    stored_bytes: int = 0
    """Bytes of its uploaded files and models."""
    max_stored_bytes: int | None = None
    stored_jobs: int = 0
    """Jobs, including ended ones."""
    max_stored_jobs: int | None = None
    max_unfinished_jobs: int | None = None
    deployments: int = 0
    """Deployments, including those that are being deleted."""
    max_deployments: int | None = None
    files: int = 0
    """Uploaded files."""
    max_files: int | None = None
    imported_models: int = 0
    max_imported_models: int | None = None
    aliases: int = 0
    max_aliases: int | None = None
    max_alias_changes: int | None = None
    """Most changes in the history of each alias; a further one removes the oldest."""
    pending_deliveries: int = 0
    """Webhook deliveries that wait to be sent."""
    max_pending_deliveries: int | None = None
    held_by_jobs: dict[str, float] = {}
    """`gpus` and `cpus`."""
    held_by_deployments: dict[str, float] = {}
    cluster: ClusterUse | None = None
    """None if Ray does not answer or does not report its nodes."""


class File(_Answer):
    """An uploaded file of rows."""

    id: str
    filename: str
    bytes: int
    rows: int
    format: str
    """Row format of its first row; `prompts` for rows that the teacher has to answer."""
    sha256: str
    created_at: int
    expires_at: int | None = None
    """Time from which no new job may use it."""


class Checkpoint(_Answer):
    """A complete checkpoint of a job."""

    id: str
    attempt: int
    step: int
    key: str
    """Directory in the object store."""
    size: int
    sha256: str
    held_out_kl: float | None = None
    """Held-out KL of its state, in nats; None if it was not measured."""
    distilled_model: str | None = None
    """The job's model, if it was made from this checkpoint."""


class ArtifactFile(_Answer):
    """One file of a job's artifact."""

    path: str
    size: int
    sha256: str
    url: str | None = None
    """Time-limited address (S3) or route of the control plane (local store)."""


class TrackingFile(_Answer):
    """One file of a W&B run that has not been uploaded to W&B."""

    path: str
    size: int
    url: str | None = None
    """Time-limited address (S3) or route of the control plane (local store)."""


class Model(_Answer):
    """A distilled model with its lineage."""

    id: str
    name: str | None = None
    job_id: str | None = None
    """None for an imported model."""
    created_at: int | None = None
    metrics: dict[str, Any] | None = None
    verdict: str | None = None
    """Sentence that sums up its evaluation."""


class Promotion(_Answer):
    """One change of an alias's model."""

    id: str
    alias: str
    action: str
    model: str
    previous: str | None = None
    reason: str
    by: str
    created_at: int
    version: int = 0
    """Version of the alias after the change."""


class Alias(_Answer):
    """An alias, its model, and its history."""

    id: str
    version: int = 0
    """Increases with every promotion and rollback."""
    model: str
    history: list[Promotion] = []


class Lineage(_Answer):
    """Lineage of a model from data and teacher to deployments."""

    model: str
    job_id: str | None = None
    """None for an imported model."""
    imported_from: str | None = None
    data_fingerprint: str | None = None
    teacher: str | None = None
    ancestors: list[dict[str, Any]] = []
    """`{name, job_id}` of the models it was continued from, the nearest first."""
    aliases: list[str] = []
    deployments: list[dict[str, Any]] = []


class Comparison(_Answer):
    """Two models side by side."""

    a: str
    b: str
    figures: list[dict[str, Any]]
    """`{name, a, b, better}`."""
    differences: list[dict[str, Any]] = []
    """Differences of teacher, revision and data; if there are any, the quality figures are not comparable."""
    spec_differences: list[dict[str, Any]] = []


class Deployment(_Answer):
    """A served model."""

    id: str
    version: int = 0
    """Increases with every change."""
    model: str
    status: str
    message: str | None = None
    load_seconds: dict[str, float] = {}
    """Seconds by phase (`fetch`, `load`, `check`) of the replica that took longest to serve the model."""
    url: str | None = None
    """Base URL of `/generate` and the other routes."""


class ReplicaMetrics(_Answer):
    """Metrics of a replica since its start."""

    replica: str
    values: dict[str, float] = {}
    """Values by their names in its `/metrics`, without the prefix `swiftkv:`."""


class DeploymentMetrics(_Answer):
    """Metrics of a deployment's replicas."""

    time: float
    """Unix seconds."""
    replicas: list[ReplicaMetrics] = []


class GenerationChoice(_Answer):
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class Usage(_Answer):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prefill_layers_skipped_tokens: int = 0
    early_exit_tokens: int = 0


class Timings(_Answer):
    queue_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    total_ms: float | None = None


class Generation(_Answer):
    """An answer of `/generate`, or one event of a stream, whose texts are the new parts."""

    id: str = ""
    model: str = ""
    choices: list[GenerationChoice] = []
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text if self.choices else ""
