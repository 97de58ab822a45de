"""Sections of a job spec on training: optimizer, length, the held-out KL that steers it, and what it continues from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from swiftkv_platform.specs.base import Spec
from swiftkv_platform.specs.limits import Count, Epochs, NonNegative, Positive, Range, SignedSeed, Size

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
        """Raises `ValueError` for what has the form of neither."""
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
        """Id of the checkpoint among those of its job."""
        return f"ckpt_{self.step:08d}_{self.attempt:04d}"


def _checked(text: str) -> str:
    return str(ParentName.parse(text))


ParentReference = Annotated[str, Field(max_length=200), AfterValidator(_checked)]
"""`mdl_...`, `job_...:STEP` or `job_...:ckpt_...`."""


class OptimizerSpec(Spec):
    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the trained matrices and AdamW for the rest, with one learning rate; not under `deepspeed`,
    which keeps flat shards instead of matrices."""
    learning_rate: Positive | None = None
    """Default: found by `rate_search` around 3e-4 for hidden sizes from 2,048 up, in inverse proportion to smaller
    ones, at most 3e-3; far lower with `trainable: all`."""
    rate_search: bool | None = None
    """Try a few rates for a few steps each before training, and take the one whose held-out KL falls furthest; the
    steps come on top of the run's, at most 15% of them. Default: where `learning_rate` is left out. With one given,
    the search begins there, with `trainable: all` at a fifth of it."""
    weight_decay: NonNegative = 0.05
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """AdamW's."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Muon's."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of the steps with a linearly rising learning rate. Default: 0.05, but no fewer than 20 steps, of a run
    shorter than 100 a fifth."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: Positive = 1.0


class ValidationSpec(Spec):
    """Held-out KL while a run trains: a forward pass over the same few held-out rows, at an interval of steps."""

    every_steps: Count | None = None
    """Optimizer steps between measurements. Default: a twentieth of the run; the last step is always measured."""
    max_tokens: Count = 16384
    """Held-out tokens a measurement takes, and no more than a tenth of what is trained on between two of them, but one
    row at least."""


class EarlyStoppingSpec(Spec):
    patience: Count = 5
    """Measurements of held-out KL in a row without an improvement after which the run ends."""
    min_delta: NonNegative = 1e-3
    """Least fall of held-out KL, in nats, that counts as an improvement."""


class GuardSpec(Spec):
    """When held-out KL rises above its value at the start, or far above its best, training goes back to the best state
    so far and on with a lower learning rate."""

    max_rollbacks: Annotated[int, Range(0, 100)] = 3
    """Times a run goes back; the next time it would, it ends with the best state."""
    divergence_factor: Annotated[float, Field(gt=1.0, le=1e30)] = 1.5
    """Held-out KL above the best by this factor counts as far above it."""
    rate_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor of the learning rate each time."""


class TrainingSpec(Spec):
    model_config = ConfigDict(serialize_by_alias=True)

    from_: ParentReference | None = Field(default=None, alias="from")
    """Model (`mdl_...`) or checkpoint (`job_...:STEP`) to continue from, of the same teacher, l and g; null starts
    from the teacher. Step and learning rate begin anew."""
    load_optimizer_state: bool = False
    """Take over the optimizer state of the checkpoint that `from` names; else the optimizer is fresh."""
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
    """Compile the layers with `torch.compile`: the first steps take minutes, the rest less time."""
    deterministic: bool = False
    """Leave out operators of a GPU that add in no fixed order and are faster: a run that was interrupted then ends with
    the bits of one that was not. On a CPU it does without this."""
    attn_implementation: Literal["auto", "varlen_attn", "sdpa"] = "auto"
    """Attention of a row's samples, each to itself. `varlen_attn`: PyTorch's FlashAttention over all of them at once,
    on GPUs that it runs on, in bfloat16. `sdpa`: one sample after the other. `auto`: `varlen_attn` where it can, else
    `sdpa`."""
    seed: SignedSeed = 0
    validation: ValidationSpec | None = ValidationSpec()
    """Held-out KL while it trains, on which `guard`, `keep_best`, `early_stopping` and `optimizer.rate_search` go; null
    measures none and leaves all four out."""
    guard: GuardSpec | None = GuardSpec()
    """null trains on whatever happens to held-out KL."""
    keep_best: bool = True
    """Make the model of the state whose held-out KL was the lowest, of those within 2% of it the last, rather than of
    the last step's."""
    early_stopping: EarlyStoppingSpec | None = None
    """End the run once held-out KL no longer falls; null trains to the last step."""

    @model_validator(mode="after")
    def _early_stopping_is_measured(self) -> Self:
        if self.early_stopping is not None and self.validation is None:
            raise ValueError("early_stopping goes on held-out KL, and validation is null; leave validation out")
        return self
