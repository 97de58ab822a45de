"""The first phase of an attempt, in one Ray task: check the model, read the data, find where the student starts.

What is wrong with a spec, a model or a data set shows here, before any worker starts. Knows no Ray itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from jobs.phases import Plan
from jobs.sources import fetch_data, teacher_path
from swiftkv_platform.distillation.data import PreparedData, prepare_data
from swiftkv_platform.distillation.fork import hidden_loss_index
from swiftkv_platform.distillation.packing import PackedRows, batch_rows, total_steps
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration import calibrate, collect
from swiftkv_platform.specs import JobSpec


@dataclass(frozen=True)
class Prepared:
    """What every worker, and the evaluation, starts from."""

    data: PreparedData
    calibrated: dict[str, Tensor] | None
    """Parameters of the calibrated start, by the student's names; None for a job that starts from the copies."""


def prepare(spec: JobSpec) -> tuple[Plan, Prepared]:
    """Everything that precedes the first step.

    Raises:
        InvalidInputError: l, g or a layer out of range.
        ModelError: an unreadable teacher or tokenizer.
        DataError: nothing to train on.
    """
    import datasets  # takes a second, which training workers need not spend

    set_up_process(spec)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="prepare-") as directory:
        workspace = Path(directory)
        path = teacher_path(spec.model.name_or_path, workspace)
        student = load_student(spec, path)
        if spec.distillation.hidden_loss_weight:
            hidden_loss_index(student.config, spec.distillation)
        data = prepare_data(
            spec.data,
            load_tokenizer(spec, path),
            seed=spec.training.seed,
            fetch=lambda uri: fetch_data(uri, workspace / "data"),
        )
        calibrated = None
        if spec.swiftkv.initialization == "calibrated":
            student.to(task_device(spec))
            rows = _calibration_rows(data.train, spec.swiftkv.calibration_tokens, seed=spec.training.seed)
            calibrate(student, collect(student, rows))
            calibrated = {name: p.detach().cpu().clone() for name, p in student.swiftkv_parameters().items()}
    plan = Plan(
        total_steps=total_steps(
            len(data.train),
            batch_size=spec.training.batch_size,
            num_epochs=spec.training.num_epochs,
            max_steps=spec.training.max_steps,
        ),
        num_trained_parameters=sum(p.numel() for p in student.swiftkv_parameters().values()),
        statistics=data.statistics.model_dump(mode="json"),
    )
    return plan, Prepared(data, calibrated)


def load_student(spec: JobSpec, path: str) -> Any:
    """The student with copied projections, in the spec's dtype."""
    return convert(
        path,
        num_key_value_layers=spec.swiftkv.num_key_value_layers,
        prefill_reduction=spec.swiftkv.prefill_reduction,
        key_value_group_size=spec.swiftkv.key_value_group_size,
        early_exit=spec.swiftkv.early_exit,
        dtype=compute_dtype(spec),
        revision=spec.model.revision,
    )


def load_tokenizer(spec: JobSpec, path: str) -> PreTrainedTokenizerBase:
    """The teacher's tokenizer. Raises `ModelError`."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=spec.model.revision)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read the tokenizer of {spec.model.name_or_path!r}: {str(error).splitlines()[0]}",
            field="model.name_or_path",
            value=spec.model.name_or_path,
        ) from error
    return tokenizer


def compute_dtype(spec: JobSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    return dtype


def task_device(spec: JobSpec) -> torch.device:
    """Where a task with a worker's resources computes."""
    return torch.device("cuda" if spec.resources.gpus_per_worker else "cpu")


def set_up_process(spec: JobSpec) -> None:
    """Use the cores this process was given (threads of processes that share a core slow each other down fiftyfold), and
    draw no progress bars into its log."""
    torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
    transformers.utils.logging.disable_progress_bar()


def _calibration_rows(rows: PackedRows, num_tokens: int, *, seed: int) -> Iterator[dict[str, Tensor]]:
    """Rows of the first epoch without their padding, one at a time, until `num_tokens` tokens."""
    lengths = rows.samples.lengths
    for index in batch_rows(len(rows), batch_size=len(rows), seed=seed, step=0):
        length = int(lengths[rows.members[rows.row_starts[index] : rows.row_starts[index + 1]]].sum())
        yield {name: tensor[:, :length] for name, tensor in rows.batch([index]).items()}
        num_tokens -= length
        if num_tokens <= 0:
            return
