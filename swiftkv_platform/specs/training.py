"""Sections `optimizer` and `training` of a job spec."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from swiftkv_platform.specs.base import Count, NonNegative, NumEpochs, Positive, Range, SignedSeed, Size, Spec

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
    """Optimizer steps between validations. Default: a twentieth of the run, but 40 rows or more. The last step is
    always validated."""
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
    """Rows per optimizer step, over all workers. Default: 32, halved while the epochs are fewer than 400 steps."""
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
