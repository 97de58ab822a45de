"""The last phase of an attempt, in one Ray task: measure the student against its teacher, pass the gate, publish the
artifact. Knows no Ray itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jobs.prepare import Prepared, load_student, load_tokenizer, set_up_process, task_device
from jobs.sources import teacher_path
from jobs.train_loop import tracking_directory
from swiftkv_platform.attempts import AttemptRequest, Manifest, artifact_prefix
from swiftkv_platform.distillation.checkpoint import read_trained
from swiftkv_platform.distillation.evaluation import Report, Totals, check_gate, evaluate
from swiftkv_platform.distillation.fork import copy_upper, load_trained
from swiftkv_platform.distillation.prefill_cost import measure_prefill
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import fetch_directory, publish_directory
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.tracking.tracker import create_tracker

_TOKENS_PER_FORWARD = 8192
_PROMPT_LENGTH = 2048
"""Tokens of the prompt whose prefill is timed, where the model's context allows them."""
_PREFILL_ROUNDS = 5


def evaluate_and_publish(request: AttemptRequest, store_uri: str, checkpoint: str, prepared: Prepared) -> Manifest:
    """Turn the trained tensors of `checkpoint` into the attempt's artifact.

    Raises:
        DataError: nothing is held out to measure on.
        QualityGateError: the student is too far from its teacher; nothing is published.
    """
    spec = request.spec
    set_up_process(spec)
    store = open_store(store_uri)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as directory:
        workspace = Path(directory)
        path = teacher_path(spec.model.name_or_path, workspace)
        trained = fetch_directory(store, checkpoint, workspace / "checkpoint")
        student = load_student(spec, path).to(task_device(spec))
        report = _measure(
            student,
            spec,
            prepared,
            checkpoint=workspace / "checkpoint",
            tokens_trained=int(trained.lineage["tokens"]),
        )
        _track(request, report)
        check_gate(report, spec.evaluation)
        artifact = workspace / "artifact"
        student.save_pretrained(artifact)
        load_tokenizer(spec, path).save_pretrained(artifact)
        (artifact / "evaluation.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        return _publish(store, artifact, request, prepared, report)


def _measure(student: Any, spec: JobSpec, prepared: Prepared, *, checkpoint: Path, tokens_trained: int) -> Report:
    """Measure the student before and after training; it ends with its trained parameters."""

    def quality() -> Totals:
        batch_size = max(1, _TOKENS_PER_FORWARD // spec.data.max_length)
        return evaluate(student, prepared.data.held_out, max_tokens=spec.evaluation.max_tokens, batch_size=batch_size)

    rewired, calibrated = quality(), None
    if prepared.calibrated is not None:
        load_trained(student, prepared.calibrated)
        calibrated = quality()
    with _teacher_kept_apart(student) if spec.distillation.trainable == "tail" else nullcontext():
        load_trained(student, read_trained(checkpoint))
        prompt_length = min(_PROMPT_LENGTH, student.config.max_position_embeddings)
        return Report.build(
            rewired=rewired,
            calibrated=calibrated,
            distilled=quality(),
            cost=measure_prefill(student, prompt_length=prompt_length, rounds=_PREFILL_ROUNDS),
            tokens_trained=tokens_trained,
        )


@contextmanager
def _teacher_kept_apart(student: Any) -> Iterator[None]:
    """While a trained tail is measured, the layers it started as answer for the teacher; after that there is none."""
    decoder = student.model
    decoder.teacher_upper = copy_upper(decoder).teacher_upper
    yield
    del decoder.teacher_upper
    student.config.swiftkv_teacher_weights = False
    for layer in decoder.layers[student.config.num_key_value_layers :]:
        for projection in ("q_proj", "k_proj", "v_proj"):
            delattr(layer.self_attn, projection)


def _publish(
    store: ObjectStore, artifact: Path, request: AttemptRequest, prepared: Prepared, report: Report
) -> Manifest:
    spec = request.spec
    lineage = {
        "job_id": request.job_id,
        "attempt": request.attempt,
        "teacher": spec.model.name_or_path,
        "revision": spec.model.revision,
        "data_fingerprint": prepared.data.fingerprint,
        "code_version": version("swiftkv-platform"),
        "spec": spec.model_dump(mode="json"),
    }
    prefix = artifact_prefix(request.job_id, request.attempt)
    metrics = report.model_dump(mode="json")
    return publish_directory(store, artifact, prefix, kind="artifact", lineage=lineage, metrics=metrics)


def _track(request: AttemptRequest, report: Report) -> None:
    """Close the tracked run with the report's figures."""
    spec = request.spec
    tracker = create_tracker(spec.tracking, tracking_directory(request), name=spec.name)
    tracker.start(request.run_id, spec.model_dump(mode="json"))
    tracker.finish({"evaluation": report.model_dump(mode="json")})
