"""Measurement of a student, what it must reach, and the search for one that does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swiftkv_platform.specs.base import Name, Spec, Word
from swiftkv_platform.specs.limits import Count, Layers, NonNegative, Positive, Range, Size

_MOST_TRIALS = 256
BUILTIN_TASKS: Mapping[str, tuple[str, ...]] = {
    "builtin:gsm8k": ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
    "builtin:mmlu": ("test/*_test.csv", "dev/*_dev.csv"),
    "builtin:ifeval": ("input_data.jsonl",),
    "builtin:tool-calls": (),
}
"""Patterns of their authors' files below `data_dir`, by the names of the built-in tasks; none for one that a script
makes."""
INSTRUCTION_TASKS = frozenset({"builtin:ifeval", "builtin:tool-calls"})
"""Built-in tasks that ask for something in plain words, as a user's turn does."""


class TaskSpec(Spec):
    """A task of lm-evaluation-harness, answered by teacher and student."""

    name: Annotated[Name, Field(min_length=1)]
    """Task or group that the harness knows, a task's `.yaml` file (local or `s3://`), `builtin:mmlu`, `builtin:gsm8k`
    or `builtin:ifeval` (over their authors' files in `data_dir`), `builtin:tool-calls` (whether calls of tools are
    valid JSON), or `paper`: the seven tasks of table B.1."""
    data_dir: Name | None = None
    """Directory of the relative `data_files` of a file or built-in task; default: beside the file."""
    num_fewshot: Annotated[int, Range(0, 10_000)] | None = None
    """Examples in the prompt; default: the task's own number."""
    metric: Word | None = None
    """Score that counts, e.g. `acc_norm`; default: the task's first of which more is better. One of which less is
    better, as `word_perplexity`, has to be named."""
    chat_template: bool | None = None
    """Prompt through the tokenizer's chat template, examples as turns of their own. null: for `builtin:ifeval` and
    `builtin:tool-calls`, where the model is instruction-tuned; for no other task."""


def names_task_file(name: str) -> bool:
    """Whether a task's name is that of a file."""
    return name.endswith((".yaml", ".yml"))


def name_and_data(task: str | TaskSpec) -> tuple[str, str | None]:
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
"""Table B.1 of the paper; its chat prompts (appendix B.1) are used where the tokenizer has a template."""


class EvaluationSpec(Spec):
    """The report of a job, and its quality gates: with one failed the job fails as `quality_gate`; with one undecided
    its model is made, and cannot be promoted without a word on that."""

    max_tokens: Annotated[int, Range(64, 10**12)] = 65536
    """Held-out tokens measured."""
    tasks: Annotated[
        tuple[Annotated[Name, Field(min_length=1)] | TaskSpec, ...], Field(max_length=1000, fail_fast=True)
    ] = ()
    """Tasks of lm-evaluation-harness; a string is a task's `name`."""
    task_limit: Count | None = None
    """Samples of each task, the first ones; default: all."""
    task_batch_size: Size | None = None
    """Prompts a forward pass of a task, or answered at a time; default: as many as make 8,192 tokens, and 256."""
    max_minutes: Annotated[float, Range(1e-3, 1e6)] | None = None
    """Minutes after which no further task begins; the report names those left out, which no gate judges. null: none is
    left out."""
    continuations: Annotated[int, Range(0, 1_000_000)] = 16
    """Held-out prompts that teacher and student continue greedily."""
    continuation_tokens: Size = 32
    """Tokens of each continuation."""
    needle_lengths: (
        Annotated[tuple[Annotated[int, Range(128, 1 << 20)], ...], Field(max_length=64, fail_fast=True)] | None
    ) = None
    """Lengths in tokens of prompts in which a number has to be found (needle in a haystack), made by a script. null:
    1,024 and 4,096, where the context holds them, for instruction-tuned models, none for others."""
    needle_samples: Annotated[int, Range(1, 100_000)] = 60
    """Prompts of each length."""
    max_kl: Positive | Literal["auto"] | None = "auto"
    """Gate: most KL (nats) on held-out text. `auto`: 0.2 for instruction-tuned models (their chat template has tokens
    of its own), none for others."""
    max_perplexity_ratio: Positive | None = None
    """Gate: most perplexity on held-out text, as a multiple of the teacher's."""
    min_top1_agreement: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["auto"] | None = "auto"
    """Gate: least share of held-out positions where the student's most likely token is the teacher's. `auto`: 0.8 for
    instruction-tuned models, none for others."""
    max_needle_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate, like `max_drop`, for each length of `needle_lengths` where the teacher finds 80% or more; `auto` is 5 to
    20."""
    max_drop: NonNegative | Literal["auto"] | None = "auto"
    """Gate: most points of a hundred lost against the teacher on any of `tasks`; of a score outside 0..1, or of which
    less is better, most percent of the teacher's. Passed where the whole 95% interval of the paired differences is
    within it, failed where none of it is, else undecided. `auto`: of each task the smallest true loss that its number
    of samples can exclude, 1 at least and 10 at most. null: tasks are only reported."""

    @property
    def has_gate(self) -> bool:
        """Whether it sets a limit of its own."""
        limits = self.max_kl, self.max_perplexity_ratio, self.min_top1_agreement
        judges_tasks = bool(self.tasks) and self.max_drop is not None
        return judges_tasks or any(limit not in (None, "auto") for limit in limits)


def points_lost(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Return the drop that `max_drop` limits; negative where the student wins.

    Points of a hundred where more is better and both scores lie within 0..1; else percent of the teacher's score, a
    score of 0 taken for 1.
    """
    unit = points_per_unit(teacher, student, higher_is_better=higher_is_better)
    return round(unit * (teacher - student), 6)  # 0.50 - 0.49 is one point, not a little more


def points_per_unit(teacher: float, student: float, *, higher_is_better: bool) -> float:
    """Points of `points_lost` for each unit that the student's score is below its teacher's; negative where less is
    better."""
    whole = 1.0 if is_share(teacher, student, higher_is_better=higher_is_better) else abs(teacher) or 1.0
    return (100.0 if higher_is_better else -100.0) / whole


def is_share(teacher: float, student: float, *, higher_is_better: bool) -> bool:
    """Whether what is lost is points of a hundred: more is better, and both scores lie within 0..1."""
    return higher_is_better and 0.0 <= teacher <= 1.0 and 0.0 <= student <= 1.0


class SweepSpec(Spec):
    """One trial for every combination of the values given; what is not given stays as the spec says.

    The artifact is the trial with the least prefill compute, then the smallest cache, then the lowest KL, of those that
    pass the gates of `evaluation`: they are the sweep's accuracy budget.
    """

    num_key_value_layers: Annotated[tuple[Layers, ...], Field(max_length=_MOST_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.num_key_value_layers` (l)."""
    key_value_group_size: Annotated[tuple[Layers, ...], Field(max_length=_MOST_TRIALS, fail_fast=True)] = ()
    """Values of `swiftkv.key_value_group_size` (g)."""
    learning_rate: Annotated[tuple[Positive, ...], Field(max_length=_MOST_TRIALS, fail_fast=True)] = ()
    """Values of `optimizer.learning_rate`."""
    max_concurrent: Annotated[int, Range(1, _MOST_TRIALS)] = 1
    """Trials that train at a time, each with the workers that `resources` asks for."""

    @model_validator(mode="after")
    def _sweeps_something(self) -> Self:
        for name in ("num_key_value_layers", "key_value_group_size", "learning_rate"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} names a value twice")
        count = self.num_trials
        if not 2 <= count <= _MOST_TRIALS:
            raise ValueError(f"its lists make {count} trials; 2..{_MOST_TRIALS} are accepted")
        return self

    @property
    def num_trials(self) -> int:
        return math.prod(
            max(len(v), 1) for v in (self.num_key_value_layers, self.key_value_group_size, self.learning_rate)
        )
