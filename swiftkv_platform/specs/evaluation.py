"""Sections `evaluation` (with quality gates) and `sweep` of a job spec."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from swiftkv_platform.errors import DataError
from swiftkv_platform.specs.base import (
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    Count,
    Name,
    NonNegative,
    NumLayers,
    Positive,
    Range,
    Size,
    Spec,
    Word,
    make_field_error,
)
from swiftkv_platform.specs.data import DataSourceSpec

_MAX_TRIALS = 256
NEEDLE_PREFIX = "needle_"
"""Prefix of the names of needle-in-a-haystack tasks, before the prompt length in tokens: `needle_4096`."""
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


RowMetric = Literal["exact_match", "contains", "json_schema", "classification", "numeric", "likelihood"]
_METRICS_BY_OPTION: Mapping[str, tuple[RowMetric, ...]] = {
    "ignore_case": ("exact_match", "contains"),
    "labels": ("classification",),
    "json_schema": ("json_schema",),
    "json_schema_column": ("json_schema",),
    "absolute_tolerance": ("numeric",),
    "relative_tolerance": ("numeric",),
    "answer_column": ("exact_match", "contains", "classification", "numeric", "likelihood"),
    "max_tokens": ("exact_match", "contains", "json_schema", "numeric", "likelihood"),
    "stop": ("exact_match", "contains", "json_schema", "numeric", "likelihood"),
}
"""Options of a `RowTaskSpec`, with the metrics that use them."""


class RowTaskSpec(Spec):
    """Own rows on which teacher and student are compared: a prompt per row and, for most metrics, the expected
    answer."""

    name: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the task in reports and comparisons."""
    source: DataSourceSpec
    """The rows, in any format of `data.sources`. A row's prompt is all of it but the last answer of the assistant."""
    metric: RowMetric
    """How an answer is scored. `exact_match`: 1 if it equals the expected answer, apart from white space. `contains`: 1
    if it contains the expected answer. `json_schema`: 1 if it is JSON (also in a code fence) and valid. `numeric`: 1 if
    its last number equals that of the expected answer, within a tolerance. `classification`: 1 if the expected answer
    is the most likely of `labels`. `likelihood`: log-likelihood per token of the expected answer, or of the teacher's
    answer for rows without one."""
    answer_column: Annotated[Word, Field(min_length=1)] | None = None
    """Column with the expected answer. Null: the assistant's last message, or the completion."""
    ignore_case: bool = False
    """For `exact_match` and `contains`: ignore upper and lower case."""
    labels: Annotated[tuple[Annotated[Word, Field(min_length=1)], ...], Field(max_length=1000, fail_fast=True)] = ()
    """For `classification`: all possible answers."""
    json_schema: dict[str, Any] | None = None
    """For `json_schema`: the JSON schema of every answer. Null: each row has its own, in `json_schema_column`."""
    json_schema_column: Annotated[Word, Field(min_length=1)] | None = None
    """For `json_schema`: column with the schema of the row's answer, as an object or as JSON."""
    absolute_tolerance: NonNegative = 0.0
    """For `numeric`: max distance from the expected number."""
    relative_tolerance: NonNegative = 0.0
    """For `numeric`: max distance relative to the expected number. The larger of both tolerances counts."""
    max_tokens: Size = 256
    """Max tokens of an answer that is generated, greedily."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...],
        Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    ] = ()
    """Texts that end an answer, besides the model's end tokens."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for error in self._find_errors():
            raise error
        return self

    def _find_errors(self) -> Iterator[PydanticCustomError]:
        for option, metrics in _METRICS_BY_OPTION.items():
            value = getattr(self, option)
            if self.metric not in metrics and value != type(self).model_fields[option].default:
                why = f"{option} is set, but metric {self.metric!r} does not use it; it is for {', '.join(metrics)}"
                yield make_field_error(option, value, why)
        labels = {" ".join(label.split()) for label in self.labels}
        if self.metric == "classification" and ("" in labels or len(labels) < max(len(self.labels), 2)):
            given = ", ".join(self.labels) or "empty"
            yield make_field_error("labels", self.labels, f"labels is {given}; use two or more different labels")
        if self.metric == "json_schema" and (self.json_schema is None) == (self.json_schema_column is None):
            given = "neither is" if self.json_schema is None else "both are"
            why = f"metric json_schema needs either json_schema or json_schema_column, and {given} set"
            yield make_field_error("json_schema", self.json_schema, why)
        if self.source.complete is not None:
            why = "source.complete is set, but answers of rows to evaluate are not generated before; leave it out"
            yield make_field_error("source.complete", None, why)
        if self.source.weight != 1.0:
            why = f"source.weight is {self.source.weight:g}, but every row to evaluate counts once; leave it out"
            yield make_field_error("source.weight", self.source.weight, why)


class EvaluationSpec(Spec):
    """Evaluation of the student, and quality gates. If a gate fails, the job fails with `quality_gate`. If a gate is
    undecided, the job succeeds, but promoting the model requires `accept_undecided`."""

    max_tokens: Annotated[int, Range(64, 10**12)] = 65536
    """Max held-out tokens to evaluate."""
    tasks: Annotated[
        tuple[Annotated[Name, Field(min_length=1)] | TaskSpec, ...], Field(max_length=1000, fail_fast=True)
    ] = ()
    """Tasks of lm-evaluation-harness; a string is a task's `name`."""
    rows: Annotated[tuple[RowTaskSpec, ...], Field(max_length=100, fail_fast=True)] = ()
    """Own rows to compare teacher and student on, each a task of the report."""
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
    """Gate: min relative reduction of held-out KL compared with `training.from` on the same text, e.g. 0.1 for 10%
    lower; 0: not higher. Null: no gate."""
    max_needle_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: `max_drop` for `needle_lengths` at which the teacher finds 80% or more; `auto`: 5 to 20 points."""
    max_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: max loss against the teacher on each of `tasks` and `rows`, in percentage points; in percent of the
    teacher's score for scores outside 0..1 or where lower is better. Passed if the 95% interval of the paired
    differences is within the limit, failed if it is entirely beyond, otherwise undecided. `auto`: per task the smallest
    loss that its number of samples can exclude, from 1 to 10. Null: no gate."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Refuse names of rows that two tasks of the report would have."""
        taken = [get_task_name_and_data_dir(task)[0] for task in self.tasks]
        taken += [task.name for task in PAPER_TASKS if "paper" in taken]
        for index, task in enumerate(self.rows):
            if task.name in taken or task.name.startswith(NEEDLE_PREFIX):
                why = f"rows[{index}].name is {task.name!r}, the name of another task; use a different name"
                raise make_field_error(f"rows[{index}].name", task.name, why)
            taken.append(task.name)
        return self

    @property
    def has_gate(self) -> bool:
        """Whether the spec sets a gate explicitly."""
        limits = self.max_kl, self.max_perplexity_ratio, self.min_top1_agreement, self.min_kl_reduction
        gates_tasks = bool(self.tasks or self.rows) and self.max_drop is not None
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
    whole = 1.0 if uses_percentage_points(teacher, student, higher_is_better=higher_is_better) else abs(teacher) or 1.0
    return (100.0 if higher_is_better else -100.0) / whole


def uses_percentage_points(teacher: float, student: float, *, higher_is_better: bool) -> bool:
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
