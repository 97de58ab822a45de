"""Measurements of a student: held-out text, continuations, tasks and prefill, teacher and student side by side.
Knows neither how the student was trained nor where its report goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.evaluation.continuations import ContinuationQuality, compare_continuations
from swiftkv_platform.evaluation.harness.needle import NEEDLE, needle_tasks
from swiftkv_platform.evaluation.harness.run import NO_PARTS, run_tasks
from swiftkv_platform.evaluation.harness.tasks import Task
from swiftkv_platform.evaluation.instruct import is_instruction_tuned, needle_lengths
from swiftkv_platform.evaluation.parts import Parts, measured
from swiftkv_platform.evaluation.prefill_cost import PrefillCost, measure_prefill
from swiftkv_platform.evaluation.quality import ALONE, Totals, evaluate
from swiftkv_platform.evaluation.report import Report, TrainingOutcome
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import EvaluationSpec

_TOKENS_PER_FORWARD = 8192
_PROMPTS_PER_BATCH = 16
_PROMPT_LENGTH = 2048
"""Tokens of the prompt whose prefill is timed, where the model's context allows them."""
_PREFILL_ROUNDS = 5


class Evaluation:
    """Measurements of one student by the workers that hold it, each kept when it is done.

    Args:
        student: both of its modes can run.
    """

    def __init__(
        self, student: Any, rows: PackedRows, spec: EvaluationSpec, *, workers: Workers = ALONE, parts: Parts = NO_PARTS
    ) -> None:
        self._student, self._rows, self._spec = student, rows, spec
        self._workers, self._parts = workers, parts

    def compare(self, name: str) -> Totals:
        """Teacher and student on the spec's share of held-out rows; `name` says which student."""
        batch_size = max(1, _TOKENS_PER_FORWARD // self._rows.max_length)
        totals: Totals = self._measured(
            name,
            Totals,
            lambda: evaluate(
                self._student,
                self._rows,
                max_tokens=self._spec.max_tokens,
                batch_size=batch_size,
                workers=self._workers,
            ),
        )
        return totals

    def report(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[Task],
        *,
        rewired: Totals | None = None,
        calibrated: Totals | None = None,
        tokens_trained: int | None = None,
        training: TrainingOutcome | None = None,
    ) -> Report:
        """The report of a finished student, both of its modes on the same text, prompts and tasks.

        Raises:
            DataError: no held-out rows.
            InvalidInputError: a task that the harness cannot run.
            ModelError: the model was exported without its teacher.
        """
        student, spec = self._student, self._spec
        instruct = is_instruction_tuned(tokenizer)
        context = student.config.max_position_embeddings
        lengths = needle_lengths(spec, instruct=instruct, context_length=context)
        runs = find_spec("lm_eval") is not None or spec.needle_lengths is not None
        needles = needle_tasks(lengths, spec.needle_samples, tokenizer, chat=instruct) if runs else []
        answered = run_tasks(student, tokenizer, [*tasks, *needles], spec, workers=self._workers, parts=self._parts)
        if not runs:
            unmeasured = tuple(f"{NEEDLE}{length}" for length in lengths)
            answered = replace(answered, left_out=answered.left_out + unmeasured)
        return Report.build(
            spec,
            rewired=rewired,
            calibrated=calibrated,
            distilled=self.compare("distilled"),
            continuations=self._measured(
                "continuations", ContinuationQuality | None, partial(self._continuations, tokenizer)
            ),
            tasks=answered,
            cost=self._measured("prefill", PrefillCost, self._prefill),
            tokens_trained=tokens_trained,
            training=training,
            instruct=instruct,
        )

    def _continuations(self, tokenizer: PreTrainedTokenizerBase) -> ContinuationQuality | None:
        return compare_continuations(
            self._student,
            self._rows,
            num_prompts=self._spec.continuations,
            num_tokens=self._spec.continuation_tokens,
            batch_size=_PROMPTS_PER_BATCH,
            workers=self._workers,
            decode=lambda tokens: str(tokenizer.decode(tokens)),
        )

    def _prefill(self) -> PrefillCost | None:
        """Measured by the first worker alone, unless a forward pass takes all."""
        if not self._workers.is_first and not self._workers.in_step:
            return self._workers.from_first(None)
        prompt_length = min(_PROMPT_LENGTH, self._student.config.max_position_embeddings)
        return self._workers.from_first(
            measure_prefill(self._student, prompt_length=prompt_length, rounds=_PREFILL_ROUNDS)
        )

    def _measured(self, name: str, kind: Any, measure: Callable[[], Any]) -> Any:
        return measured(self._parts, self._workers, name, kind, measure)
