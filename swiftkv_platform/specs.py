"""The job spec: what a user asks for, and nothing about how it is done. Frozen, torch-free, no I/O.

Every key of the YAML or JSON spec is a field here; unknown keys are refused. Checks that need the model's configuration
(does l lie below its number of layers?) are made where that configuration is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

BUILTIN_TEACHER = "builtin:python-5m"
"""The teacher that ships with the package, in `swiftkv_platform/demo/teacher`."""
BUILTIN_DATA = "builtin:python-stdlib"
"""The sources of the interpreter's standard library."""


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


class DataSourceSpec(_Spec):
    """One data set."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """Hub id, file (`.jsonl`, `.json`, `.parquet`, `.txt`, `.py`), directory of such files, `s3://` object or prefix,
    or `builtin:python-stdlib` (the sources of the interpreter's standard library)."""
    split: str = "train"
    """Split of a hub or built-in data set."""
    sample_count: Annotated[int, Field(ge=1)] | None = None
    """Take only so many samples, chosen by the seed."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of this source relative to the others: 2.0 repeats each sample twice, 0.5 keeps half."""
    format: Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Row format; `auto` detects it from the columns."""


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
    hidden_loss_weight: Annotated[float, Field(ge=0.0)] = 0.0
    hidden_loss_layer: int = -2
    """Index into the hidden states, as in the reference; -2 is the output of the layer before the last."""
    objective: Literal["logits", "lm"] = "logits"
    """`lm` trains on the next token instead of the teacher (table 6a)."""
    trainable: Literal["qkv", "tail"] = "qkv"
    """The SwiftKV projections and norm, or every parameter of layers >= l (table 6b)."""


class OptimizerSpec(_Spec):
    """AdamW."""

    learning_rate: Annotated[float, Field(gt=0.0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.05
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
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
    seed: int = 0


class ShardingSpec(_Spec):
    strategy: Literal["ddp", "fsdp2"] = "fsdp2"
    cpu_offload: bool = False
    """FSDP2: keep sharded parameters in host memory."""


class ResourcesSpec(_Spec):
    num_workers: Annotated[int, Field(ge=1)] = 2
    gpus_per_worker: Annotated[float, Field(ge=0.0)] = 0
    cpus_per_worker: Annotated[float, Field(gt=0.0)] = 1
    accelerator_type: str | None = None
    """Ray's name of the GPU type, e.g. `H100`."""


class CheckpointSpec(_Spec):
    every_steps: Annotated[int, Field(ge=1)] = 100
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept; older ones are deleted."""


class EvaluationSpec(_Spec):
    max_tokens: Annotated[int, Field(ge=64)] = 65536
    """Held-out tokens measured."""
    max_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Quality gate: the job fails as `quality_gate` if the held-out KL (nats) is above."""


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
    tracking: TrackingSpec = TrackingSpec()
    fault_tolerance: FaultToleranceSpec = FaultToleranceSpec()
    limits: LimitsSpec = LimitsSpec()
    metadata: Annotated[dict[str, str], Field(max_length=32)] = {}
    """Free key/value pairs, kept with the job and its model."""

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        per_step = self.resources.num_workers * self.training.micro_batch_size
        if self.training.batch_size % per_step:
            raise PydanticCustomError(
                "batch_size",
                "training.batch_size {value} must be a multiple of resources.num_workers x "
                "training.micro_batch_size = {per_step}",
                {"field": "training.batch_size", "value": self.training.batch_size, "per_step": per_step},
            )
        return self


def load_spec(path: Path) -> JobSpec:
    """Read a YAML or JSON spec. Raises `pydantic.ValidationError` or `yaml.YAMLError` with the offending place."""
    document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    return JobSpec.model_validate(document)
