"""Answers of the teacher to the prompts of its data, written by the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from swiftkv_platform.data.completions import Answer, AnswerStore, PromptSource, Shard

if TYPE_CHECKING:
    from swiftkv_platform.engine import LLMEngine


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
