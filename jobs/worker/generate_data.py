"""The phase before the first: the teacher answers the prompts of sources with `complete`, each worker a share of them.
Knows no Ray itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.completions import Answer, AnswerStore, PromptSource, Shard
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.jobs.attempt.events import PhaseProgress, Reporter
from swiftkv_platform.jobs.attempt.stored import newest_bytes
from swiftkv_platform.jobs.worker.prepare import writer
from swiftkv_platform.jobs.worker.setup import (
    StoreFiles,
    access_of,
    free_bytes,
    load_tokenizer,
    set_up_process,
    task_device,
    teacher_path,
)
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


def write_answers(
    source: PromptSource,
    store: AnswerStore,
    load_engine: Callable[[], LLMEngine],
    *,
    worker: int = 0,
    num_workers: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Write this worker's share of the shards that are not written yet; returns how many tokens that were.

    Args:
        load_engine: called when there is something to write.
        progress: called after each shard that it writes, with the place of that shard in the share, from 1, and with
            the size of the share.
    """
    engine, num_tokens = None, 0
    share = range(worker, sum(1 for _ in source.shards()), num_workers)
    for number, shard in enumerate(source.shards()):
        if number not in share or store.get(shard.key) is not None:
            continue
        engine = engine or load_engine()
        answers = _answer(engine, shard, source)
        num_tokens += sum(len(answer.token_ids) for answer in answers)
        lines = [
            json.dumps({"prompt_token_ids": a.prompt_token_ids, "token_ids": a.token_ids, "text": a.text})
            for a in answers
        ]
        store.put(shard.key, "".join(f"{line}\n" for line in lines).encode())
        progress(share.index(number) + 1, len(share))
    return num_tokens


def _answer(engine: LLMEngine, shard: Shard, source: PromptSource) -> list[Answer]:
    """An answer, or several, to each prompt in turn; none to those that leave no room for one."""
    from swiftkv_platform.engine import SamplingParams

    settings = source.settings
    room = min(source.encoder.max_length, source.teacher.max_model_len)
    answers = [prompt for prompt in shard.prompts for _ in range(settings.num_completions)]
    asked = [i for i, answer in enumerate(answers) if 0 < len(answer.prompt_token_ids) < room]
    parameters = [
        SamplingParams(
            max_tokens=min(settings.max_tokens, room - len(answers[i].prompt_token_ids)),
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=shard.seeds[i],
        )
        for i in asked
    ]
    outputs = engine.generate([list(answers[i].prompt_token_ids) for i in asked], parameters) if asked else []
    for i, output in zip(asked, outputs, strict=True):
        answers[i] = replace(answers[i], token_ids=tuple(output.token_ids), text=output.text)
    return answers
