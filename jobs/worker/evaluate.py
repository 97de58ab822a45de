"""Last phase of an attempt, on its workers: evaluate the student against its teacher, check the gates, publish the
artifact. In a sweep, every trial is evaluated and the chosen one published. Uses no Ray itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE, AttemptId, AttemptRequest, Manifest, Parent
from swiftkv_platform.distillation.partial_reads import INDEX_FILE, CheckpointTensors
from swiftkv_platform.distillation.strategy import EvaluationModel, count_parameter_bytes
from swiftkv_platform.evaluation.harness.rows import build_row_tasks
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.evaluation.parts import ResultStore
from swiftkv_platform.evaluation.quality import HeldOutTotals
from swiftkv_platform.evaluation.report import ParentTotals, Report, TrainingOutcome
from swiftkv_platform.jobs.attempt.events import make_progress_callback
from swiftkv_platform.jobs.attempt.stored import (
    CHOSEN_STEP_KEY,
    PreparedInputs,
    StoredResults,
    open_parent,
    open_trained_tensors,
)
from swiftkv_platform.jobs.attempt.tracking import TrackedRun, read_loss_curve
from swiftkv_platform.jobs.worker.measure import StudentEvaluator
from swiftkv_platform.jobs.worker.setup import (
    ObjectStoreFiles,
    Workspace,
    create_shared_workspace,
    fetch_data,
    get_access,
    get_free_bytes,
    get_task_device,
    load_tokenizer,
    open_lazy_student,
    resolve_shared_teacher,
    set_up_process,
    write_companion_files,
)
from swiftkv_platform.model.weights.adapters import write_adapter
from swiftkv_platform.model.weights.checkpoint import Checkpoint, LazyTensors
from swiftkv_platform.model.weights.lazy_student import LazyStudent, read_stored_tensors, save_lazy_student
from swiftkv_platform.model.weights.writing import ShardWriter
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.reports.model_card import render_model_card
from swiftkv_platform.reports.pages import render_evaluation_page
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.cards import read_license
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import StoredDirectory, publish_directory
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.storage.publishing import MODEL_CARD_FILE
from swiftkv_platform.traces import get_job_span_recorder

MAX_MODEL_MEMORY_FRACTION = 0.5
"""Share of a worker's free memory up to which weights are measured whole; the rest is for activations and caches."""


def evaluate_and_publish(
    request: AttemptRequest, store_uri: str, checkpoint: str, prepared: PreparedInputs
) -> Manifest | None:
    """Turn the trained tensors of `checkpoint` into the attempt's artifact. Called by every worker of the default
    process group, or by a single process; the first worker returns the manifest, others None.

    Raises:
        DataError: nothing is held out.
        QualityGateError: the student is too far from its teacher; nothing is published.
    """
    store = open_store(store_uri)
    with _open_workspace(request.spec) as workspace:
        directory = workspace.path
        access = get_access(request)
        student = _TrainedStudent.load(request.spec, access, workspace, store, checkpoint, request.parent)
        results = StoredResults(store, request, checkpoint)
        report = student.measure_quality(prepared, results)
        if not student.workers.is_first:
            return None  # the first worker checks the gates after the report is stored
        results.publish_rows(report.list_row_results())
        lineage = _build_lineage(request, prepared.data.fingerprint)
        files = _render_report(store, request, report, lineage)
        # Stored with the attempt too, so that they remain if a gate fails.
        for name, text in files.items():
            store.put_bytes(f"{request.attempt_id.prefix}/{name}", text.encode())
        with closing(TrackedRun(store, request)) as run:
            run.log_report(report.model_dump(mode="json"), student.training.step)
            report.check_gates()
            with get_job_span_recorder().span(
                "publish", request.traceparent, job_id=request.job_id, attempt=request.attempt
            ):
                lineage |= student.save(directory / "artifact")
                card = render_model_card(lineage, report.model_dump(mode="json"), license_id=student.license_id)
                _write_files(files | {MODEL_CARD_FILE: card}, directory / "artifact")
                manifest = _publish_directory(
                    store, request, directory / "artifact", lineage, report.model_dump(mode="json")
                )
            run.log_artifact(manifest)
        return manifest


def evaluate_trial(
    request: AttemptRequest, store_uri: str, checkpoint: str, prepared: PreparedInputs
) -> Manifest | None:
    """Evaluate a trial of a sweep and publish its report, even if it fails a gate. The report's lineage names the
    checkpoint, from which `publish_trial` makes the model. Called like `evaluate_and_publish`."""
    store = open_store(store_uri)
    with _open_workspace(request.spec) as workspace:
        student = _TrainedStudent.load(request.spec, get_access(request), workspace, store, checkpoint)
        results = StoredResults(store, request, checkpoint)
        report = student.measure_quality(prepared, results)
        if not student.workers.is_first:
            return None
        results.publish_rows(report.list_row_results())
        with closing(TrackedRun(store, request)) as run:
            run.log_report(report.model_dump(mode="json"), student.training.step)
        lineage = _build_lineage(request, prepared.data.fingerprint) | {"checkpoint": checkpoint}
        directory = workspace.path / "report"
        directory.mkdir()
        _write_files(_render_report(store, request, report, lineage), directory)
        return _publish_directory(store, request, directory, lineage, report.model_dump(mode="json"))


def publish_trial(
    request: AttemptRequest,
    store_uri: str,
    spec: JobSpec,
    trial_store_uri: str,
    trial: Manifest,
    files: Mapping[str, str],
) -> Manifest:
    """Make the chosen trial's model the artifact of the sweep's attempt.

    Args:
        spec: spec of the trial.
        trial: manifest that `evaluate_trial` published in this attempt or an earlier one.
        files: the sweep's report, by file name.
    """
    trial_store, lineage = open_store(trial_store_uri), trial.lineage
    with _open_workspace(spec) as workspace:
        artifact = workspace.path / "artifact"
        student = _TrainedStudent.load(spec, get_access(request), workspace, trial_store, lineage["checkpoint"])
        saved = student.save(artifact)
        measured_attempt = AttemptId(lineage["job_id"], lineage["attempt"])
        measured = measured_attempt.artifact_prefix
        for name in trial.files:
            trial_store.download_file(f"{measured}/{name}", artifact / name)
        _copy_rows(trial_store, measured_attempt, open_store(store_uri), request.attempt_id)
        _write_files(files, artifact)
        lineage = {name: value for name, value in lineage.items() if name != "checkpoint"}
        lineage |= {"job_id": request.job_id, "attempt": request.attempt, "trial": spec.name, **saved}
        _write_files(
            {MODEL_CARD_FILE: render_model_card(lineage, trial.metrics, license_id=student.license_id)}, artifact
        )
        return _publish_directory(open_store(store_uri), request, artifact, lineage, trial.metrics)


def _copy_rows(source: ObjectStore, measured: AttemptId, target: ObjectStore, attempt: AttemptId) -> None:
    """Copy the results of a trial's rows to the attempt of its sweep."""
    for info in source.list(measured.row_results_prefix):
        target.put_bytes(f"{attempt.row_results_prefix}/{info.key.rpartition('/')[2]}", source.get_bytes(info.key))


def save_trained_student(request: AttemptRequest, store_uri: str, checkpoint: str, directory: Path) -> None:
    """Write the trained student of `checkpoint` to `directory`, which is replaced, without an evaluation."""
    shutil.rmtree(directory, ignore_errors=True)
    with _open_workspace(request.spec) as workspace:
        access = get_access(request)
        _TrainedStudent.load(request.spec, access, workspace, open_store(store_uri), checkpoint).save(directory)


@contextmanager
def _open_workspace(spec: JobSpec) -> Iterator[Workspace]:
    set_up_process(spec)
    with create_shared_workspace("evaluate") as workspace:
        yield workspace


@dataclass(frozen=True)
class _TrainedStudent:
    """A student without weights, and its trained tensors."""

    spec: JobSpec
    access: Access
    workers: Workers
    lazy: LazyStudent
    tokenizer: PreTrainedTokenizerBase
    workspace: Workspace
    trained: CheckpointTensors
    """Tensors read from the store on access, piece by piece."""
    license_id: str | None
    """License of the teacher according to its own files."""
    training: TrainingOutcome
    tokens_trained: int
    store: ObjectStore
    parent: Parent | None
    """Model or checkpoint that training continued from."""

    @classmethod
    def load(
        cls,
        spec: JobSpec,
        access: Access,
        workspace: Workspace,
        store: ObjectStore,
        checkpoint: str,
        parent: Parent | None = None,
    ) -> _TrainedStudent:
        workers = Workers()
        path = resolve_shared_teacher(spec.model, workspace, access=access)
        files = StoredDirectory(store, checkpoint)
        if workspace.is_downloader:
            files.fetch(INDEX_FILE, workspace.path)
        workers.gather(None)  # the others wait
        progress = files.manifest.lineage
        return cls(
            spec=spec,
            access=access,
            workers=workers,
            lazy=open_lazy_student(spec, path, device=get_task_device(spec)),
            tokenizer=load_tokenizer(spec, path),
            workspace=workspace,
            trained=CheckpointTensors(workspace.path, files.read),
            license_id=read_license(Path(path)),
            training=_read_training_outcome(progress),
            tokens_trained=int(progress["tokens"]),
            store=store,
            parent=parent,
        )

    def _fetch_trained(self, *, sharded: bool) -> LazyTensors:
        """Return trained tensors for this worker: of a sharded model, its rows are read from the store; of a whole one,
        from a copy that the first worker of a machine makes for all of them. Collective."""
        if sharded:
            return self.trained
        copies, directory = self.workspace.num_local_workers > 1, self.workspace.path / "trained"
        if copies and self.workspace.is_downloader:
            directory.mkdir()
            writer = ShardWriter(directory, "trained")
            for name, tensor in self.trained.items():
                writer.add_tensor(name, tensor)
            writer.flush()
        self.workers.gather(None)  # the others wait, also those on other machines
        return Checkpoint.from_directory(directory) if copies else self.trained

    def measure_quality(self, prepared: PreparedInputs, parts: ResultStore) -> Report:
        spec = self.spec.evaluation
        fetched = self.workspace.path / f"tasks-{self.workers.rank}"
        tasks = resolve_tasks(spec.tasks, fetch=lambda uri: fetch_data(uri, fetched), access=self.access)
        row_tasks = build_row_tasks(
            spec,
            self.tokenizer,
            context_length=self.lazy.model.config.max_position_embeddings,
            remote=ObjectStoreFiles(self.workspace.path / "evaluation-rows"),
            access=self.access,
        )
        sharded = self._is_sharded()
        model = EvaluationModel(self.lazy, self.spec.distillation, sharded=sharded, device=get_task_device(self.spec))
        workers, rows = Workers(in_step=sharded), prepared.data.held_out

        def make_evaluator(student: Any) -> StudentEvaluator:
            return StudentEvaluator(student, rows, spec, workers=workers, parts=parts)

        def compare(name: str) -> HeldOutTotals:
            totals: HeldOutTotals = model(lambda student: make_evaluator(student).compare_teacher_and_student(name))
            return totals

        rewired, calibrated = compare("rewired"), None
        if prepared.calibrated is not None:
            model.load_tensors(prepared.calibrated)
            calibrated = compare("calibrated")
        parent: ParentTotals | None = None
        if (tensors := self._open_parent()) is not None:
            model.load_tensors(tensors)
            parent = model(lambda student: make_evaluator(student).measure_parent(self.tokenizer, row_tasks))
        model.load_tensors(self._fetch_trained(sharded=sharded))
        report: Report = model(
            lambda student: make_evaluator(student).build_report(
                self.tokenizer,
                [*tasks, *row_tasks],
                rewired=rewired,
                calibrated=calibrated,
                parent=parent,
                tokens_trained=self.tokens_trained,
                training=self.training,
            )
        )
        return report

    def _open_parent(self) -> LazyTensors | None:
        """Open the parent's values of the trained tensors, to read from the store; None if training started from the
        teacher. Collective."""
        if self.parent is None:
            return None
        directory, is_downloader = self.workspace.path / "parent", self.workspace.is_downloader
        files = open_parent(self.store, self.parent, directory, is_downloader=is_downloader)
        self.workers.gather(None)  # the others wait for the index
        return open_trained_tensors(self.parent, directory, files).select(self.trained)

    def _is_sharded(self) -> bool:
        """Whether any worker lacks the memory for the whole model. Collective."""
        if self.workers.size == 1 or not self.spec.sharding.shards_parameters:
            return False
        needed = count_parameter_bytes(self.lazy.model)
        fits = needed < MAX_MODEL_MEMORY_FRACTION * get_free_bytes(
            get_task_device(self.spec), self.workspace.num_local_workers
        )
        return not all(self.workers.gather(fits))

    def save(self, directory: Path) -> dict[str, str]:
        """Write the trained model, holding at most one weight file in memory, or only the tensors that its teacher
        lacks.

        Returns:
            Lineage entries of an adapter; empty for a whole model.
        """
        directory.mkdir()
        model, keeps_teacher = self.lazy.model, self.spec.distillation.trainable == "qkv"
        self.lazy.set_start_values(self.trained)
        adapter = None
        if self.spec.publish.adapter:
            write_companion_files(model, self.tokenizer, directory)  # but for config.json
            adapter = write_adapter(
                read_stored_tensors(self.lazy, teacher=keeps_teacher),
                model.config,
                self.lazy.base,
                directory,
                name_or_path=_make_absolute(self.spec.model.name_or_path),
                revision=self.spec.model.revision,
                teacher_modules=model.list_teacher_modules(model.config),
            )
        else:
            save_lazy_student(self.lazy, directory, teacher=keeps_teacher)
            write_companion_files(model, self.tokenizer, directory)
        return {} if adapter is None else {ADAPTER_LINEAGE: adapter.base.digest}


def _make_absolute(name: str) -> str:
    """Return a teacher's name that works from any working directory: existing paths become absolute."""
    return str(Path(name).expanduser().absolute()) if Path(name).expanduser().exists() else name


def _read_training_outcome(lineage: Mapping[str, Any]) -> TrainingOutcome:
    """Facts about the state in a checkpoint, from its manifest."""
    step = int(lineage["step"])
    is_best = lineage.get("best_step") == step
    return TrainingOutcome(
        step=step,
        reason="lowest_held_out_kl" if lineage.get(CHOSEN_STEP_KEY) == step else "last_step",
        held_out_kl=lineage["best_kl"] if is_best else None,
        start_kl=lineage.get("start_kl"),
    )


def _render_report(
    store: ObjectStore, request: AttemptRequest, report: Report, lineage: Mapping[str, Any]
) -> dict[str, str]:
    """Return the report as JSON and HTML, by file name."""
    curve = read_loss_curve(store, request.attempt_id.list_attempts_so_far())
    return {
        "evaluation.json": report.model_dump_json(indent=2) + "\n",
        "evaluation.html": render_evaluation_page(report.model_dump(mode="json"), lineage, curve),
    }


def _write_files(files: Mapping[str, str], directory: Path) -> None:
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")


def _build_lineage(request: AttemptRequest, data_fingerprint: str) -> dict[str, Any]:
    spec = request.spec
    parent = {} if request.parent is None else {"parent": request.parent.model_dump()}
    return {
        "job_id": request.job_id,
        "attempt": request.attempt,
        "teacher": spec.model.name_or_path,
        "revision": spec.model.revision,
        "data_fingerprint": data_fingerprint,
        "code_version": version("swiftkv-platform"),
        "spec": spec.model_dump(mode="json"),
        **parent,
    }


def _publish_directory(
    store: ObjectStore, request: AttemptRequest, directory: Path, lineage: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Manifest:
    prefix = request.attempt_id.artifact_prefix
    progress = make_progress_callback(store, request, "publish", "bytes")
    return publish_directory(
        store, directory, prefix, kind="artifact", lineage=lineage, metrics=metrics, progress=progress
    )
