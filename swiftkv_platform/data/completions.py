"""Teacher-written data: prompts of a source, and the answers the teacher gives them, in shards that are named by what
they hold. Knows no storage: answers go to and come from an `AnswerStore`.

A shard's key is a hash of the teacher, the settings and the prompts' tokens, and every answer is drawn with a seed of
its own prompt. So whatever worker or attempt writes a shard writes the same, and what one has written no other writes
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
from swiftkv_platform.data.opening import RemoteFiles
from swiftkv_platform.data.rows import source_rows
from swiftkv_platform.errors import StorageError
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs import CompletionSpec, DataSourceSpec

if TYPE_CHECKING:
    from swiftkv_platform.data.documents import DocumentEncoder

_PROMPTS_PER_SHARD = 64
"""Prompts of a shard, the unit that is written again when a worker dies."""


class AnswerStore(Protocol):
    """Shards of answers by their key."""

    def get(self, key: str) -> bytes | None:
        """Return the shard; None where it has not been written."""

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
    """A prompt and one answer to it; without tokens where the prompt left no room for one."""

    format: str
    """Row format of the prompt."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """The end of sequence included, where the teacher came to it."""
    text: str = ""

    @property
    def digest(self) -> int:
        """64 bits of the prompt: all of its answers are on one side of the hold-out."""
        return int.from_bytes(_hash(self.prompt_token_ids)[:8], "big")


@dataclass(frozen=True)
class Shard:
    """Some prompts of a source that are answered together."""

    key: str
    prompts: tuple[Answer, ...]
    """Each without its answer."""
    seeds: tuple[int, ...]
    """[num_completions x prompts]: prompt by prompt."""


@dataclass(frozen=True)
class PromptSource:
    """A source whose prompts the teacher answers."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    teacher: Teacher
    seed: int
    """Chooses `sample_count` prompts."""
    remote: RemoteFiles | None
    access: Access = OPEN
    """Sources that may be read."""

    @property
    def settings(self) -> CompletionSpec:
        assert self.source.complete is not None, "only such sources have prompts"
        return self.source.complete

    def shards(self) -> Iterator[Shard]:
        """All of them, in the same order every time. Raises as `source_rows`."""
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
        """Yield the answers that have been written, prompt by prompt. Raises `StorageError`: a shard is missing."""
        for shard in self.shards():
            data = store.get(shard.key)
            if data is None:
                raise StorageError(f"the teacher's answers {shard.key} are gone; another attempt writes them again")
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
