"""Measurements of a student against its teacher: held-out text, continuations, tasks and prefill. Independent of how
the student was trained and where its report goes. For a job's artifact, the defaults are the job's held-out text and
limits, and the job's teacher if the artifact contains none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from swiftkv_platform.configs import SwiftKVConfigMixin
from swiftkv_platform.contract.attempts import MANIFEST, Manifest, is_file_id
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.errors import DataError, ModelError
from swiftkv_platform.evaluation.continuations import ContinuationQuality, compare_continuations
from swiftkv_platform.evaluation.harness.builtin import choose_needle_lengths
from swiftkv_platform.evaluation.harness.rows import build_row_tasks
from swiftkv_platform.evaluation.harness.run import NO_STORE, run_tasks
from swiftkv_platform.evaluation.harness.tasks import Task, build_needle_tasks, is_instruction_tuned, resolve_tasks
from swiftkv_platform.evaluation.parts import NoResultStore, ResultStore, load_or_measure
from swiftkv_platform.evaluation.prefill_cost import PrefillCost, measure_prefill
from swiftkv_platform.evaluation.quality import DEFAULT_WORKERS, HeldOutTotals, evaluate
from swiftkv_platform.evaluation.report import ParentTotals, Report, TrainingOutcome
from swiftkv_platform.jobs.worker.setup import ObjectStoreFiles, fetch_data, resolve_teacher, uses_validation_rows
from swiftkv_platform.model import convert
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.sources import UNRESTRICTED
from swiftkv_platform.specs import DataSourceSpec, DataSpec, EvaluationSpec, JobSpec, ModelSpec
from swiftkv_platform.specs.base import STORED_CONTEXT
from swiftkv_platform.specs.evaluation import NEEDLE_PREFIX
from swiftkv_platform.specs.job import resolve_model_defaults

_TOKENS_PER_FORWARD = 8192
_PROMPTS_PER_BATCH = 16
_PROMPT_LENGTH = 2048
"""Tokens of the prompt for timing prefill, if the context allows."""
_PREFILL_ROUNDS = 5
_MAX_ROW_LENGTH = 2048
"""Max tokens of a row of text named by `--data`; fewer if the context is shorter."""


class StudentEvaluator:
    """Measurements of one student on the workers that hold it. Each is stored when it is done.

    Args:
        student: a student that can run in both modes.
    """

    def __init__(
        self,
        student: Any,
        rows: PackedRows,
        spec: EvaluationSpec,
        *,
        workers: Workers = DEFAULT_WORKERS,
        parts: ResultStore = NO_STORE,
    ) -> None:
        self._student, self._rows, self._spec = student, rows, spec
        self._workers, self._parts = workers, parts

    def compare_teacher_and_student(self, name: str) -> HeldOutTotals:
        """Compare teacher and student on the spec's share of held-out rows; `name` identifies the student."""
        batch_size = max(1, _TOKENS_PER_FORWARD // self._rows.max_length)
        totals: HeldOutTotals = self._measure_once(
            name,
            HeldOutTotals,
            lambda: evaluate(
                self._student,
                self._rows,
                max_tokens=self._spec.max_tokens,
                batch_size=batch_size,
                workers=self._workers,
            ),
        )
        return totals

    def measure_parent(self, tokenizer: PreTrainedTokenizerBase, row_tasks: Sequence[Task]) -> ParentTotals:
        """Measure the student that training continued from, on the same text and rows as its successor."""
        scores = run_tasks(
            self._student,
            tokenizer,
            row_tasks,
            self._spec,
            workers=self._workers,
            parts=self._parts,
            prefix="parent-",
        )
        return ParentTotals(self.compare_teacher_and_student("parent"), scores.scores)

    def build_report(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[Task],
        *,
        rewired: HeldOutTotals | None = None,
        calibrated: HeldOutTotals | None = None,
        parent: ParentTotals | None = None,
        tokens_trained: int | None = None,
        training: TrainingOutcome | None = None,
    ) -> Report:
        """Build the report of a finished student, with both modes on the same text, prompts and tasks.

        Raises:
            DataError: no held-out rows.
            InvalidInputError: a task that the harness cannot run.
            ModelError: the model was exported without its teacher.
        """
        student, spec = self._student, self._spec
        instruct = is_instruction_tuned(tokenizer)
        context = student.config.max_position_embeddings
        lengths = choose_needle_lengths(spec, instruct=instruct, context_length=context)
        runs = find_spec("lm_eval") is not None or spec.needle_lengths is not None
        needles = build_needle_tasks(lengths, spec.needle_samples, tokenizer, chat=instruct) if runs else []
        results = run_tasks(student, tokenizer, [*tasks, *needles], spec, workers=self._workers, parts=self._parts)
        if not runs:
            unmeasured = tuple(f"{NEEDLE_PREFIX}{length}" for length in lengths)
            results = replace(results, left_out=results.left_out + unmeasured)
        return Report.build(
            spec,
            rewired=rewired,
            calibrated=calibrated,
            parent=parent,
            distilled=self.compare_teacher_and_student("distilled"),
            continuations=self._measure_once(
                "continuations", ContinuationQuality | None, partial(self._measure_continuations, tokenizer)
            ),
            tasks=results,
            cost=self._measure_once("prefill", PrefillCost, self._measure_prefill),
            tokens_trained=tokens_trained,
            training=training,
            instruct=instruct,
        )

    def _measure_continuations(self, tokenizer: PreTrainedTokenizerBase) -> ContinuationQuality | None:
        return compare_continuations(
            self._student,
            self._rows,
            num_prompts=self._spec.continuations,
            num_tokens=self._spec.continuation_tokens,
            batch_size=_PROMPTS_PER_BATCH,
            workers=self._workers,
            decode=lambda tokens: str(tokenizer.decode(tokens)),
        )

    def _measure_prefill(self) -> PrefillCost | None:
        """Measure prefill on the first worker only, unless a forward pass needs all workers."""
        if not self._workers.is_first and not self._workers.in_step:
            return self._workers.broadcast_from_first(None)
        prompt_length = min(_PROMPT_LENGTH, self._student.config.max_position_embeddings)
        return self._workers.broadcast_from_first(
            measure_prefill(self._student, prompt_length=prompt_length, rounds=_PREFILL_ROUNDS)
        )

    def _measure_once(self, name: str, kind: Any, measure: Callable[[], Any]) -> Any:
        return load_or_measure(self._parts, self._workers, name, kind, measure)


def evaluate_directory(
    path: Path,
    *,
    data: Sequence[str] = (),
    teacher: str | None = None,
    evaluation: dict[str, Any] | None = None,
    allows_code_tasks: bool = False,
    row_results: Path | None = None,
    progress: Callable[[str], None] = lambda _step: None,
) -> tuple[Report, dict[str, Any]]:
    """Measure the student in `path` against its teacher.

    Args:
        data: text to measure on, used completely, as in `data.sources`; empty: the job's held-out text.
        teacher: the model that the student was made of, as in `model.name_or_path`; None: the student's teacher mode
            or, for a student without its teacher's projections, the teacher named by the job.
        evaluation: fields of `EvaluationSpec` that override the job's or the defaults.
        allows_code_tasks: allow tasks that run the model's answers as code.
        row_results: directory for the results of single rows, a file of JSON Lines per task; None: not kept.
        progress: called with a description of each step.

    Returns:
        The report, without the stages before training, and the artifact's lineage (empty if there is none). The job's
        rows in uploaded files or captured traffic are left out.

    Raises:
        ModelError: not a SwiftKV model, no teacher in it and none named, or the teacher of another model.
        DataError: no text: the directory is no job's artifact and `data` is empty, or nothing is held out.
        InvalidInputError: a task that the harness cannot run.
    """
    import datasets

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    lineage = _read_lineage(path)
    job = JobSpec.model_validate(lineage["spec"], context=STORED_CONTEXT) if "spec" in lineage else None
    settings = (job.evaluation if job else EvaluationSpec()).model_dump(mode="json") | (evaluation or {})
    spec = EvaluationSpec.model_validate(settings)
    # Rows that only the platform's jobs can read are left out, unless the caller names them.
    unreadable = () if "rows" in (evaluation or {}) else _list_private_row_tasks(spec)
    spec = spec.model_copy(update={"rows": tuple(task for task in spec.rows if task.name not in unreadable)})
    progress(f"Loading {path}")
    student, tokenizer = _load_student(path)
    named = None if teacher is None else ModelSpec(name_or_path=teacher)
    if named is None and not student.config.swiftkv_teacher_weights:
        named = _find_teacher(path, lineage)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as directory:
        workspace = Path(directory)
        if named is not None:
            progress(f"Loading the teacher {named.name_or_path}")
            _attach_teacher(student, resolve_teacher(named, workspace), named)
        access = replace(UNRESTRICTED, code_tasks=allows_code_tasks)
        tasks = resolve_tasks(spec.tasks, fetch=lambda uri: fetch_data(uri, workspace / "tasks"), access=access)
        tasks += build_row_tasks(
            spec,
            tokenizer,
            context_length=student.config.max_position_embeddings,
            remote=ObjectStoreFiles(workspace / "evaluation-rows"),
        )
        progress("Preparing text")
        rows = _prepare_rows(student, tokenizer, job, data, workspace)
        progress("Measuring tasks and held-out text")
        parts = _LocalResults(progress, row_results)
        report = StudentEvaluator(student, rows, spec, parts=parts).build_report(tokenizer, tasks)
        return report.model_copy(update={"tasks_left_out": (*report.tasks_left_out, *unreadable)}), lineage


def _list_private_row_tasks(spec: EvaluationSpec) -> tuple[str, ...]:
    """Return the names of rows that are uploaded files or captured traffic."""
    sources = ((task.name, task.source.name_or_path) for task in spec.rows)
    return tuple(name for name, source in sources if is_file_id(source) or source.startswith("traffic:"))


class _LocalResults(NoResultStore):
    """Stores the results of rows only, in a directory if there is one, and describes progress."""

    def __init__(self, report: Callable[[str], None], row_results: Path | None) -> None:
        self._report, self._row_results = report, row_results

    def store_rows(self, name: str, data: bytes) -> None:
        if self._row_results is not None:
            self._row_results.mkdir(parents=True, exist_ok=True)
            (self._row_results / f"{name}.jsonl").write_bytes(data)

    def report_progress(self, name: str, done: int, total: int) -> None:
        self._report(f"Measuring {name}: {done} of {total}")


def _read_lineage(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    return Manifest.model_validate_json(manifest.read_bytes()).lineage if manifest.is_file() else {}


def _load_student(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a student and its tokenizer. Raises `ModelError`."""
    config: Any = read_config(path, field="path")
    vocab_size = config.vocab_size
    if not isinstance(config, SwiftKVConfigMixin):
        why = f", a {config.model_type} model, not a student; use one that `swiftkv distill` or `swiftkv convert` wrote"
        raise ModelError.for_field("path", str(path), why)
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(path, vocab_size, field="path")
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", trust_remote_code=False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _find_teacher(path: Path, lineage: dict[str, Any]) -> ModelSpec:
    if name := lineage.get("teacher"):
        return ModelSpec(name_or_path=name, revision=lineage.get("revision"))
    raise ModelError(
        f"{path} does not contain its teacher: it was exported without the teacher, as all students trained with "
        "`trainable: tail` or `all` are; set --teacher to the model that the student was made from",
        field="teacher",
    )


def _attach_teacher(student: Any, path: str, teacher_spec: ModelSpec) -> None:
    """Make the student's teacher mode run the layers of the model in `path`; embeddings, norm and head are the same."""
    decoder, config = student.model, student.config
    layers = config.num_key_value_layers
    teacher = convert(path, num_key_value_layers=layers, dtype=student.dtype, revision=teacher_spec.revision).model
    teacher = teacher.to(student.device).eval()
    ours, theirs = decoder.embed_tokens.weight, teacher.embed_tokens.weight
    if teacher.config.num_hidden_layers != config.num_hidden_layers or not torch.equal(ours, theirs):
        raise ModelError.for_field(
            "teacher", teacher_spec.name_or_path, ", which the student was not made from: layers or embeddings differ"
        )
    decoder.run_teacher_lower, decoder.run_teacher_upper = teacher.run_lower_layers, teacher.run_teacher_upper
    config.swiftkv_teacher_weights = True


def _prepare_rows(
    student: Any, tokenizer: PreTrainedTokenizerBase, job: JobSpec | None, data: Sequence[str], workspace: Path
) -> PackedRows:
    if data:
        sources = tuple(DataSourceSpec(name_or_path=name) for name in data)
        max_length = min(_MAX_ROW_LENGTH, student.config.max_position_embeddings)
        spec, seed = DataSpec(sources=sources, max_length=max_length, validation_fraction=0.0), 0
        with_steering = False
    elif job is not None:
        config = student.config
        settled = resolve_model_defaults(
            job, context_length=config.max_position_embeddings, hidden_size=config.hidden_size
        )
        spec, seed = settled.data, job.training.seed
        with_steering = uses_validation_rows(settled)
        if any(source.complete is not None for source in spec.sources):
            raise DataError(
                "the job's data was generated by its teacher and is no longer stored: set --data to the evaluation "
                "text",
                field="data",
            )
        if any(source.is_traffic for source in spec.sources):
            raise DataError(
                "the job's data is captured traffic, which only jobs can read: name text to measure on with --data",
                field="data",
            )
    else:
        raise DataError("the directory is not a job's artifact: set --data to the evaluation text", field="data")
    rows = workspace / "rows"
    rows.mkdir()
    prepared = prepare_data(
        spec,
        tokenizer,
        rows,
        seed=seed,
        remote=ObjectStoreFiles(workspace / "objects"),
        mask_prompts=bool(student.config.layer_map.deep_leaders),
        with_steering=with_steering,
    )
    # If a source has its own held-out text, only that is measured.
    return prepared.train if data and not len(prepared.held_out) else prepared.held_out
