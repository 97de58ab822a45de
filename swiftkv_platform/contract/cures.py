"""Cures of failures: what to change in a job's spec or around it, by the code of the cause, which is a `ReasonCode` or
the code of an error in `errors.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    ConflictError,
    DatabaseUnavailableError,
    DeadlineExceededError,
    ForbiddenError,
    InvalidInputError,
    LossNotFiniteError,
    NotFoundError,
    OverloadedError,
    OverQuotaError,
    ProtocolError,
    QualityGateError,
    QuotaExceededError,
    StorageError,
    SwiftKVError,
    TrainingError,
    UnauthenticatedError,
)
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.documents import is_index

Instead = Callable[[Any, JobSpec], str | None]
"""Takes a field's value and the spec; returns what to use instead, or None if another value does not help."""


@dataclass(frozen=True)
class Cure:
    advice: str
    """Advice apart from changing fields."""
    changes: Mapping[str, Instead] | None = None
    """By the dotted path of the field."""
    blamed: str = "use a value that the cause accepts"
    """Advice on a field that the failure names and `changes` does not."""


def _less(value: Any, _spec: JobSpec) -> str | None:
    """Suggest the largest proper divisor, so that the new value divides everything that the old one divides."""
    most = value if isinstance(value, int) else 1
    return next((f"use {most // by}" for by in range(2, most + 1) if most % by == 0), None)


def _more(value: Any, _spec: JobSpec) -> str | None:
    return f"use {2 * value}" if value else None


def _instead(better: str, *of: Any) -> Instead:
    return lambda value, _spec: f"use {better}" if value in of else None


_RETRIES: Mapping[str, Instead] = {"fault_tolerance.max_retries": lambda value, _spec: f"use {max(2 * value, 3)}"}
_AGAIN = Cure(
    "Nothing in the spec is known to be at fault: clone the job, with training.from set to its last checkpoint "
    "(JOB:STEP) if there is one; `swiftkv doctor` shows which service does not answer.",
    _RETRIES,
)
_OPERATOR = Cure("Or ask the operator to open it to this tenant; then clone the job.", blamed="use one that is open")

CURES: Mapping[str, Cure] = {
    ReasonCode.PREEMPTED: _AGAIN,
    **{error.code: _AGAIN for error in (ConflictError, DeadlineExceededError, OverloadedError)},
    **{error.code: _AGAIN for error in (ClusterUnavailableError, DatabaseUnavailableError)},
    **{error.code: _OPERATOR for error in (UnauthenticatedError, ForbiddenError)},
    ReasonCode.OUT_OF_MEMORY: Cure(
        "More workers with sharding.strategy fsdp2, or sharding.cpu_offload, lower the memory of each worker; `swiftkv "
        "plan` shows by how much.",
        {
            "training.micro_batch_size": _less,
            "data.max_length": lambda value, _spec: f"use {value // 2}" if value >= 1024 else None,
            "training.gradient_checkpointing": _instead("true", False),
            "sharding.strategy": _instead("fsdp2", "ddp"),
        },
    ),
    ReasonCode.WORKER_LOST: Cure(
        "The job's log has the last output of its workers. Clone the job, with training.from set to its last "
        "checkpoint (JOB:STEP) if there is one.",
        _RETRIES,
    ),
    ReasonCode.DISK_FULL: Cure(
        "Checkpoints and data pass through the temporary directory of a machine: free its disk, or start its Ray node "
        "with TMPDIR on a larger one; then clone the job."
    ),
    ReasonCode.NOT_PLACED: Cure(
        "Or add nodes with the resources that the cause names; then clone the job.", {"resources.num_workers": _less}
    ),
    ReasonCode.MAX_RUNTIME_EXCEEDED: Cure(
        "Clone the job with training.from set to its last checkpoint (JOB:STEP) to go on from there. If the spec sets "
        "no limit, it is the operator's.",
        {"limits.max_runtime_s": _more},
    ),
    ReasonCode.INTERNAL: Cure("This is a defect of the control plane, whose log has its traceback: report it."),
    SwiftKVError.code: Cure(
        "This is a defect of the program, or of code that the spec names. `swiftkv jobs logs JOB` has its traceback: "
        "report it, or fix that code and clone the job."
    ),
    InvalidInputError.code: Cure("Clone the job with the change; `swiftkv jobs validate` checks it first."),
    ProtocolError.code: Cure(
        "Update the Ray cluster's image to the control plane's version, and submit the job again.",
        blamed="leave it out if that image must stay",
    ),
    OverQuotaError.code: Cure(
        "`swiftkv quota` shows the tenant's quotas; the operator can raise them.", {"resources.num_workers": _less}
    ),
    QuotaExceededError.code: Cure(
        "Clone the job when other jobs of the tenant have ended, or delete what is no longer needed; `swiftkv quota` "
        "shows the quotas and their use.",
        {"resources.num_workers": _less},
    ),
    NotFoundError.code: Cure("Or restore it; then clone the job.", blamed="use one that exists"),
    StorageError.code: Cure(
        "Check that the object store answers and has space (`swiftkv doctor`); then clone the job, with training.from "
        "set to its last checkpoint (JOB:STEP) if there is one.",
        _RETRIES,
    ),
    TrainingError.code: Cure("`swiftkv jobs logs JOB` says more; clone the job with the change."),
    LossNotFiniteError.code: Cure(
        "If the loss diverges in the first steps, a longer optimizer.warmup_ratio helps.",
        {
            "optimizer.learning_rate": lambda value, _spec: f"use {(value or 1e-3) / 10:.3g}",
            "model.dtype": _instead("float32", "bfloat16"),
        },
    ),
    QualityGateError.code: Cure(
        "`swiftkv jobs events JOB` shows the course of held-out KL.",
        {
            "training.max_steps": _more,
            "training.num_epochs": lambda value, spec: f"use {2 * value}" if spec.training.max_steps is None else None,
            "swiftkv.prefill_reduction": lambda value, spec: (
                f"use {(value or 0.5) / 2:.3g}" if spec.swiftkv.request.given_layers is None else None
            ),
            "swiftkv.num_key_value_layers": lambda value, _spec: None if value is None else f"use {value + 1} or more",
            "swiftkv.key_value_group_size": _less,
        },
        blamed="a looser limit accepts this student",
    ),
}
"""Cures by code. A code without an entry has that of the nearest error class above it."""


def cure_of(code: str) -> Cure:
    """Return the cure for a cause; an unknown code has the cure of a defect."""
    family = [error.code for error in _errors().get(code, SwiftKVError).mro() if issubclass(error, SwiftKVError)]
    return next(CURES[each] for each in (code, *family) if each in CURES)


def what_to_change(code: str, field: str | None, spec: JobSpec) -> str:
    """Return advice on a failed job: each field to change, with its value and what to use instead, and other steps.

    Args:
        field: dotted path that the failure names.
    """
    cure = cure_of(code)
    changes = dict(cure.changes or {})
    if field is not None and field not in changes:
        changes = {field: lambda _value, _spec: cure.blamed, **changes}
    told = []
    for path, instead in changes.items():
        value, known = _value_at(spec, path)
        better = instead(value, spec) if known else None
        if better is not None:
            told.append(f"{path} is {json.dumps(value, ensure_ascii=False)}: {better}")
    return f"{'; or '.join(told)}. {cure.advice}" if told else cure.advice


def _errors() -> Mapping[str, type[SwiftKVError]]:
    found, new = dict[str, type[SwiftKVError]](), [SwiftKVError]
    while new:
        error = new.pop()
        found.setdefault(error.code, error)
        new += error.__subclasses__()
    return found


def _value_at(spec: JobSpec, path: str) -> tuple[Any, bool]:
    """Return the value of a field, and whether it can be shown: a path may lead to an object or to nothing."""
    value: Any = spec.model_dump(mode="json", by_alias=True)
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and is_index(key, value):
            value = value[int(key)]
        else:
            return None, False
    return value, not isinstance(value, dict | list)
