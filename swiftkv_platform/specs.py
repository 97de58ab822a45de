"""The job spec: what a user asks for, and nothing about how it is done. Frozen, torch-free, no I/O.

Every key of the YAML or JSON spec is a field here; unknown keys are refused. Checks that need the model's configuration
(does l lie below its number of layers?) are made where that configuration is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.webhooks import WebhookSpec

_MOST_TRIALS = 256

BUILTIN_TEACHER = "builtin:python-5m"
"""The teacher that ships with the package, in `swiftkv_platform/demo/teacher`."""
BUILTIN_DATA = "builtin:python-stdlib"
"""The sources of the interpreter's standard library."""


def looks_like_a_path(name: str, suffixes: Collection[str] = ()) -> bool:
    """Whether a name that nothing here has cannot be a hub id either; `suffixes` mark files."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in suffixes


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSpec(_Spec):
    """The teacher."""

    name_or_path: Annotated[str, Field(min_length=1)] = BUILTIN_TEACHER
    """Hub id, local directory, `s3://` prefix, or `builtin:python-5m` (the teacher that ships with the package)."""
    revision: str | None = None
    """Hub revision."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of forward and backward; trained weights and optimizer state are always float32."""


class SwiftKVSpec(_Spec):
    """The transformation (paper, section 3)."""

    num_key_value_layers: Annotated[int, Field(ge=1)] | None = None
    """l: layers that compute their own KV, 1..L-1. Exclusive with `prefill_reduction`."""
    prefill_reduction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the layers that prefill skips; l = L - round(share x L). Default 0.5 where neither is given."""
    key_value_group_size: Annotated[int, Field(ge=1)] = 1
    """AcrossKV: consecutive layers that share one KV cache layer; 1 shares nothing."""
    sharing: Literal["gqa", "mqa", "mha"] = "gqa"
    """Key-value heads of layers >= l (paper, appendix C): the teacher's, one, or one for each query head. The cache
    grows with them; the g of equal size is `planning.equal_cache_group_size`."""
    early_exit: bool = False
    """Train an exit head at layer l."""
    initialization: Literal["calibrated", "copied"] = "calibrated"
    """How `{k,v}_proj_swiftkv` start: ridge regression on the teacher's own K and V, or the mean of its weights."""
    calibration_tokens: Annotated[int, Field(ge=1024)] = 16384
    """Tokens used for the calibrated start."""

    @model_validator(mode="after")
    def _one_way_to_say_l(self) -> Self:
        if self.num_key_value_layers is not None and self.prefill_reduction is not None:
            raise ValueError("give num_key_value_layers or prefill_reduction, not both")
        return self


class CompletionSpec(_Spec):
    """How the teacher answers the prompts of a source."""

    max_tokens: Annotated[int, Field(ge=1)] = 512
    """Most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Samples among the fewest tokens whose probabilities sum to at least this."""
    num_completions: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt."""
    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of a text, only so many tokens from its beginning are the prompt."""
    seed: Annotated[int, Field(ge=0)] = 0
    """With the prompt's own tokens it decides every draw."""


class DataSourceSpec(_Spec):
    """One data set."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """Hub id, file (`.jsonl`, `.json`, `.parquet`, `.txt`, `.py`), directory of such files, `s3://` object or prefix,
    or `builtin:python-stdlib` (the sources of the interpreter's standard library)."""
    split: str = "train"
    """Split of a hub or built-in data set, or of a directory laid out as one."""
    sample_count: Annotated[int, Field(ge=1)] | None = None
    """Take only so many samples, chosen by the seed."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of this source relative to the others: 2.0 repeats each sample twice, 0.5 keeps half."""
    format: Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Row format; `auto` detects it from the columns."""
    complete: CompletionSpec | None = None
    """Rows are prompts, which the teacher answers before training; answers that they bring are left out. Conversations
    are answered at their last user message, texts are continued."""
    streaming: bool = False
    """Keep nothing of a hub or `s3://` source on disk but the tokens made of it. `sample_count` then takes the first so
    many."""


class DataSpec(_Spec):
    """Training text."""

    sources: Annotated[tuple[DataSourceSpec, ...], Field(min_length=1)] = (DataSourceSpec(name_or_path=BUILTIN_DATA),)
    max_length: Annotated[int, Field(ge=16)] = 8192
    """Tokens per sequence; a longer sample is cut."""
    packing: bool = True
    """Pack samples into one sequence, attention kept apart and positions restarted."""
    train_on: Literal["assistant", "all"] = "all"
    """Positions the loss counts: those that predict an assistant's token, or all. In plain text all count."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of the samples held out for evaluation, chosen by a hash of their content. `builtin:python-stdlib` brings
    its own held-out modules instead."""


class DistillationSpec(_Spec):
    """Losses (paper, section 3.3)."""

    temperature: Annotated[float, Field(gt=0.0)] = 2.0
    logits_loss_weight: Annotated[float, Field(ge=0.0)] = 1.0
    exit_loss_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Weight of the exit head's loss, with `swiftkv.early_exit`."""
    hidden_loss_weight: Annotated[float, Field(ge=0.0)] = 0.0
    hidden_loss_layer: int = -2
    """Index into the hidden states, as in the reference; -2 is the output of the layer before the last."""
    objective: Literal["logits", "lm"] = "logits"
    """`lm` trains on the next token instead of the teacher (table 6a)."""
    trainable: Literal["qkv", "tail"] = "qkv"
    """The SwiftKV projections and norm, or every parameter of layers >= l (table 6b)."""


class OptimizerSpec(_Spec):
    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the trained matrices and AdamW for the rest, with one learning rate; not under `deepspeed`,
    which keeps flat shards instead of matrices."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.05
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """AdamW's."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Muon's."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of the steps with a linearly rising learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0


class TrainingSpec(_Spec):
    num_epochs: Annotated[int, Field(ge=1)] = 2
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Overrides `num_epochs`."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Packed sequences per optimizer step, over all workers."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Packed sequences per forward and worker; must divide batch_size / num_workers."""
    gradient_checkpointing: bool = False
    """Recompute activations of the student's upper layers in the backward pass."""
    compile: bool = False
    """Compile the layers with `torch.compile`: the first steps take minutes, the rest less time."""
    seed: int = 0


class ShardingSpec(_Spec):
    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"
    """`ddp`: every worker holds everything. `fsdp2`: parameters, gradients and optimizer state are sharded.
    `deepspeed`: ZeRO, see `zero_stage`."""
    zero_stage: Literal[1, 2, 3] = 2
    """`deepspeed`: shard the optimizer state (1), gradients too (2), parameters too (3)."""
    cpu_offload: bool = False
    """FSDP2: keep sharded parameters in host memory. ZeRO: optimizer state, with stage 3 parameters too."""
    sequence_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Neighbouring workers that divide the tokens of the same rows among them, for rows too long for one. Must divide
    `resources.num_workers`, `data.max_length` and the model's attention heads, key-value heads included."""

    @property
    def shards_parameters(self) -> bool:
        """Whether a worker holds a part of the model only."""
        return self.strategy == "fsdp2" or (self.strategy == "deepspeed" and self.zero_stage == 3)


class ElasticSpec(_Spec):
    """A number of workers that follows the cluster."""

    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must not be above max {self.max}")
        return self


class ResourcesSpec(_Spec):
    num_workers: Annotated[int, Field(ge=1)] | ElasticSpec = 2
    """Or `{min, max}`: training goes on with fewer when machines leave, and with more when they come."""
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    cpus_per_worker: Annotated[float, Field(gt=0.0)] = 1
    accelerator_type: str | None = None
    """Ray's name of the GPU type, e.g. `H100`."""
    peak_flops_per_second: Annotated[float, Field(gt=0.0)] | None = None
    """Of one worker's device in `model.dtype`, for the metric `mfu`; default: known for current GPUs, else no `mfu`."""

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.max

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.min


class CheckpointSpec(_Spec):
    every_steps: Annotated[int, Field(ge=1)] = 100
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept; older ones are deleted."""


class TaskSpec(_Spec):
    """A task of lm-evaluation-harness, answered by teacher and student."""

    name: Annotated[str, Field(min_length=1)]
    """Task or group that the harness knows, a task's `.yaml` file (local or `s3://`), `builtin:mmlu` or `builtin:gsm8k`
    (those over their authors' files in `data_dir`), or `paper`: the seven tasks of table B.1."""
    data_dir: str | None = None
    """Where the relative `data_files` of a file or built-in task lie; default: beside the file."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples in the prompt; default: the task's own number."""
    metric: str | None = None
    """Score that counts, e.g. `acc_norm`; default: the task's first of which more is better."""
    chat_template: bool = False
    """Prompt through the tokenizer's chat template, examples as turns of their own."""


PAPER_TASKS = (
    TaskSpec(name="arc_challenge_llama", num_fewshot=0, metric="exact_match", chat_template=True),
    TaskSpec(name="winogrande", num_fewshot=5, metric="acc"),
    TaskSpec(name="hellaswag", num_fewshot=10, metric="acc_norm"),
    TaskSpec(name="truthfulqa_mc2", num_fewshot=0, metric="acc"),
    TaskSpec(name="mmlu_llama", num_fewshot=5, metric="exact_match", chat_template=True),
    TaskSpec(name="mmlu_cot_llama", num_fewshot=0, metric="exact_match", chat_template=True),
    TaskSpec(name="gsm8k_llama", num_fewshot=8, metric="exact_match,strict_match", chat_template=True),
)
"""Table B.1 of the paper; its chat prompts (appendix B.1) are used where the tokenizer has a template."""


class EvaluationSpec(_Spec):
    """The report of a job, and its quality gate: with a limit passed the job fails as `quality_gate`."""

    max_tokens: Annotated[int, Field(ge=64)] = 65536
    """Held-out tokens measured."""
    tasks: tuple[str | TaskSpec, ...] = ()
    """Tasks of lm-evaluation-harness; a string is a task's `name`."""
    task_limit: Annotated[int, Field(ge=1)] | None = None
    """Samples of each task, the first ones; default: all."""
    task_batch_size: Annotated[int, Field(ge=1)] = 8
    """Prompts a forward pass of a task."""
    continuations: Annotated[int, Field(ge=0)] = 16
    """Held-out prompts that teacher and student continue greedily."""
    continuation_tokens: Annotated[int, Field(ge=1)] = 32
    """Tokens of each continuation."""
    max_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Gate: most KL (nats) on held-out text."""
    max_perplexity_ratio: Annotated[float, Field(gt=0.0)] | None = None
    """Gate: most perplexity on held-out text, as a multiple of the teacher's."""
    min_top1_agreement: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Gate: least share of held-out positions where the student's most likely token is the teacher's."""
    max_drop: Annotated[float, Field(ge=0.0)] | None = 1.0
    """Gate: most points of a hundred lost against the teacher on any of `tasks`; null: tasks are only reported."""

    @property
    def has_gate(self) -> bool:
        limits = (
            self.max_kl,
            self.max_perplexity_ratio,
            self.min_top1_agreement,
            self.max_drop if self.tasks else None,
        )
        return any(limit is not None for limit in limits)


class SweepSpec(_Spec):
    """One trial for every combination of the values given; what is not given stays as the spec says.

    The artifact is the trial with the least prefill compute, then the smallest cache, then the lowest KL, of those that
    pass the gates of `evaluation`: they are the sweep's accuracy budget.
    """

    num_key_value_layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of `swiftkv.num_key_value_layers` (l)."""
    key_value_group_size: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of `swiftkv.key_value_group_size` (g)."""
    learning_rate: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    """Values of `optimizer.learning_rate`."""
    max_concurrent: Annotated[int, Field(ge=1)] = 1
    """Trials that train at a time, each with the workers that `resources` asks for."""

    @model_validator(mode="after")
    def _sweeps_something(self) -> Self:
        for name in ("num_key_value_layers", "key_value_group_size", "learning_rate"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice")
        count = self.num_trials
        if not 2 <= count <= _MOST_TRIALS:
            raise ValueError(f"its lists make {count} trials; 2..{_MOST_TRIALS} would do")
        return self

    @property
    def num_trials(self) -> int:
        return math.prod(
            max(len(v), 1) for v in (self.num_key_value_layers, self.key_value_group_size, self.learning_rate)
        )


class WandbSpec(_Spec):
    project: str = "swiftkv"
    entity: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online where a key is set, else offline."""
    tags: tuple[str, ...] = ()


class TrackingSpec(_Spec):
    wandb: WandbSpec = WandbSpec()


class FaultToleranceSpec(_Spec):
    max_retries: Annotated[int, Field(ge=0)] = 3
    """New attempts after a failure that another try can mend; bad data is never retried."""


class LimitsSpec(_Spec):
    priority: Literal["low", "normal", "high"] = "normal"
    """Queue order; within a priority first come, first served."""
    cost_cap: Annotated[float, Field(gt=0.0)] | None = None
    """In the operator's currency: a job that has cost more is paused, at a checkpoint."""
    max_runtime_s: Annotated[int, Field(ge=1)] | None = None
    """An attempt that runs longer is stopped and the job fails."""


class JobSpec(_Spec):
    """A distillation job, as POSTed to `/jobs`."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
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
    sweep: SweepSpec | None = None
    """Search over l, g and the learning rate; null trains one model."""
    tracking: TrackingSpec = TrackingSpec()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    limits: LimitsSpec = LimitsSpec()
    webhook: WebhookSpec | None = None
    """Told of the job's changes of status."""
    metadata: Annotated[dict[str, str], Field(max_length=32)] = {}
    """Free key/value pairs, kept with the job and its model."""

    @model_validator(mode="after")
    def _sequences_divide(self) -> Self:
        size, workers = self.sharding.sequence_parallel_size, self.resources.num_workers
        if size == 1:
            return self
        if not isinstance(workers, int) or workers % size:
            problem = f"resources.num_workers must be a fixed multiple of it, and is {workers}"
        elif self.data.max_length % size:
            problem = f"it must divide data.max_length, which is {self.data.max_length}"
        elif self.training.compile:
            problem = "it does not go with training.compile"
        else:
            return self
        raise PydanticCustomError(
            "sequence_parallel_size",
            "sharding.sequence_parallel_size is {value}: {problem}",
            {"field": "sharding.sequence_parallel_size", "value": size, "problem": problem},
        )

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        size = self.sharding.sequence_parallel_size
        per_step = self.resources.max_workers // size * self.training.micro_batch_size
        if self.training.batch_size % per_step:
            raise PydanticCustomError(
                "batch_size",
                "training.batch_size {value} must be a multiple of resources.num_workers x {shared}"
                "training.micro_batch_size = {per_step}",
                {
                    "field": "training.batch_size",
                    "value": self.training.batch_size,
                    "per_step": per_step,
                    "shared": "" if size == 1 else "1 / sharding.sequence_parallel_size x ",
                },
            )
        return self

    @model_validator(mode="after")
    def _optimizer_fits_the_sharding(self) -> Self:
        if self.optimizer.name == "muon" and self.sharding.strategy == "deepspeed":
            raise PydanticCustomError(
                "optimizer",
                "optimizer.name 'muon' needs whole matrices, and sharding.strategy 'deepspeed' keeps flat shards; "
                "sharding.strategy ddp or fsdp2, or optimizer.name adamw, would do",
                {"field": "optimizer.name", "value": self.optimizer.name},
            )
        return self

    @model_validator(mode="after")
    def _sweep_has_a_budget(self) -> Self:
        if self.sweep is not None and not self.evaluation.has_gate:
            raise PydanticCustomError(
                "sweep",
                "sweep needs an accuracy budget to choose by: set evaluation.max_kl, evaluation.max_perplexity_ratio, "
                "evaluation.min_top1_agreement, or evaluation.tasks and max_drop",
                {"field": "sweep"},
            )
        return self


def load_spec(path: Path) -> JobSpec:
    """Read a YAML or JSON spec. Raises `pydantic.ValidationError` or `yaml.YAMLError` with the offending place."""
    document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    return JobSpec.model_validate(document)
