"""Teacher-written data: prompts of a source and the teacher's answers to them, in content-addressed shards. Knows no
storage: answers are read from and written to an `AnswerStore`.

A shard's key is a hash of the teacher, the settings and the prompts' tokens, and every answer is sampled with a seed
derived from its prompt. So every worker and attempt writes the same shard, and a shard that exists is not written
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from swiftkv_platform.data.formats import PROMPT_FORMATS
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.opening import RemoteFiles, source_rows
from swiftkv_platform.errors import StorageError
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs import CompletionSpec, DataSourceSpec

if TYPE_CHECKING:
    from swiftkv_platform.data.documents import DocumentEncoder

_PROMPTS_PER_SHARD = 64
"""Prompts of a shard, which is what is lost and written again when a worker dies."""


class AnswerStore(Protocol):
    """Shards of answers by key."""

    def get(self, key: str) -> bytes | None:
        """Return a shard; None if it has not been written."""

    def put(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True)
class Teacher:
    """Properties of the teacher that its answers depend on."""

    name_or_path: str
    revision: str | None
    dtype: str
    max_model_len: int
    """Tokens of prompt and answer together."""


@dataclass(frozen=True)
class WrittenBy:
    """Answers in a store, and the teacher that wrote them."""

    teacher: Teacher
    store: AnswerStore


@dataclass(frozen=True)
class Answer:
    """A prompt and one answer to it, which is empty if the prompt left no room for one."""

    format: str
    """Row format of the prompt."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """Tokens of the answer, with EOS if the teacher generated it."""
    text: str = ""

    @property
    def digest(self) -> int:
        """64-bit hash of the prompt, by which all of its answers are held out together or not at all."""
        return int.from_bytes(_hash(self.prompt_token_ids)[:8], "big")


@dataclass(frozen=True)
class Shard:
    """Prompts of a source that are answered together."""

    key: str
    prompts: tuple[Answer, ...]
    """Prompts, without answers yet."""
    seeds: tuple[int, ...]
    """[num_prompts * num_completions]: sampling seeds, prompt by prompt."""


@dataclass(frozen=True)
class PromptSource:
    """A source whose prompts the teacher answers."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    teacher: Teacher
    seed: int
    """Seed that chooses `sample_count` prompts."""
    remote: RemoteFiles | None
    access: Access = OPEN
    """Sources that may be read."""

    @property
    def settings(self) -> CompletionSpec:
        assert self.source.complete is not None, "only such sources have prompts"
        return self.source.complete

    def shards(self) -> Iterator[Shard]:
        """Yield all shards, in the same order every time. Raises as `source_rows`."""
        description = [asdict(self.teacher), self.settings.model_dump(mode="json")]
        waiting = self._prompts()
        while prompts := tuple(islice(waiting, _PROMPTS_PER_SHARD)):
            key = _hash([*description, [prompt.prompt_token_ids for prompt in prompts]]).hex()
            seeds = tuple(
                _draw(self.settings.seed, repeat, prompt)
                for prompt in prompts
                for repeat in range(self.settings.num_completions)
            )
            yield Shard(key, prompts, seeds)

    def answers(self, store: AnswerStore) -> Iterator[Answer]:
        """Yield all answers, prompt by prompt. Raises `StorageError` if a shard has not been written."""
        for shard in self.shards():
            data = store.get(shard.key)
            if data is None:
                raise StorageError(f"the teacher's answers {shard.key} are missing; another attempt writes them again")
            rows = [json.loads(line) for line in data.splitlines()]
            prompts = [prompt for prompt in shard.prompts for _ in range(self.settings.num_completions)]
            for prompt, row in zip(prompts, rows, strict=True):
                yield replace(prompt, token_ids=tuple(row["token_ids"]), text=row["text"])

    def _prompts(self) -> Iterator[Answer]:
        rows = source_rows(
            self.source, self.index, seed=self.seed, remote=self.remote, access=self.access, formats=PROMPT_FORMATS
        )
        for row in rows:
            if row.held_out:
                continue
            try:
                tokens = self.encoder.encode_prompt(row.content).tolist() if row.content else []
            except RowError as error:
                raise row.error(error, f"data.sources[{self.index}]") from error
            end = self.settings.prompt_tokens if isinstance(row.content, str) else None
            yield Answer(row.format, tuple(tokens[:end]))


def _draw(seed: int, repeat: int, prompt: Answer) -> int:
    return int.from_bytes(_hash([seed, repeat, prompt.prompt_token_ids])[:7], "big")


def _hash(value: Sequence[object]) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
