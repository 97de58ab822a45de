"""The first phase of an attempt, in one Ray task: check the model, of which no weight is read, and prepare the data.

What is wrong with a spec, a model or a data set shows here, before any worker starts. Knows no Ray itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftkv_platform.data.completions import AnswerStore, Teacher, WrittenBy
from swiftkv_platform.data.packing import PackedRows, total_steps
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.fork import hidden_loss_index, trained_parameters
from swiftkv_platform.distillation.sequence_parallel import check_heads
from swiftkv_platform.errors import ModelError
from swiftkv_platform.evaluation.harness.run import check_tasks
from swiftkv_platform.evaluation.quality import evaluation_rows
from swiftkv_platform.jobs.values import Plan
from swiftkv_platform.jobs.worker.setup import (
    StoreFiles,
    fetch_data,
    load_tokenizer,
    open_lazy,
    set_up_process,
    teacher_path,
)
from swiftkv_platform.model.adapters import check_can_be_base
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.planning.machines import multiplies_bfloat16
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import resolve_batch_size, resolve_defaults


def prepare(
    spec: JobSpec, rows: Path, *, answers: AnswerStore | None = None, access: Access = OPEN
) -> tuple[Plan, PreparedData]:
    """Everything that precedes the workers, without reading a weight.

    Args:
        rows: directory of the prepared rows; they are made there where it does not exist.
        answers: what the teacher has written, for a spec that asks for it.
        access: what the job may read.

    Raises:
        InvalidInputError: l, g or a layer out of range, or a task that the harness cannot run.
        ModelError: an unreadable teacher or tokenizer.
        DataError: nothing to train on, or to evaluate on.
    """
    import datasets  # takes a second, which training workers need not spend

    set_up_process(spec)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="prepare-") as directory:
        workspace = Path(directory)
        path = teacher_path(spec.model, workspace, access=access)
        lazy = open_lazy(spec, path)
        student = lazy.model
        if spec.publish.adapter:
            check_can_be_base(lazy.base, "publish.adapter")
        spec = _settle(spec, student.config)
        check_heads(student.config, spec.sharding.sequence_parallel_size)
        if spec.distillation.hidden_loss_weight:
            hidden_loss_index(student.config, spec.distillation)
        tokenizer = load_tokenizer(spec, path)
        # Better refused now than after training.
        tasks = workspace / "tasks"
        check_tasks(spec.evaluation.tasks, tokenizer, fetch=lambda uri: fetch_data(uri, tasks), access=access)
        data = PreparedData.load(rows) if rows.is_dir() else _prepare_rows(spec, tokenizer, rows, path, answers, access)
        evaluation_rows(data.held_out, max_tokens=spec.evaluation.max_tokens)  # better refused now than after training
    spec = resolve_batch_size(spec, len(data.train))
    assert spec.training.batch_size is not None
    plan = Plan(
        spec=spec,
        total_steps=total_steps(
            len(data.train),
            batch_size=spec.training.batch_size,
            num_epochs=spec.training.num_epochs,
            max_steps=spec.training.max_steps,
        ),
        num_trained_parameters=sum(p.numel() for p in trained_parameters(student, spec.distillation).values()),
        statistics=data.statistics.model_dump(mode="json"),
        messages=(*data.statistics.messages(), *_slow_products(spec)),
        flops_per_token=training_flops_per_token(spec, student.config, data.train),
    )
    return plan, data


def training_flops_per_token(spec: JobSpec, config: Any, rows: PackedRows) -> float | None:
    """Operations that training on `rows` takes, over the positions that the loss counts; each token attends to its own
    sample. What gradient checkpointing repeats is not among them. None for a family that the planner does not know.
    `config`: the student's configuration."""
    setup = replace(
        training_setup(spec), samples=rows.sample_counts, counted_share=rows.num_counted_tokens / rows.num_tokens
    )
    try:
        flops = plan_training(config.to_dict(), setup).flops_per_token
    except ModelError:
        return None
    return (flops.total - flops.recomputation) / setup.counted_share


def _slow_products(spec: JobSpec) -> Iterator[tuple[str, bool]]:
    """A warning where workers compute in bfloat16 on CPUs such as this one that have no fast products in it."""
    if spec.model.dtype == "bfloat16" and not spec.resources.gpus_per_worker and not multiplies_bfloat16():
        yield (
            "model.dtype bfloat16 is many times slower than float32 on this CPU, which has no AVX-512; use float32",
            True,
        )


def _settle(spec: JobSpec, config: Any) -> JobSpec:
    context_length = getattr(config, "max_position_embeddings", None)
    return resolve_defaults(spec, context_length=context_length, hidden_size=config.hidden_size)


def _prepare_rows(
    spec: JobSpec,
    tokenizer: PreTrainedTokenizerBase,
    rows: Path,
    path: str,
    answers: AnswerStore | None,
    access: Access,
) -> PreparedData:
    rows.mkdir(parents=True)
    written = None if answers is None else WrittenBy(writer(spec, path), answers)
    with tempfile.TemporaryDirectory(prefix="objects-") as directory:
        remote = StoreFiles(Path(directory))
        return prepare_data(
            spec.data,
            tokenizer,
            rows,
            seed=spec.training.seed,
            remote=remote,
            access=access,
            written=written,
            splits=spec.swiftkv.decode_key_value == "own",
            steers=spec.training.validation is not None,
        )


def writer(spec: JobSpec, path: str) -> Teacher:
    """The teacher at `path` as the writer of a job's data. Raises `ModelError`."""
    config = read_config(path, revision=spec.model.revision)
    return Teacher(spec.model.name_or_path, spec.model.revision, spec.model.dtype, config.max_position_embeddings)
