"""Measurements of a student: held-out text, continuations, tasks and prefill, teacher and student side by side.
Knows neither how the student was trained nor where its report goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.fork import keep_teacher
from swiftkv_platform.evaluation.continuations import compare_continuations
from swiftkv_platform.evaluation.harness.run import run_tasks
from swiftkv_platform.evaluation.harness.tasks import Task
from swiftkv_platform.evaluation.prefill_cost import measure_prefill
from swiftkv_platform.evaluation.quality import Totals, evaluate
from swiftkv_platform.evaluation.report import Report
from swiftkv_platform.model.export import drop_teacher
from swiftkv_platform.specs import DistillationSpec, EvaluationSpec

_TOKENS_PER_FORWARD = 8192
_PROMPTS_PER_BATCH = 16
_PROMPT_LENGTH = 2048
"""Tokens of the prompt whose prefill is timed, where the model's context allows them."""
_PREFILL_ROUNDS = 5


def compare(student: Any, rows: PackedRows, spec: EvaluationSpec) -> Totals:
    """Teacher and student on the spec's share of held-out rows."""
    batch_size = max(1, _TOKENS_PER_FORWARD // rows.max_length)
    return evaluate(student, rows, max_tokens=spec.max_tokens, batch_size=batch_size)


def measure_student(
    student: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedRows,
    spec: EvaluationSpec,
    tasks: Sequence[Task],
    *,
    rewired: Totals | None = None,
    calibrated: Totals | None = None,
    tokens_trained: int | None = None,
) -> Report:
    """The report of a finished student, both of its modes on the same text, prompts and tasks.

    Raises:
        DataError: no held-out rows.
        InvalidInputError: a task that the harness cannot run.
        ModelError: the model was exported without its teacher.
    """
    prompt_length = min(_PROMPT_LENGTH, student.config.max_position_embeddings)
    return Report.build(
        spec,
        rewired=rewired,
        calibrated=calibrated,
        distilled=compare(student, rows, spec),
        continuations=compare_continuations(
            student,
            rows,
            num_prompts=spec.continuations,
            num_tokens=spec.continuation_tokens,
            batch_size=_PROMPTS_PER_BATCH,
        ),
        tasks=run_tasks(student, tokenizer, tasks, spec),
        cost=measure_prefill(student, prompt_length=prompt_length, rounds=_PREFILL_ROUNDS),
        tokens_trained=tokens_trained,
    )


@contextmanager
def teacher_kept_apart(student: Any, spec: DistillationSpec) -> Iterator[None]:
    """Let what trained layers started as answer for the teacher while the student is measured; afterwards there is no
    teacher."""
    decoder = student.model
    teacher = keep_teacher(decoder, spec)
    decoder.teacher_upper = teacher.teacher_upper
    if spec.trainable == "all":
        decoder.teacher_lower = teacher.lower
    yield
    del decoder.teacher_upper
    decoder.teacher_lower = None
    drop_teacher(student)
