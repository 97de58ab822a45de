"""Sections `swiftkv`, `optimizer`, `training`, `sharding`, `resources` and `fault_tolerance` of a job spec."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import (
    MAX_LAYERS,
    Count,
    HostMemory,
    NonNegative,
    NumCores,
    NumEpochs,
    NumGpus,
    NumLayers,
    NumWorkers,
    PeakFlopsPerSecond,
    Positive,
    Range,
    SignedSeed,
    Size,
    Spec,
    Word,
    make_field_error,
)
from swiftkv_platform.student_shape import MAX_DEEP_TAIL, MAX_LIST_LENGTH, RequestedStudentShape, parse_layers

_MAX_SHOWN_LENGTH = 120


def _make_layer_list_error(field: str, layers: list[int], problem: str) -> PydanticCustomError:
    return make_field_error(field, layers, f"{field} is {_shorten(repr(layers))}: {problem}")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}...{text[-1]}"


def _parse_layer_list(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_layers(value)
    except InvalidInputError as error:
        raise ValueError(f"is {_shorten(repr(value))}: use ascending layers and ranges, such as 0-2,4,6-16") from error


_LayerList = Annotated[list[Annotated[int, Range(0, MAX_LAYERS)]], Field(max_length=MAX_LAYERS)]
_LayerListText = Annotated[str, Field(max_length=MAX_LIST_LENGTH)]
_PrefillLayers = Annotated[
    _LayerList | None, BeforeValidator(_parse_layer_list, json_schema_input_type=_LayerList | _LayerListText | None)
]


_DEPTH_FIELDS = {"num_key_value_layers", "prefill_reduction", "prefill_layers"}


class SwiftKVSpec(Spec):
    """Shape and initialization of the student (paper, section 3). In a job that continues from a student, its shape is
    the default."""

    num_key_value_layers: NumLayers | None = None
    """l, 1..L-1: number of layers that prompts run, each with its own KV cache. Exclusive with `prefill_reduction`."""
    prefill_reduction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the L layers that prompts skip: l = L - round(share x L). Default: 0.5 if l is not set either."""
    key_value_group_size: NumLayers = 1
    """g (AcrossKV): number of consecutive layers >= l that share one KV cache layer; 1: no sharing."""
    sharing: Literal["gqa", "mqa", "mha"] = "gqa"
    """Key-value heads of layers >= l (paper, appendix C). `gqa`: as in the teacher; `mqa`: one; `mha`: one per query
    head. The KV cache size is proportional to this number; `planning.equal_cache_group_size` returns the g at which the
    cache is as large as with `gqa`."""
    early_exit: bool = False
    """Train an early-exit head after layer l - 1."""
    own_output_projection: bool = False
    """Add a trained output projection `o_proj_swiftkv` to layers >= l, calibrated to the values that a group shares. It
    recovers most of the quality loss of sharing at no serving cost. Supported only by this project's engine and vLLM
    plugin."""
    initialization: Literal["calibrated", "copied"] = "calibrated"
    """Initialization of `{k,v}_proj_swiftkv`. `calibrated`: ridge regression on the teacher's K and V; `copied`: mean
    of the teacher's weights."""
    decode_key_value: Literal["shared", "own"] = "own"
    """Input of K and V in layers >= l for tokens that run these layers (a prompt's last token and generated tokens).
    `own`: the hidden state of the first layer of each group, as in the teacher; prefill costs the same and quality is
    much higher. In training, texts whose tokens are all loss targets are split at random into a prompt without loss
    targets and a completion. `shared`: the output of layer l - 1, as for other prompt tokens (the paper's form)."""
    prefill_layers: _PrefillLayers = None
    """Layers that prompts run, instead of the first l: an ascending list, or text such as `0-2,4,6-16`. l is then the
    last of them + 1. In skipped layers below l, only K and V are computed, so the same compute is spent on the more
    important layers; `swiftkv analyze --num-prefill-layers` selects them. Requires `decode_key_value: own`. Not
    supported by vLLM."""
    deep_tail: Annotated[int, Range(1, MAX_DEEP_TAIL)] = 1
    """m: number of tokens at a prompt's end that run all layers and keep their own K and V; a prompt of at most m
    tokens skips nothing. Longer tails answer short prompts better and cost m / (prompt length) of the skipped compute.
    Requires `decode_key_value: own`. Not supported by vLLM."""
    calibration_tokens: Annotated[int, Range(1024, 10**12)] = 16384
    """Number of tokens for the calibrated initialization."""

    @model_validator(mode="after")
    def _validate_one_l(self) -> Self:
        if self.num_key_value_layers is not None and self.prefill_reduction is not None:
            raise ValueError("set num_key_value_layers or prefill_reduction, not both")
        return self

    @model_validator(mode="after")
    def _validate_prefill_layers(self) -> Self:
        layers = self.prefill_layers
        if layers is None:
            return self
        if not layers or sorted(set(layers)) != layers:
            problem = "use an ascending list without repeats, such as [0, 1, 2, 4, 5]"
        elif self.prefill_reduction is not None:
            problem = f"it cannot be combined with prefill_reduction {self.prefill_reduction}; remove prefill_reduction"
        elif self.num_key_value_layers not in (None, layers[-1] + 1):
            problem = (
                f"its last layer implies num_key_value_layers {layers[-1] + 1}, not {self.num_key_value_layers}; "
                "remove num_key_value_layers"
            )
        elif self.request.has_bypassed_layers and self.decode_key_value != "own":
            problem = "it skips layers below l, which requires decode_key_value: own"
        else:
            return self
        raise _make_layer_list_error("prefill_layers", layers, problem)

    @model_validator(mode="after")
    def _validate_deep_tail(self) -> Self:
        if self.deep_tail > 1 and self.decode_key_value != "own":
            raise make_field_error(
                "deep_tail",
                self.deep_tail,
                f"deep_tail is {self.deep_tail}; a value above 1 requires decode_key_value: own",
            )
        return self

    @property
    def request(self) -> RequestedStudentShape:
        """The student's shape, as far as it is known without a teacher."""
        return RequestedStudentShape.from_spec(self)

    def inherit_from(self, parent: Self) -> Self:
        """Return the section of a job that continues from `parent`: the fields of the shape that are not set are the
        parent's."""
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        if given & _DEPTH_FIELDS:
            given |= _DEPTH_FIELDS
        if "decode_key_value" in given and self.decode_key_value != parent.decode_key_value:
            given.add("deep_tail")
        names = {field.name for field in fields(RequestedStudentShape)} - given
        return self.model_copy(update={name: getattr(parent, name) for name in names})

    def make_layer_list_error(self, problem: str) -> PydanticCustomError:
        """Return the error of a rule of the whole spec for `prefill_layers`."""
        return _make_layer_list_error("swiftkv.prefill_layers", self.prefill_layers or [], problem)

    @property
    def is_calibrated(self) -> bool:
        """Whether the initialization is fitted to the teacher's activations."""
        return self.initialization != "copied"


_PARENT_NAME = re.compile(
    r"(?P<model>mdl_[0-9A-Za-z]+)"
    r"|(?P<deployment>dep_[0-9A-Za-z]+)"
    r"|(?P<job>job_[0-9A-Za-z]+):(?:(?P<step>\d{1,12})|ckpt_(?P<named>\d{8,12})_(?P<attempt>\d{4,8}))"
)


@dataclass(frozen=True)
class ParentName:
    """Parsed `training.from`: the id of a model or a deployment, or a checkpoint's job and step."""

    model: str | None = None
    deployment: str | None = None
    job: str | None = None
    step: int | None = None
    attempt: int | None = None
    """Attempt of the checkpoint; None: the latest attempt that has the step."""

    @classmethod
    def parse(cls, text: str) -> ParentName:
        """Parse a reference. Raises `ValueError` for an invalid one."""
        match = _PARENT_NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text[:80]!r} is neither a model nor a checkpoint; use the id of a model (mdl_...) or a deployment "
                "(dep_...), JOB:STEP (job_...:100) or a checkpoint's id of the fine-tuning API "
                "(job_...:ckpt_00000100_0001)"
            )
        if match["job"] is None:
            return cls(model=match["model"], deployment=match["deployment"])
        step = int(match["step"] or match["named"])
        return cls(job=match["job"], step=step, attempt=None if match["attempt"] is None else int(match["attempt"]))

    def __str__(self) -> str:
        if self.job is None:
            return str(self.model or self.deployment)
        return f"{self.job}:{self.step}" if self.attempt is None else f"{self.job}:{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Id of the checkpoint within its job."""
        return f"ckpt_{self.step:08d}_{self.attempt:04d}"


def _validate_reference(text: str) -> str:
    return str(ParentName.parse(text))


ParentReference = Annotated[str, Field(max_length=200), AfterValidator(_validate_reference)]
"""`mdl_...`, `dep_...`, `job_...:STEP` or `job_...:ckpt_...`."""


class OptimizerSpec(Spec):
    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for trained matrices and AdamW for other parameters, with one learning rate. Not with `deepspeed`,
    which has flat shards."""
    learning_rate: Positive | None = None
    """Peak learning rate. Default: found by `rate_search`, starting from min(3e-4 x max(1, 2048 / hidden size), 3e-3);
    lower with `trainable: all`."""
    rate_search: bool | None = None
    """Before training, try a few learning rates for a few steps each, and use the highest one that lowers held-out KL
    by at least 90% of the largest reduction. Adds at most 15% of the run's steps. Default: true if `learning_rate` is
    not set. Otherwise the search starts from `learning_rate`, or a fifth of it with `trainable: all`."""
    weight_decay: NonNegative = 0.05
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Betas of AdamW."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Momentum of Muon."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of steps with linear warmup. Default: 0.05 but at least 20 steps; a fifth of runs under 100 steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Positive = 1.0


class ValidationSpec(Spec):
    """Validation during training: held-out KL on a few fixed rows."""

    every_steps: Count | None = None
    """Optimizer steps between validations. Default: a twentieth of the run, but at least 40 trained rows. The last step
    is always validated."""
    max_tokens: Count = 16384
    """Max held-out tokens per validation; also at most a tenth of the tokens trained on between two validations, but at
    least one row."""


class EarlyStoppingSpec(Spec):
    patience: Count = 5
    """Number of consecutive validations without improvement after which training ends."""
    min_delta: NonNegative = 1e-3
    """Min decrease of held-out KL in nats that counts as an improvement."""


class GuardSpec(Spec):
    """Guard against divergence: if held-out KL rises above its initial value, or far above its lowest, training rolls
    back to the best state and continues with a lower learning rate."""

    max_rollbacks: Annotated[int, Range(0, 100)] = 3
    """Max rollbacks; after that, training ends with the best state."""
    divergence_factor: Annotated[float, Field(gt=1.0, le=1e30)] = 1.5
    """Roll back if held-out KL exceeds its lowest value by this factor."""
    rate_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Learning-rate factor per rollback."""


class TrainingSpec(Spec):
    model_config = ConfigDict(serialize_by_alias=True)

    from_: ParentReference | None = Field(default=None, alias="from")
    """Model (`mdl_...`), checkpoint (`job_...:STEP`), or deployment (`dep_...`: the model that it serves at submission)
    to continue from, with its teacher and shape; null: start from the teacher. Steps and learning-rate schedule
    restart."""
    load_optimizer_state: bool = False
    """Also load the optimizer state of the checkpoint `from`."""
    num_epochs: NumEpochs = 2
    max_steps: Annotated[int, Range(0, 10**12)] | None = None
    """Number of optimizer steps; overrides `num_epochs`. 0: only evaluate and publish the checkpoint `from`."""
    batch_size: Size | None = None
    """Rows per optimizer step, over all workers. Default: 32, halved until the epochs have at least 400 steps."""
    micro_batch_size: Size = 1
    """Rows per forward pass and worker; must divide batch_size / num_workers."""
    gradient_checkpointing: bool = False
    """Recompute activations of the student's layers >= l in the backward pass."""
    compile: bool = False
    """Compile layers with `torch.compile`: the first steps take minutes, later ones are faster."""
    deterministic: bool = False
    """Use deterministic GPU operators, which are slower, so that a resumed run is bit-identical to an uninterrupted
    one. Not needed on a CPU."""
    attn_implementation: Literal["auto", "varlen_attn", "sdpa"] = "auto"
    """Attention over packed samples. `varlen_attn`: PyTorch's FlashAttention over all samples at once (GPU, bfloat16).
    `sdpa`: one sample after another. `auto`: `varlen_attn` if supported, otherwise `sdpa`."""
    seed: SignedSeed = 0
    validation: ValidationSpec | None = ValidationSpec()
    """Validation during training; null disables it, and with it `guard`, `keep_best`, `early_stopping` and
    `optimizer.rate_search`."""
    guard: GuardSpec | None = GuardSpec()
    """Guard against divergence; null: no rollbacks."""
    keep_best: bool = True
    """Use the state with the lowest held-out KL (the last state within 2% of it) instead of the last step."""
    early_stopping: EarlyStoppingSpec | None = None
    """End training when held-out KL stops falling; null: train to the last step."""

    @model_validator(mode="after")
    def _validate_early_stopping(self) -> Self:
        if self.early_stopping is not None and self.validation is None:
            raise ValueError("early_stopping needs validation, which is null; remove `validation: null`")
        return self


class ShardingSpec(Spec):
    strategy: Literal["ddp", "fsdp2", "deepspeed"] = "fsdp2"
    """`ddp`: every worker has a full replica. `fsdp2`: parameters, gradients and optimizer state are sharded.
    `deepspeed`: ZeRO, see `zero_stage`."""
    zero_stage: Literal[1, 2, 3] = 2
    """`deepspeed`: shard the optimizer state (1), gradients too (2), parameters too (3)."""
    cpu_offload: bool = False
    """Offload to host memory: sharded parameters with FSDP2; optimizer state with ZeRO, in stage 3 also parameters."""
    sequence_parallel_size: NumWorkers = 1
    """Number of workers that share the tokens of a row, for rows too long for one worker. Must divide
    `resources.num_workers`, `data.max_length`, and the numbers of attention heads and key-value heads."""

    @property
    def shards_parameters(self) -> bool:
        """Whether each worker has only a part of the parameters."""
        return self.strategy == "fsdp2" or (self.strategy == "deepspeed" and self.zero_stage == 3)


class ElasticSpec(Spec):
    """Elastic number of workers."""

    min: NumWorkers
    max: NumWorkers

    @model_validator(mode="after")
    def _validate_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class ResourcesSpec(Spec):
    num_workers: NumWorkers | ElasticSpec = 2
    """Number of workers, or `{min, max}`: training continues with fewer workers when nodes leave, and with more when
    nodes join."""
    gpus_per_worker: NumGpus = 0
    cpus_per_worker: NumCores = 1
    """Cores that Ray reserves per worker. Quotas (`max_cpus`) count at least one core per worker."""
    memory_per_worker: HostMemory | None = None
    """Bytes of host memory that Ray reserves per worker, and per task of the job; null: none."""
    accelerator_type: Word | None = None
    """GPU type by Ray's name, e.g. `H100`."""
    peak_flops_per_second: PeakFlopsPerSecond | None = None
    """Peak FLOPs per second of a worker's device in `model.dtype`, for the metric `mfu`. Default: known for current
    GPUs; no `mfu` for others."""

    @property
    def max_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.max

    @property
    def min_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers.min

    def describe(self, num_workers: int) -> str:
        """Return e.g. `2 workers with 1 CPU and 1 GPU each`."""
        each = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        amounts = " and ".join(f"{amount:g} {name}" for name, amount in each.items() if amount)
        if self.memory_per_worker is not None:
            amounts += f" and {self.memory_per_worker / (1 << 30):.3g} GiB of memory"
        kind = f" of type {self.accelerator_type}" if self.accelerator_type else ""
        return (
            f"1 worker with {amounts}{kind}" if num_workers == 1 else f"{num_workers} workers with {amounts}{kind} each"
        )


class FaultToleranceSpec(Spec):
    max_retries: Annotated[int, Range(0, 1000)] = 3
    """Max retries after transient failures; data errors are never retried."""
