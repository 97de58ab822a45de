"""Evaluation of a student, its quality gates, and the sweep that searches for a student within them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swiftkv_platform.specs.base import Count, Layers, Name, NonNegative, Positive, Range, Size, Spec, Word

_MAX_TRIALS = 256
BUILTIN_TASKS: Mapping[str, tuple[str, ...]] = {
    "builtin:gsm8k": ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    "builtin:mmlu": ("test/*_test.csv", "dev/*_dev.csv"),
    "builtin:ifeval": ("input_data.jsonl",),
    "builtin:tool-calls": (),
}
"""Glob patterns of the built-in tasks' files below `data_dir`; empty if a script generates the task."""
INSTRUCTION_TASKS = frozenset({"builtin:ifeval", "builtin:tool-calls"})
"""Built-in tasks whose prompts are instructions in plain words."""


class TaskSpec(Spec):
    """A task of lm-evaluation-harness, answered by teacher and student."""

    name: Annotated[Name, Field(min_length=1)]
    """Name of a task or group of the harness, a task's `.yaml` file (local or `s3://`), `builtin:mmlu`, `builtin:gsm8k`
    or `builtin:ifeval` (over their authors' files in `data_dir`), `builtin:tool-calls` (whether tool calls are valid
    JSON), or `paper`: the seven tasks of table B.1."""
    data_dir: Name | None = None
    """Directory of the relative `data_files` of a file or built-in task; default: the file's directory."""
    num_fewshot: Annotated[int, Range(0, 10_000)] | None = None
    """Examples in the prompt; default: the task's own number."""
    metric: Word | None = None
    """Score that counts, such as `acc_norm`; default: the task's first one of which higher is better. A score of which
    lower is better, such as `word_perplexity`, has to be named."""
    chat_template: bool | None = None
    """Use the tokenizer's chat template, with examples as separate turns. null: only for `builtin:ifeval` and
    `builtin:tool-calls` with instruction-tuned models."""


def is_task_file_name(name: str) -> bool:
    """Whether a task's name is a file name."""
    return name.endswith((".yaml", ".yml"))


def get_task_name_and_data_dir(task: str | TaskSpec) -> tuple[str, str | None]:
    """Name and `data_dir` of an entry of `EvaluationSpec.tasks`, without a `TaskSpec` for each of a thousand names."""
    return (task, None) if isinstance(task, str) else (task.name, task.data_dir)


PAPER_TASKS = (
    TaskSpec(name="arc_challenge_llama", num_fewshot=0, metric="exact_match", chat_template=True),
    TaskSpec(name="winogrande", num_fewshot=5, metric="acc"),
    TaskSpec(name="hellaswag", num_fewshot=10, metric="acc_norm"),
    TaskSpec(name="truthfulqa_mc2", num_fewshot=0, metric="acc"),
    TaskSpec(name="mmlu_llama", num_fewshot=5, metric="exact_match", chat_template=True),
    TaskSpec(name="mmlu_cot_llama", num_fewshot=0, metric="exact_match", chat_template=True),
    TaskSpec(name="gsm8k_llama", num_fewshot=8, metric="exact_match,strict_match", chat_template=True),
)
"""Table B.1 of the paper; its chat prompts (appendix B.1) are used if the tokenizer has a template."""


class EvaluationSpec(Spec):
    """The report of a job, and its quality gates. If a gate fails, the job fails with `quality_gate`; if one is
    undecided, the model is made, but promoting it requires an explicit acknowledgement."""

    max_tokens: Annotated[int, Range(64, 10**12)] = 65536
    """Held-out tokens to measure."""
    tasks: Annotated[
        tuple[Annotated[Name, Field(min_length=1)] | TaskSpec, ...], Field(max_length=1000, fail_fast=True)
    ] = ()
    """Tasks of lm-evaluation-harness; a string is a task's `name`."""
    task_limit: Count | None = None
    """Samples of each task, taken from its beginning; default: all."""
    task_batch_size: Size | None = None
    """Prompts of a task per forward pass, or answered at a time; default: as many as make 8,192 tokens, and 256."""
    max_minutes: Annotated[float, Range(1e-3, 1e6)] | None = None
    """Minutes after which no further task starts; the report names the tasks left out, which have no gates. null: no
    limit."""
    continuations: Annotated[int, Range(0, 1_000_000)] = 16
    """Held-out prompts that teacher and student continue greedily."""
    continuation_tokens: Size = 32
    """Tokens of each continuation."""
    needle_lengths: (
        Annotated[tuple[Annotated[int, Range(128, 1 << 20)], ...], Field(max_length=64, fail_fast=True)] | None
    ) = None
    """Lengths in tokens of generated prompts in which a number has to be found (needle in a haystack). null: for
    instruction-tuned models 1,024 and 4,096 if the context holds them, none for others."""
    needle_samples: Annotated[int, Range(1, 100_000)] = 60
    """Prompts of each length."""
    max_kl: Positive | Literal["auto"] | None = "auto"
    """Gate: largest KL (nats) on held-out text. `auto`: 0.2 for instruction-tuned models (their chat template has
    tokens of its own), none for others."""
    max_perplexity_ratio: Positive | None = None
    """Gate: most perplexity on held-out text, as a multiple of the teacher's."""
    min_top1_agreement: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] | None = "auto"
    """Gate: smallest share of held-out positions where the student's most likely token is the teacher's. `auto`: 0.8
    for instruction-tuned models, none for others."""
    max_needle_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate like `max_drop` for each of `needle_lengths` at which the teacher finds 80% or more; `auto` is 5 to 20."""
    max_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: most points of a hundred lost against the teacher on any of `tasks`; for a score outside 0..1, or of which
    lower is better, most percent of the teacher's. Passed if the whole 95% interval of the paired differences is within
    the limit, failed if it is entirely beyond, undecided otherwise. `auto`: for each task the smallest true loss that
    its number of samples can exclude, from 1 to 10. null: tasks are only reported."""

    @property
    def has_gate(self) -> bool:
        """Whether the spec sets a limit of its own."""
        limits = self.max_kl, self.max_perplexity_ratio, self.min_top1_agreement
        gates_tasks = bool(self.tasks) and self.max_drop is not None
        return gates_tasks or any(limit not in (None, "auto") for limit in limits)


def compute_points_lost(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Return the drop that `max_drop` limits; negative if the student wins.

    In points of a hundred if higher is better and both scores are within 0..1; otherwise in percent of the teacher's
    score, where 0 is replaced by 1.
    """
    unit = compute_points_per_unit(teacher, student, higher_is_better=higher_is_better)
    return round(unit * (teacher - student), 6)  # so that 0.50 - 0.49 is exactly one point


def compute_points_per_unit(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Return the points of `compute_points_lost` for each unit by which the student's score is below the teacher's;
    negative if lower is better."""
    whole = 1.0 if is_share(teacher, student, higher_is_better=higher_is_better) else abs(teacher) or 1.0
    return (100.0 if higher_is_better else -100.0) / whole


def is_share(teacher: float, student: float, *, higher_is_better: bool) -> bool:
    """Whether losses are in points of a hundred: higher is better, and both scores are within 0..1."""
    return higher_is_better and 0.0 <= teacher <= 1.0 and 0.0 <= student <= 1.0


class SweepSpec(Spec):
    """One trial for every combination of the given values; all else is as in the spec.

    The gates of `evaluation` are the sweep's accuracy budget: among the trials that pass them, the one with the least
    prefill compute, then the smallest cache, then the lowest KL becomes the artifact.
    """

    num_key_value_layers: Annotated[tuple[Layers, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.num_key_value_layers` (l)."""
    key_value_group_size: Annotated[tuple[Layers, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.key_value_group_size` (g)."""
    learning_rate: Annotated[tuple[Positive, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `optimizer.learning_rate`."""
    max_concurrent: Annotated[int, Range(1, _MAX_TRIALS)] = 1
    """Trials that train at the same time, each with the workers that `resources` asks for."""

    @model_validator(mode="after")
    def _validate_num_trials(self) -> Self:
        for name in ("num_key_value_layers", "key_value_group_size", "learning_rate"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice")
        count = self.num_trials
        if not 2 <= count <= _MAX_TRIALS:
            raise ValueError(f"its lists make {count} trials; 2..{_MAX_TRIALS} are accepted")
        return self

    @property
    def num_trials(self) -> int:
        return math.prod(
            max(len(v), 1) for v in (self.num_key_value_layers, self.key_value_group_size, self.learning_rate)
        )
