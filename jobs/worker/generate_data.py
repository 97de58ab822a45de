"""The phase before the first: the teacher answers the prompts of sources with `complete`, each worker a share of them.
Knows no Ray itself.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.completions import PromptSource
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.distillation.answers import write_answers
from swiftkv_platform.jobs.attempt.downloads import StoreFiles, access_of, teacher_path
from swiftkv_platform.jobs.attempt.events import PhaseProgress, Reporter
from swiftkv_platform.jobs.attempt.stored import newest_bytes
from swiftkv_platform.jobs.worker.memory import free_bytes
from swiftkv_platform.jobs.worker.prepare import load_tokenizer, set_up_process, task_device, writer
from swiftkv_platform.planning.phases import refuse, teacher_bytes
from swiftkv_platform.sources.hub import local_directory
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from swiftkv_platform.engine import LLMEngine


class AttemptAnswers:
    """The `AnswerStore` of an attempt: it writes below its own prefix, and reads below those of earlier ones too."""

    def __init__(self, store: ObjectStore, request: AttemptRequest) -> None:
        self._store = store
        self._attempt = request.attempt_id

    def get(self, key: str) -> bytes | None:
        return newest_bytes(self._store, self._attempt, lambda attempt: attempt.answers_key(key))

    def put(self, key: str, data: bytes) -> None:
        self._store.put_bytes(self._attempt.answers_key(key), data)


def write(request: AttemptRequest, store_uri: str, worker: int) -> int:
    """Write the share of worker `worker`; returns its number of tokens. Raises `ModelError`: an unreadable teacher or
    tokenizer; `DataError`: prompts that cannot be read."""
    spec = request.spec
    set_up_process(spec)
    store = open_store(store_uri)
    answers, num_tokens = AttemptAnswers(store, request), 0
    progress = PhaseProgress(Reporter(store, request.attempt_id, f"write-{worker}"), "write")
    with tempfile.TemporaryDirectory(prefix="write-") as directory:
        workspace = Path(directory)
        path = teacher_path(spec.model, workspace, access=access_of(request))
        teacher = writer(spec, path)
        max_length = min(spec.data.max_length, teacher.max_model_len)
        encoder = DocumentEncoder(load_tokenizer(spec, path), max_length=max_length, train_on=spec.data.train_on)
        engines: list[LLMEngine] = []

        def load_engine() -> LLMEngine:
            if not engines:
                engines.append(_load_engine(spec, path))
            return engines[0]

        for index, source in enumerate(spec.data.sources):
            if source.complete is not None:
                prompts = PromptSource(
                    source,
                    index,
                    encoder,
                    teacher=teacher,
                    seed=spec.training.seed,
                    remote=StoreFiles(workspace / "data"),
                    access=access_of(request),
                )
                num_tokens += write_answers(
                    prompts,
                    answers,
                    load_engine,
                    worker=worker,
                    num_workers=spec.resources.max_workers,
                    progress=partial(progress.tell, f"data.sources[{index}], worker {worker}"),
                )
    return num_tokens


def _check_room(spec: JobSpec, path: str) -> None:
    """Raises `InvalidInputError` where this worker cannot hold the teacher."""
    needed, given = teacher_bytes(path, spec.model.dtype), free_bytes(task_device(spec), num_local=1)
    if needed >= given:
        refuse(spec, needed, given, "free")


def _load_engine(spec: JobSpec, path: str) -> LLMEngine:
    from swiftkv_platform.engine import EngineConfig, LLMEngine

    path = str(local_directory(path, spec.model.revision, field="model.name_or_path"))
    _check_room(spec, path)
    return LLMEngine.from_pretrained(path, EngineConfig(dtype=spec.model.dtype))
