"""Sections `evaluation` (with quality gates) and `sweep` of a job spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swiftkv_platform.errors import DataError
from swiftkv_platform.specs.base import Count, Name, NonNegative, NumLayers, Positive, Range, Size, Spec, Word

_MAX_TRIALS = 256
BUILTIN_TASKS: Mapping[str, tuple[str, ...]] = {
    "builtin:gsm8k": ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    "builtin:mmlu": ("test/*_test.csv", "dev/*_dev.csv"),
    "builtin:ifeval": ("input_data.jsonl",),
    "builtin:humaneval": ("HumanEval.jsonl*",),
    "builtin:tool-calls": (),
}
"""Files of the built-in tasks in `find_task_directory`, as glob patterns; empty for a generated task."""
INSTRUCTION_TASKS = frozenset({"builtin:ifeval", "builtin:humaneval", "builtin:tool-calls"})
"""Built-in tasks whose prompts are instructions, which instruction-tuned models get in their chat template."""


class TaskSpec(Spec):
    """A task of lm-evaluation-harness, run with teacher and student."""

    name: Annotated[Name, Field(min_length=1)]
    """Name of a task or group of the harness, a task's `.yaml` file (local or `s3://`), `builtin:mmlu`,
    `builtin:gsm8k`, `builtin:humaneval` or `builtin:ifeval` (over their authors' files in `data_dir`),
    `builtin:tool-calls` (whether tool calls are valid JSON), or `paper`: the seven tasks of table B.1."""
    data_dir: Name | None = None
    """Base directory of relative `data_files` of a task file; default: the file's directory. Of a built-in task the
    directory of its files, or the one above it, so that built-in tasks can share a `data_dir`."""
    num_fewshot: Annotated[int, Range(0, 10_000)] | None = None
    """Few-shot examples; default: the task's."""
    metric: Word | None = None
    """Metric, such as `acc_norm`; default: the task's first metric where higher is better. Metrics where lower is
    better, such as `word_perplexity`, must be named."""
    chat_template: bool | None = None
    """Use the tokenizer's chat template, with few-shot examples as separate turns. Null: only for `builtin:ifeval`,
    `builtin:humaneval` and `builtin:tool-calls` with instruction-tuned models."""


def find_task_directory(name: str, data_dir: Path, field: str) -> Path:
    """Return the directory with the files of a built-in task: `data_dir`, or the only directory in it that has them.

    Raises `DataError` if none or several have them, and `OSError` if `data_dir` cannot be read.
    """
    patterns = BUILTIN_TASKS[name]

    def is_complete(directory: Path) -> bool:
        return all(any(directory.glob(pattern)) for pattern in patterns)

    if is_complete(data_dir):
        return data_dir
    paths = sorted(data_dir.iterdir()) if data_dir.is_dir() else ()
    found = [path for path in paths if path.is_dir() and is_complete(path)]
    if len(found) == 1:
        return found[0]
    wanted, place = " and ".join(patterns), f"{field} is {str(data_dir)!r}"
    if found:
        names = " and ".join(repr(path.name) for path in found)
        raise DataError(f"{place}: {names} in it hold {wanted}; use one of them", field=field, value=str(data_dir))
    message = f"{place}: neither it nor a directory in it holds {wanted}, the files of {name}"
    raise DataError(message, field=field, value=str(data_dir))


def is_task_file_name(name: str) -> bool:
    """Whether a task's name is a file name."""
    return name.endswith((".yaml", ".yml"))


def get_task_name_and_data_dir(task: str | TaskSpec) -> tuple[str, str | None]:
    """Return (name, `data_dir` or None) of an entry of `EvaluationSpec.tasks`."""
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
"""Tasks of table B.1 of the paper."""


class EvaluationSpec(Spec):
    """Evaluation of the student, and quality gates. If a gate fails, the job fails with `quality_gate`. If a gate is
    undecided, the job succeeds, but promoting the model requires `accept_undecided`."""

    max_tokens: Annotated[int, Range(64, 10**12)] = 65536
    """Max held-out tokens to evaluate."""
    tasks: Annotated[
        tuple[Annotated[Name, Field(min_length=1)] | TaskSpec, ...], Field(max_length=1000, fail_fast=True)
    ] = ()
    """Tasks of lm-evaluation-harness; a string is a task's `name`."""
    task_limit: Count | None = None
    """Evaluate only the first samples of each task; default: all."""
    task_batch_size: Size | None = None
    """Batch size of tasks. Default: rows for 8,192 tokens when scoring, 256 when generating."""
    max_minutes: Annotated[float, Range(1e-3, 1e6)] | None = None
    """Minutes after which no more tasks start. The report lists the skipped tasks, which have no gates. Null: no
    limit."""
    continuations: Annotated[int, Range(0, 1_000_000)] = 16
    """Number of held-out prompts that teacher and student continue greedily, for the report."""
    continuation_tokens: Size = 32
    """Tokens of each continuation."""
    needle_lengths: (
        Annotated[tuple[Annotated[int, Range(128, 1 << 20)], ...], Field(max_length=64, fail_fast=True)] | None
    ) = None
    """Prompt lengths in tokens of needle-in-a-haystack tasks (find a number in a long text). Null: 1,024 and 4,096 for
    instruction-tuned models with enough context, none for others."""
    needle_samples: Annotated[int, Range(1, 100_000)] = 60
    """Prompts per length."""
    max_kl: Positive | Literal["auto"] | None = "auto"
    """Gate: max KL to the teacher in nats on held-out text. `auto`: 0.2 for instruction-tuned models (whose chat
    template has special tokens), none for others."""
    max_perplexity_ratio: Positive | None = None
    """Gate: max perplexity on held-out text, relative to the teacher's."""
    min_top1_agreement: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] | None = "auto"
    """Gate: min share of held-out positions where teacher and student have the same most likely token. `auto`: 0.8 for
    instruction-tuned models, none for others."""
    min_kl_reduction: Annotated[float, Field(ge=-1.0, lt=1.0)] | None = None
    """Gate: min share by which held-out KL is below that of `training.from` on the same text, such as 0.1; 0: not
    above. Null: no gate."""
    max_needle_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: `max_drop` for `needle_lengths` at which the teacher finds 80% or more; `auto`: 5 to 20 points."""
    max_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: max loss against the teacher on each of `tasks`, in percentage points; in percent of the teacher's score
    for scores outside 0..1 or where lower is better. Passed if the 95% interval of the paired differences is within the
    limit, failed if it is entirely beyond, otherwise undecided. `auto`: per task the smallest loss that its number of
    samples can exclude, from 1 to 10. Null: no gate."""

    @property
    def has_gate(self) -> bool:
        """Whether the spec sets a gate explicitly."""
        limits = self.max_kl, self.max_perplexity_ratio, self.min_top1_agreement, self.min_kl_reduction
        gates_tasks = bool(self.tasks) and self.max_drop is not None
        return gates_tasks or any(limit not in (None, "auto") for limit in limits)


def compute_points_lost(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Return the loss that `max_drop` limits; negative if the student is better.

    In percentage points if higher is better and both scores are within 0..1; otherwise in percent of the teacher's
    score (of 1 if it is 0)."""
    unit = compute_points_per_unit(teacher, student, higher_is_better=higher_is_better)
    return round(unit * (teacher - student), 6)  # so that 0.50 - 0.49 is exactly one point


def compute_points_per_unit(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Return the points of `compute_points_lost` for each unit by which the student's score is below the teacher's;
    negative if lower is better."""
    whole = 1.0 if is_share(teacher, student, higher_is_better=higher_is_better) else abs(teacher) or 1.0
    return (100.0 if higher_is_better else -100.0) / whole


def is_share(teacher: float, student: float, *, higher_is_better: bool) -> bool:
    """Whether losses are in percentage points: higher is better, and both scores are within 0..1."""
    return higher_is_better and 0.0 <= teacher <= 1.0 and 0.0 <= student <= 1.0


class SweepSpec(Spec):
    """One trial per combination of the given values.

    Of the trials that pass all gates of `evaluation`, the one with the least prefill compute becomes the artifact; on a
    tie the smallest KV cache, then the lowest KL.
    """

    num_key_value_layers: Annotated[tuple[NumLayers, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.num_key_value_layers` (l)."""
    key_value_group_size: Annotated[tuple[NumLayers, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.key_value_group_size` (g)."""
    learning_rate: Annotated[tuple[Positive, ...], Field(max_length=_MAX_TRIALS, fail_fast=True)] = ()
    """Values of `optimizer.learning_rate`."""
    max_concurrent: Annotated[int, Range(1, _MAX_TRIALS)] = 1
    """Max concurrent trials, each with the workers of `resources`."""

    @model_validator(mode="after")
    def _validate_num_trials(self) -> Self:
        for name in ("num_key_value_layers", "key_value_group_size", "learning_rate"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} has a duplicate value")
        count = self.num_trials
        if not 2 <= count <= _MAX_TRIALS:
            raise ValueError(f"its lists result in {count} trials; 2..{_MAX_TRIALS} are accepted")
        return self

    @property
    def num_trials(self) -> int:
        return math.prod(
            max(len(v), 1) for v in (self.num_key_value_layers, self.key_value_group_size, self.learning_rate)
        )
