"""Phases before training. First all workers generate the teacher's answers to the prompts of sources with `complete`.
Then one Ray task checks the model, without reading weights, and prepares the data.

Errors in the spec, the model and the data are raised here, before training workers start. Does not use Ray.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.completions import (
    Completion,
    CompletionShard,
    CompletionStore,
    PromptSource,
    TeacherCompletions,
    TeacherIdentity,
)
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.data.packing import PackedRows, count_steps
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.model import (
    find_hidden_loss_index,
    list_training_deep_tails,
    select_trained_parameters,
    supports_shared_prefixes,
)
from swiftkv_platform.distillation.sequence_parallel import check_head_counts
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import ModelError
from swiftkv_platform.evaluation.harness.rows import check_row_tasks
from swiftkv_platform.evaluation.harness.run import check_tasks
from swiftkv_platform.evaluation.quality import select_evaluation_rows
from swiftkv_platform.jobs.attempt.events import EventReporter, PhaseProgressReporter
from swiftkv_platform.jobs.attempt.stored import read_newest_object
from swiftkv_platform.jobs.values import RunPlan
from swiftkv_platform.jobs.worker.served_teacher import ServedAnswer, ServedTeacher
from swiftkv_platform.jobs.worker.setup import (
    ObjectStoreFiles,
    fetch_data,
    get_access,
    get_free_bytes,
    get_task_device,
    load_tokenizer,
    open_lazy_student,
    resolve_teacher,
    set_up_process,
    uses_validation_rows,
    write_companion_files,
)
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.weights.adapters import check_can_be_base
from swiftkv_platform.planning.job import compute_teacher_bytes, make_training_setup, refuse_row_generation
from swiftkv_platform.planning.machines import has_fast_bfloat16
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import resolve_batch_size, resolve_model_defaults
from swiftkv_platform.storage.object_store import ObjectStore, open_store

if TYPE_CHECKING:
    from swiftkv_platform.engine import LLMEngine, RequestOutput


def prepare_run(
    spec: JobSpec,
    rows: Path,
    *,
    answers: CompletionStore | None = None,
    access: Access = UNRESTRICTED,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[RunPlan, PreparedData]:
    """Check the spec and the model, without reading weights, and prepare the rows.

    Args:
        rows: directory of the prepared rows; if it does not exist, they are prepared.
        answers: the teacher's answers, for sources with `complete`.
        access: the job's read permissions.
        progress: called with (finished sources, total).

    Raises:
        InvalidInputError: l, g or a layer is out of range, or the harness cannot run a task.
        ModelError: the teacher or tokenizer cannot be read, or cannot be written again.
        DataError: no rows to train on, or none to evaluate on.
    """
    import datasets  # takes a second, which training workers save

    # 1. teacher and student, without weights
    set_up_process(spec)
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="prepare-") as directory:
        workspace = Path(directory)
        path = resolve_teacher(spec.model, workspace, access=access)
        lazy = open_lazy_student(spec, path)
        student = lazy.model
        if spec.publish.adapter:
            check_can_be_base(lazy.base, "publish.adapter")
        context_length = getattr(student.config, "max_position_embeddings", None)
        # 2. check what depends on the model
        spec = resolve_model_defaults(spec, context_length=context_length, hidden_size=student.config.hidden_size)
        check_head_counts(student.config, spec.sharding.sequence_parallel_size)
        if spec.distillation.hidden_loss_weight:
            find_hidden_loss_index(student.config, spec.distillation)
        tokenizer = load_tokenizer(spec, path)
        (workspace / "written").mkdir()
        write_companion_files(student, tokenizer, workspace / "written")  # so that it succeeds after training too
        tasks = workspace / "tasks"
        check_tasks(spec.evaluation.tasks, tokenizer, fetch=lambda uri: fetch_data(uri, tasks), access=access)
        check_row_tasks(
            spec.evaluation,
            tokenizer,
            context_length=student.config.max_position_embeddings,
            remote=ObjectStoreFiles(workspace / "evaluation-rows"),
            access=access,
        )
        # 3. prepare the rows
        if rows.is_dir():
            data = PreparedData.load(rows)
        else:
            rows.mkdir(parents=True)
            data = prepare_data(
                spec.data,
                tokenizer,
                rows,
                seed=spec.training.seed,
                remote=ObjectStoreFiles(workspace / "objects"),
                access=access,
                completions=None if answers is None else TeacherCompletions(describe_teacher(spec, path), answers),
                mask_prompts=spec.swiftkv.request.has_own_decode_kv,
                with_steering=uses_validation_rows(spec),
                share_prefixes=supports_shared_prefixes(spec, student.config),
                progress=progress,
            )
        # raises `DataError` before training
        select_evaluation_rows(data.held_out, max_tokens=spec.evaluation.max_tokens)
    # 4. plan the run
    spec = resolve_batch_size(spec, len(data.train))
    assert spec.training.batch_size is not None
    plan = RunPlan(
        spec=spec,
        total_steps=count_steps(
            len(data.train),
            batch_size=spec.training.batch_size,
            num_epochs=spec.training.num_epochs,
            max_steps=spec.training.max_steps,
        ),
        num_trained_parameters=sum(p.numel() for p in select_trained_parameters(student, spec.distillation).values()),
        statistics=data.statistics.model_dump(mode="json"),
        messages=(*data.statistics.format_messages(), *_warn_slow_bfloat16(spec)),
        flops_per_token=compute_flops_per_token(spec, student.config, data.train),
    )
    return plan, data


def compute_flops_per_token(spec: JobSpec, config: Any, rows: PackedRows) -> float | None:
    """Return the FLOPs of training on `rows` per counted position, without recomputation by gradient checkpointing.
    Each token attends to its own sample. None for a family unknown to the planner. `config`: the student's
    configuration."""
    tails = list_training_deep_tails(spec.swiftkv.deep_tail, spec.distillation)
    setup = replace(
        make_training_setup(spec),
        samples=rows.sample_length_histogram,
        counted_share=rows.num_counted_tokens / rows.num_tokens,
        # Deep tokens of samples that share a prefix may be several times in the rows.
        deep_share=min(sum(map(rows.count_deep_tokens, tails)) / len(tails) / rows.num_tokens, 1.0),
    )
    try:
        flops = plan_training(config.to_dict(), setup).flops_per_token
    except ModelError:
        return None
    return (flops.total - flops.recomputation) / setup.counted_share


def _warn_slow_bfloat16(spec: JobSpec) -> Iterator[tuple[str, bool]]:
    """Yield a (message, is_warning) if the spec trains in bfloat16 on a CPU that is slow at it."""
    if spec.model.dtype != "bfloat16" or spec.resources.gpus_per_worker:
        return
    if not has_fast_bfloat16():
        yield (
            "model.dtype bfloat16 is many times slower than float32 on this CPU, which lacks AVX-512; use float32",
            True,
        )
    elif (problem := kernels.find_kernel_obstacle()) is not None:
        yield f"attention of the teacher runs in PyTorch, which is slower than the engine's kernels: {problem}", True


def describe_teacher(spec: JobSpec, path: str) -> TeacherIdentity:
    """Describe the teacher at `path` that generates data. Raises `ModelError`."""
    config = read_config(path, revision=spec.model.revision)
    return TeacherIdentity(
        spec.model.name_or_path, spec.model.revision, spec.model.dtype, config.max_position_embeddings
    )


class AttemptAnswers:
    """The `CompletionStore` of an attempt: writes below its own prefix; also reads answers of earlier attempts."""

    def __init__(self, store: ObjectStore, request: AttemptRequest) -> None:
        self._store = store
        self._attempt = request.attempt_id

    def load_answers(self, key: str) -> bytes | None:
        return read_newest_object(self._store, self._attempt, lambda attempt: attempt.answers_key(key))

    def store_answers(self, key: str, data: bytes) -> None:
        self._store.put_bytes(self._attempt.answers_key(key), data)


def write_worker_answers(request: AttemptRequest, store_uri: str, worker: int) -> int:
    """Generate and store the answers of worker `worker`; return their number of tokens. Raises `ModelError` if teacher
    or tokenizer cannot be read, `DataError` if prompts cannot be read."""
    spec = request.spec
    set_up_process(spec)
    store = open_store(store_uri)
    answers, num_tokens = AttemptAnswers(store, request), 0
    reporter = EventReporter(store, request.attempt_id, f"write-{worker}")
    progress = PhaseProgressReporter(reporter, "write")
    with tempfile.TemporaryDirectory(prefix="write-") as directory:
        workspace = Path(directory)
        path = resolve_teacher(spec.model, workspace, access=get_access(request))
        teacher = describe_teacher(spec, path)
        max_length = min(spec.data.max_length, teacher.max_model_len)
        tokenizer = load_tokenizer(spec, path)
        encoder = DocumentEncoder(tokenizer, max_length=max_length, train_on=spec.data.train_on)
        load_engine = cache(partial(_load_engine, spec, path))
        for index, source in enumerate(spec.data.sources):
            if source.complete is not None:
                prompts = PromptSource(
                    source,
                    index,
                    encoder,
                    teacher=teacher,
                    seed=spec.training.seed,
                    remote=ObjectStoreFiles(workspace / "data"),
                    access=get_access(request),
                )
                field = f"data.sources[{index}]"
                connect = cache(partial(ServedTeacher, source.complete, f"{field}.complete", tokenizer))
                is_served = source.complete.endpoint is not None
                num_tokens += write_source_answers(
                    prompts,
                    answers,
                    connect if is_served else load_engine,
                    worker=worker,
                    num_workers=spec.resources.max_workers,
                    progress=partial(progress.report_progress, f"{field}, worker {worker}"),
                )
                if is_served:
                    reporter.send_message(f"{field}, worker {worker}: {connect().describe_usage()}")
    return num_tokens


def _load_engine(spec: JobSpec, path: str) -> LLMEngine:
    """Load the teacher into an engine. Raises `InvalidInputError` if it does not fit into this worker's memory."""
    from swiftkv_platform.engine import EngineConfig, LLMEngine

    path = str(fetch_model_directory(path, spec.model.revision, field="model.name_or_path"))
    needed, available = (
        compute_teacher_bytes(path, spec.model.dtype),
        get_free_bytes(get_task_device(spec), num_local_workers=1),
    )
    if needed >= available:
        refuse_row_generation(spec, needed, available, "free")
    return LLMEngine.from_pretrained(path, EngineConfig(dtype=spec.model.dtype))


def write_source_answers(
    source: PromptSource,
    store: CompletionStore,
    load_engine: Callable[[], LLMEngine | ServedTeacher],
    *,
    worker: int = 0,
    num_workers: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Generate this worker's share of the missing answers, shard by shard; return their number of tokens.

    Args:
        load_engine: called if there are missing answers; a served teacher takes the engine's place.
        progress: called at the start and after each shard with (answered prompts, total).
    """
    engine, num_tokens, num_done = None, 0, 0
    num_prompts = sum(len(shard.prompts) for shard in islice(source.plan_shards(), worker, None, num_workers))
    progress(num_done, num_prompts)
    for shard in islice(source.plan_shards(), worker, None, num_workers):
        num_done += len(shard.prompts)
        if store.load_answers(shard.key) is not None:
            continue
        engine = engine or load_engine()
        answers = _generate_answers(engine, shard, source)
        num_tokens += sum(len(answer.token_ids) for answer in answers)
        lines = [
            json.dumps({"prompt_token_ids": a.prompt_token_ids, "token_ids": a.token_ids, "text": a.text})
            for a in answers
        ]
        store.store_answers(shard.key, "".join(f"{line}\n" for line in lines).encode())
        progress(num_done, num_prompts)
    return num_tokens


def _generate_answers(
    engine: LLMEngine | ServedTeacher, shard: CompletionShard, source: PromptSource
) -> list[Completion]:
    """Return the answers to the prompts in order; empty for prompts that fill the context."""
    from swiftkv_platform.engine import SamplingParams

    settings = source.settings
    max_length = min(source.encoder.max_length, source.teacher.max_model_len)
    answers = [prompt for prompt in shard.prompts for _ in range(settings.num_completions)]
    indices = [i for i, answer in enumerate(answers) if 0 < len(answer.prompt_token_ids) < max_length]
    parameters = [
        SamplingParams(
            max_tokens=min(settings.max_tokens, max_length - len(answers[i].prompt_token_ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=shard.seeds[i],
        )
        for i in indices
    ]
    prompts = [list(answers[i].prompt_token_ids) for i in indices]
    outputs: Sequence[RequestOutput | ServedAnswer] = engine.generate(prompts, parameters) if indices else []
    for i, output in zip(indices, outputs, strict=True):
        answers[i] = replace(answers[i], token_ids=tuple(output.token_ids), text=output.text)
    return answers
