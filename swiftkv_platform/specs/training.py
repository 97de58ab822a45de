"""Sections of a job spec on training: optimizer, length, the held-out KL that steers it, and the parent it continues
from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from swiftkv_platform.specs.base import Count, Epochs, NonNegative, Positive, Range, SignedSeed, Size, Spec

_NAME = re.compile(
    r"(?P<model>mdl_[0-9A-Za-z]+)"
    r"|(?P<job>job_[0-9A-Za-z]+):(?:(?P<step>\d{1,12})|ckpt_(?P<named>\d{8,12})_(?P<attempt>\d{4,8}))"
)


@dataclass(frozen=True)
class ParentName:
    """A model's id, or a checkpoint's job and step."""

    model: str | None = None
    job: str | None = None
    step: int | None = None
    attempt: int | None = None
    """Attempt that made the checkpoint; None for the newest one that reached the step."""

    @classmethod
    def parse(cls, text: str) -> ParentName:
        """Parse a reference. Raises `ValueError` if it has neither form."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text[:80]!r} names neither a model nor a checkpoint; a model's id (mdl_...), JOB:STEP "
                "(job_...:100) or a checkpoint as OpenAI's API lists it (job_...:ckpt_00000100_0001) is accepted"
            )
        if match["model"] is not None:
            return cls(model=match["model"])
        step = int(match["step"] or match["named"])
        return cls(job=match["job"], step=step, attempt=None if match["attempt"] is None else int(match["attempt"]))

    def __str__(self) -> str:
        if self.model is not None:
            return self.model
        return f"{self.job}:{self.step}" if self.attempt is None else f"{self.job}:{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """Id of the checkpoint within its job."""
        return f"ckpt_{self.step:08d}_{self.attempt:04d}"


def _validate_reference(text: str) -> str:
    return str(ParentName.parse(text))


ParentReference = Annotated[str, Field(max_length=200), AfterValidator(_validate_reference)]
"""`mdl_...`, `job_...:STEP` or `job_...:ckpt_...`."""


class OptimizerSpec(Spec):
    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the trained matrices and AdamW for the rest, with one learning rate; not under `deepspeed`,
    which keeps flat shards instead of matrices."""
    learning_rate: Positive | None = None
    """Default: found by `rate_search` around 3e-4 for hidden sizes from 2,048 up, in inverse proportion to smaller
    ones, at most 3e-3; far lower with `trainable: all`."""
    rate_search: bool | None = None
    """Try a few rates for a few steps each before training, and take the one whose held-out KL falls furthest. These
    steps are in addition to the run's, at most 15% of them. Default: true if `learning_rate` is not set. If it is set,
    the search starts there, with `trainable: all` at a fifth of it."""
    weight_decay: NonNegative = 0.05
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Betas of AdamW."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Momentum of Muon."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of the steps with a linearly rising learning rate. Default: 0.05 but at least 20 steps; a fifth of a run
    shorter than 100 steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Positive = 1.0


class ValidationSpec(Spec):
    """Held-out KL while a run trains: a forward pass over the same few held-out rows, at an interval of steps."""

    every_steps: Count | None = None
    """Optimizer steps between measurements. Default: a twentieth of the run; the last step is always measured."""
    max_tokens: Count = 16384
    """Held-out tokens of a measurement: at most a tenth of the tokens trained on between two measurements, but at least
    one row."""


class EarlyStoppingSpec(Spec):
    patience: Count = 5
    """Measurements of held-out KL in a row without an improvement after which the run ends."""
    min_delta: NonNegative = 1e-3
    """Least fall of held-out KL, in nats, that counts as an improvement."""


class GuardSpec(Spec):
    """Protection against divergence: if held-out KL rises above its value at the start, or far above its best, training
    goes back to the best state so far and continues with a lower learning rate."""

    max_rollbacks: Annotated[int, Range(0, 100)] = 3
    """Times that a run may go back; after that, it ends with the best state instead."""
    divergence_factor: Annotated[float, Field(gt=1.0, le=1e30)] = 1.5
    """Factor over the best held-out KL from which it counts as far above it."""
    rate_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor of the learning rate each time."""


class TrainingSpec(Spec):
    model_config = ConfigDict(serialize_by_alias=True)

    from_: ParentReference | None = Field(default=None, alias="from")
    """Model (`mdl_...`) or checkpoint (`job_...:STEP`) to continue from, with the same teacher, l and g; null starts
    from the teacher. Steps and learning rate start anew."""
    load_optimizer_state: bool = False
    """Load the optimizer state of the checkpoint that `from` names; otherwise the optimizer starts fresh."""
    num_epochs: Epochs = 2
    max_steps: Annotated[int, Range(0, 10**12)] | None = None
    """Overrides `num_epochs`. 0 trains nothing: the checkpoint that `from` names is evaluated and published."""
    batch_size: Size | None = None
    """Packed sequences per optimizer step, over all workers. Default: 32, halved while the epochs make fewer than 400
    steps."""
    micro_batch_size: Size = 1
    """Packed sequences per forward and worker; must divide batch_size / num_workers."""
    gradient_checkpointing: bool = False
    """Recompute activations of the student's upper layers in the backward pass."""
    compile: bool = False
    """Compile the layers with `torch.compile`: the first steps take minutes, later ones are faster."""
    deterministic: bool = False
    """Avoid faster GPU operators that add in no fixed order, so that an interrupted run ends bit-identical to an
    uninterrupted one. Not needed on a CPU."""
    attn_implementation: Literal["auto", "varlen_attn", "sdpa"] = "auto"
    """Attention within each sample of a row. `varlen_attn`: PyTorch's FlashAttention over all samples at once, in
    bfloat16, on GPUs that support it. `sdpa`: one sample after the other. `auto`: `varlen_attn` if possible, otherwise
    `sdpa`."""
    seed: SignedSeed = 0
    validation: ValidationSpec | None = ValidationSpec()
    """Held-out KL during training, which `guard`, `keep_best`, `early_stopping` and `optimizer.rate_search` depend on;
    null measures nothing and disables all four."""
    guard: GuardSpec | None = GuardSpec()
    """Guard against divergence; null trains on regardless of held-out KL."""
    keep_best: bool = True
    """Make the model from the state with the lowest held-out KL (of those within 2% of it the last) instead of the last
    step."""
    early_stopping: EarlyStoppingSpec | None = None
    """End the run once held-out KL no longer falls; null trains to the last step."""

    @model_validator(mode="after")
    def _validate_early_stopping(self) -> Self:
        if self.early_stopping is not None and self.validation is None:
            raise ValueError("early_stopping needs held-out KL, but validation is null; leave validation out")
        return self
