"""Advice on failed jobs: spec fields to change, and other steps, by error code: a `ReasonCode`, or the code of an error
in `errors.py`."""

from __future__ import annotations

import json
import math
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

Suggestion = Callable[[Any, JobSpec], str | None]
"""Function of a field's value and the spec that returns a suggestion, e.g. "use 3"; None if no other value helps."""


@dataclass(frozen=True)
class Cure:
    advice: str
    """Advice on steps other than changing fields of the spec."""
    changes: Mapping[str, Suggestion] | None = None
    """Suggestions by dotted path of a field."""
    named_field_advice: str = "use a valid value"
    """Suggestion for the field that the error names, if `changes` does not have it."""


def _suggest_divisor(value: Any, _spec: JobSpec) -> str | None:
    """Suggest the largest proper divisor, which still divides the batch size."""
    number = value if isinstance(value, int) else 1
    return next((f"use {number // by}" for by in range(2, number + 1) if number % by == 0), None)


def _suggest_double(value: Any, _spec: JobSpec) -> str | None:
    return f"use {2 * value}" if value else None


def _suggest_if(current: Any, better: str) -> Suggestion:
    """Suggest `better` if the field's value is `current`."""
    return lambda value, _spec: f"use {better}" if value == current else None


_MORE_RETRIES: Mapping[str, Suggestion] = {
    "fault_tolerance.max_retries": lambda value, _spec: f"use {max(2 * value, 3)}"
}
_RETRY_CURE = Cure(
    "The spec is probably not the cause; `swiftkv doctor` shows unavailable services. Clone the job, with "
    "training.from set to its last checkpoint (JOB:STEP) if there is one.",
    _MORE_RETRIES,
)
_ASK_OPERATOR = Cure(
    "The operator can allow the refused value for this tenant; then clone the job.",
    named_field_advice="use an allowed value",
)

CURES: Mapping[str, Cure] = {
    ReasonCode.PREEMPTED: _RETRY_CURE,
    **{error.code: _RETRY_CURE for error in (ConflictError, DeadlineExceededError, OverloadedError)},
    **{error.code: _RETRY_CURE for error in (ClusterUnavailableError, DatabaseUnavailableError)},
    **{error.code: _ASK_OPERATOR for error in (UnauthenticatedError, ForbiddenError)},
    ReasonCode.OUT_OF_MEMORY: Cure(
        "More workers with sharding.strategy fsdp2, or sharding.cpu_offload, reduce the memory per worker; `swiftkv "
        "plan` estimates it.",
        {
            "training.micro_batch_size": _suggest_divisor,
            "data.max_length": lambda value, _spec: f"use {value // 2}" if value >= 1024 else None,
            "training.gradient_checkpointing": _suggest_if(False, "true"),
            "sharding.strategy": _suggest_if("ddp", "fsdp2"),
        },
    ),
    ReasonCode.WORKER_LOST: Cure(
        "The job's log has its workers' last output. Clone the job, with training.from set to its last "
        "checkpoint (JOB:STEP) if there is one.",
        _MORE_RETRIES,
    ),
    ReasonCode.DISK_FULL: Cure(
        "Checkpoints and data pass through the machine's temporary directory. Free disk space, or start the Ray node "
        "with TMPDIR on a larger disk; then clone the job."
    ),
    ReasonCode.NOT_PLACED: Cure(
        "Or add nodes with the resources in the error message; then clone the job.",
        {"resources.num_workers": _suggest_divisor},
    ),
    ReasonCode.MAX_RUNTIME_EXCEEDED: Cure(
        "Clone the job with training.from set to its last checkpoint (JOB:STEP) to continue from there. If the spec "
        "sets no limit, the operator's limit applies.",
        {"limits.max_runtime_s": _suggest_double},
    ),
    ReasonCode.INTERNAL: Cure("This is a bug in the control plane: report it with the traceback from its log."),
    SwiftKVError.code: Cure(
        "This is a bug in the program, or in code that the spec names. `swiftkv jobs logs JOB` has the traceback: "
        "report it, or fix that code and clone the job."
    ),
    InvalidInputError.code: Cure("Correct the spec and check it with `swiftkv jobs validate`; then clone the job."),
    ProtocolError.code: Cure(
        "Update the Ray cluster's image to the control plane's version, and submit the job again.",
        named_field_advice="leave it out if the image cannot be updated",
    ),
    OverQuotaError.code: Cure(
        "`swiftkv quota` shows the tenant's quotas; the operator can raise them.",
        {"resources.num_workers": _suggest_divisor},
    ),
    QuotaExceededError.code: Cure(
        "Clone the job when other jobs of the tenant have ended, or delete unused files and models; `swiftkv quota` "
        "shows quotas and usage.",
        {"resources.num_workers": _suggest_divisor},
    ),
    NotFoundError.code: Cure(
        "Or restore what is missing; then clone the job.", named_field_advice="use an existing one"
    ),
    StorageError.code: Cure(
        "Check with `swiftkv doctor` that the object store is available and has space; then clone the job, with "
        "training.from set to its last checkpoint (JOB:STEP) if there is one.",
        _MORE_RETRIES,
    ),
    TrainingError.code: Cure("`swiftkv jobs logs JOB` shows the cause. Then clone the job with a corrected spec."),
    LossNotFiniteError.code: Cure(
        "If the loss diverges in the first steps, increase optimizer.warmup_ratio.",
        {
            "optimizer.learning_rate": lambda value, _spec: f"use {(value or 1e-3) / 10:.3g}",
            "model.dtype": _suggest_if("bfloat16", "float32"),
        },
    ),
    QualityGateError.code: Cure(
        "`swiftkv jobs events JOB` shows held-out KL during training.",
        named_field_advice="relax the limit to accept this student",
    ),
}
"""Advice by code. A code without an entry has the advice of its nearest base class."""


def find_cure(code: str) -> Cure:
    """Return the advice for an error code; unknown codes have that of `SwiftKVError`, a bug."""
    family = [
        error.code for error in _map_error_codes().get(code, SwiftKVError).mro() if issubclass(error, SwiftKVError)
    ]
    return next(CURES[each] for each in (code, *family) if each in CURES)


def advise_on_failure(
    code: str, field: str | None, spec: JobSpec, *, value: Any = None, job_id: str | None = None
) -> str:
    """Return advice on a failed job: fields to change, with their values and suggestions, then other steps.

    Args:
        field: dotted path of the field that the error names.
        value: value that the error names; for a quality gate, the measured one.
        job_id: id of the job, for commands in the advice; None: a run of `swiftkv distill`, which has no id.
    """
    cure = find_cure(code)
    changes, named_field_advice = dict(cure.changes or {}), cure.named_field_advice
    if code == QualityGateError.code:
        limit = None if field is None else _read_field(spec, field)[0]
        changes = dict(_make_quality_changes(_compute_gap(field, value, limit)))
        if _is_number(value) and field is not None:
            named_field_advice = f"a limit of {value:.3g} would accept this student"
    if field is not None and field not in changes:
        changes = {field: lambda _value, _spec: named_field_advice, **changes}
    suggestions = []
    for path, suggest in changes.items():
        current, is_known = _read_field(spec, path)
        suggestion = suggest(current, spec) if is_known else None
        if suggestion is not None:
            suggestions.append(f"{path} is {json.dumps(current, ensure_ascii=False)}: {suggestion}")
    advice = _insert_job_id(cure.advice, job_id)
    return " ".join(part for part in ("; or ".join(suggestions) + "." if suggestions else "", advice) if part)


def _insert_job_id(advice: str, job_id: str | None) -> str:
    """Return the advice with the job's id in commands; without an id, only what does not concern a control plane."""
    if job_id is not None:
        return re.sub(r"\bJOB\b", job_id, advice)
    sentences = re.split(r"(?<=\.) ", re.sub(r"[;,] (then|and) (clone|submit) [^.]*", "", advice))
    return " ".join(sentence for sentence in sentences if not re.search(r"\bjob", sentence, re.IGNORECASE))


_MAX_FACTOR = 100
"""Max factor of suggested training, since quality does not grow in proportion to it."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compute_gap(field: str | None, value: Any, limit: Any) -> float:
    """Return how many times the measured loss of quality exceeds its limit; 1 if unknown."""
    if not _is_number(value) or not _is_number(limit):
        return 1.0
    if field is not None and field.rpartition(".")[2].startswith("min_"):
        value, limit = 1 - value, 1 - limit
    return max(value / limit, 1.0) if limit > 0 else 1.0


def _make_quality_changes(gap: float) -> Mapping[str, Suggestion]:
    """Return changes that close a gap, as `_compute_gap` returns it: more for a large one."""
    factor, layers = min(max(math.ceil(round(gap, 6)), 2), _MAX_FACTOR), max(math.ceil(round(math.log2(gap), 6)), 1)
    return {
        "training.max_steps": lambda value, _spec: f"use {factor * value}" if value else None,
        "training.num_epochs": lambda value, spec: f"use {factor * value}" if spec.training.max_steps is None else None,
        "swiftkv.prefill_reduction": lambda value, spec: (
            f"use {(value or 0.5) / 2:.3g}" if spec.swiftkv.request.requested_depth is None else None
        ),
        "swiftkv.num_key_value_layers": lambda value, _spec: None if value is None else f"use {value + layers} or more",
        "swiftkv.key_value_group_size": _suggest_divisor,
    }


def _map_error_codes() -> Mapping[str, type[SwiftKVError]]:
    found, new = dict[str, type[SwiftKVError]](), [SwiftKVError]
    while new:
        error = new.pop()
        found.setdefault(error.code, error)
        new += error.__subclasses__()
    return found


def _read_field(spec: JobSpec, path: str) -> tuple[Any, bool]:
    """Return (value at a path of the spec, whether it is a scalar); (None, False) if the path does not exist."""
    value: Any = spec.model_dump(mode="json", by_alias=True)
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and is_index(key, value):
            value = value[int(key)]
        else:
            return None, False
    return value, not isinstance(value, dict | list)
