"""The report of a SwiftKV directory against its teacher, in this process. Knows no Ray and no job; where the directory
is a job's artifact, the job's held-out text and limits are the default, and its teacher where the artifact has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from swiftkv_platform.configs import SwiftKVConfigMixin
from swiftkv_platform.contract.attempts import MANIFEST, Manifest
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.errors import DataError, ModelError
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.evaluation.report import Report
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.setup import StoreFiles, fetch_data, teacher_path
from swiftkv_platform.model import convert
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.specs import DataSourceSpec, DataSpec, EvaluationSpec, JobSpec, ModelSpec
from swiftkv_platform.specs.defaults import resolve_defaults

_LONGEST_ROW = 2048
"""Tokens a row of other text than the job's, where the model's context allows them."""


def evaluate_directory(
    path: Path, *, data: Sequence[str] = (), teacher: str | None = None, evaluation: dict[str, Any] | None = None
) -> tuple[Report, dict[str, Any]]:
    """Measure the student in `path` against its teacher.

    Args:
        data: text to measure on, all of it, as `data.sources` names it; empty takes what the job held out.
        teacher: the model it was made of, as `model.name_or_path` names it; None: its own teacher mode, and of an
            artifact without one, the job's teacher.
        evaluation: fields of `EvaluationSpec` in place of the job's or the defaults.

    Returns:
        The report, without the stages before training, and the artifact's lineage (empty where there is none).

    Raises:
        ModelError: no SwiftKV model, one without its teacher where none is named, or another model's teacher.
        DataError: no text: the directory is no job's artifact and `data` is empty, or nothing is held out.
        InvalidInputError: a task that the harness cannot run.
    """
    import datasets

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    lineage = _lineage(path)
    job = JobSpec.model_validate(lineage["spec"]) if "spec" in lineage else None
    settings = (job.evaluation if job else EvaluationSpec()).model_dump(mode="json") | (evaluation or {})
    spec = EvaluationSpec.model_validate(settings)
    student, tokenizer = _load(path)
    named = None if teacher is None else ModelSpec(name_or_path=teacher)
    if named is None and not student.config.swiftkv_teacher_weights:
        named = _teacher_of(path, lineage)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as directory:
        workspace = Path(directory)
        if named is not None:
            _attach_teacher(student, teacher_path(named, workspace), named)
        tasks = resolve_tasks(spec.tasks, fetch=lambda uri: fetch_data(uri, workspace / "tasks"))
        rows = _rows(student, tokenizer, job, data, workspace)
        return Evaluation(student, rows, spec).report(tokenizer, tasks), lineage


def _lineage(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    return Manifest.model_validate_json(manifest.read_bytes()).lineage if manifest.is_file() else {}


def _load(path: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    config: Any = read_config(path, field="path")
    vocab_size = config.vocab_size
    if not isinstance(config, SwiftKVConfigMixin):
        raise ModelError(
            f"{path} holds a {config.model_type} model, which has no student; one that `swiftkv distill` or "
            "`swiftkv convert` wrote is accepted",
            field="path",
            value=str(path),
        )
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(path, vocab_size, field="path")
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype="auto", trust_remote_code=False)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _teacher_of(path: Path, lineage: dict[str, Any]) -> ModelSpec:
    if name := lineage.get("teacher"):
        return ModelSpec(name_or_path=name, revision=lineage.get("revision"))
    raise ModelError(
        f"{path} has no teacher to measure against: it was exported without, as is what `trainable: tail` or `all` "
        "leaves; name the model it was made of with --teacher",
        field="teacher",
    )


def _attach_teacher(student: Any, path: str, named: ModelSpec) -> None:
    """Have the student's teacher mode run the layers of the model in `path`; embeddings, norm and head are the same."""
    decoder, config = student.model, student.config
    layers = config.num_key_value_layers
    teacher = convert(path, num_key_value_layers=layers, dtype=student.dtype, revision=named.revision).model
    teacher = teacher.to(student.device).eval()
    ours, theirs = decoder.embed_tokens.weight, teacher.embed_tokens.weight
    if teacher.config.num_hidden_layers != config.num_hidden_layers or not torch.equal(ours, theirs):
        raise ModelError.of(
            "teacher", named.name_or_path, ", which the student was not made of: layers or embeddings differ"
        )
    decoder.teacher_lower, decoder.teacher_upper = teacher.lower, teacher.teacher_upper
    config.swiftkv_teacher_weights = True


def _rows(
    student: Any, tokenizer: PreTrainedTokenizerBase, job: JobSpec | None, data: Sequence[str], workspace: Path
) -> PackedRows:
    if data:
        sources = tuple(DataSourceSpec(name_or_path=name) for name in data)
        max_length = min(_LONGEST_ROW, student.config.max_position_embeddings)
        spec, seed = DataSpec(sources=sources, max_length=max_length, validation_fraction=0.0), 0
    elif job is not None:
        config = student.config
        settled = resolve_defaults(job, context_length=config.max_position_embeddings, hidden_size=config.hidden_size)
        spec, seed = settled.data, job.training.seed
        if any(source.complete is not None for source in spec.sources):
            raise DataError(
                "the job had its data written by the teacher, and what was written is not kept: name text to measure "
                "on with --data",
                field="data",
            )
    else:
        raise DataError("the directory is no job's artifact: name text to measure on with --data", field="data")
    rows = workspace / "rows"
    rows.mkdir()
    prepared = prepare_data(
        spec,
        tokenizer,
        rows,
        seed=seed,
        remote=StoreFiles(workspace / "objects"),
        splits=student.config.decodes_own,
    )
    # A source may bring held-out text of its own; of any other all is measured.
    return prepared.train if data and not len(prepared.held_out) else prepared.held_out
