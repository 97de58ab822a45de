"""Prompts of a source and the teacher's completions of them, in content-addressed shards of a `CompletionStore`.

A shard's key is a hash of the teacher, the settings and the prompts' tokens. Every completion is sampled with a seed
derived from its prompt, so every worker and attempt writes the same shard. An existing shard is not written again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from swiftkv_platform.data.formats import PROMPT_FORMATS
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.source_rows import RemoteFiles, read_source_rows
from swiftkv_platform.errors import StorageError
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import CompletionSpec, DataSourceSpec

if TYPE_CHECKING:
    from swiftkv_platform.data.documents import DocumentEncoder

_PROMPTS_PER_SHARD = 64
"""Prompts per shard, the unit that is written again after a worker dies."""


class CompletionStore(Protocol):
    """Shards of completions by key."""

    def load_answers(self, key: str) -> bytes | None:
        """Return a shard; None if it is missing."""

    def store_answers(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True)
class TeacherIdentity:
    """Properties of the teacher that its completions depend on."""

    name_or_path: str
    revision: str | None
    dtype: str
    max_model_len: int
    """Max tokens of a prompt with its completion."""


@dataclass(frozen=True)
class TeacherCompletions:
    """A store of completions, and the teacher that wrote them."""

    teacher: TeacherIdentity
    store: CompletionStore


@dataclass(frozen=True)
class Completion:
    """A prompt and one completion of it, which is empty if the prompt fills the context."""

    format: str
    """Row format of the prompt."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    """Tokens of the completion, with EOS if the teacher generated it."""
    text: str = ""
    unread_columns: tuple[str, ...] = ()
    """Columns of the prompt's row that are not read."""
    conversation: int | None = None
    """See `SourceRow.conversation`."""

    @property
    def digest(self) -> int:
        """64-bit hash of the prompt, so that all of its completions are in the same split, or key of its
        conversation."""
        if self.conversation is not None:
            return self.conversation
        return int.from_bytes(_hash_json(self.prompt_token_ids)[:8], "big")


@dataclass(frozen=True)
class CompletionShard:
    """Prompts of a source that are completed together."""

    key: str
    prompts: tuple[Completion, ...]
    """Prompts, with empty completions."""
    seeds: tuple[int, ...]
    """[num_prompts * num_completions]: sampling seeds, prompt by prompt."""


@dataclass(frozen=True)
class PromptSource:
    """A source whose prompts the teacher completes."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    teacher: TeacherIdentity
    seed: int
    remote: RemoteFiles | None
    access: Access = UNRESTRICTED
    left_out: Counter[str] = field(default_factory=Counter)
    """See `read_source_rows`."""

    @property
    def settings(self) -> CompletionSpec:
        assert self.source.complete is not None, "only sources with `complete` settings get completions"
        return self.source.complete

    def plan_shards(self) -> Iterator[CompletionShard]:
        """Yield all shards, in the same order every time. Raises as `read_source_rows`."""
        settings = self.settings.model_dump(mode="json", exclude={"endpoint"})  # a server may move
        if settings["model"] is None:
            del settings["model"]
        description = [asdict(self.teacher), settings]
        waiting = self._read_prompts()
        while prompts := tuple(islice(waiting, _PROMPTS_PER_SHARD)):
            key = _hash_json([*description, [prompt.prompt_token_ids for prompt in prompts]]).hex()
            seeds = tuple(
                _derive_seed(self.settings.seed, repeat, prompt)
                for prompt in prompts
                for repeat in range(self.settings.num_completions)
            )
            yield CompletionShard(key, prompts, seeds)

    def read_teacher_completions(self, store: CompletionStore) -> Iterator[Completion]:
        """Yield all completions, prompt by prompt. Raises `StorageError` if a shard is missing."""
        for shard in self.plan_shards():
            data = store.load_answers(shard.key)
            if data is None:
                raise StorageError(
                    f"the teacher's completions {shard.key} are missing; the next attempt writes them again"
                )
            rows = [json.loads(line) for line in data.splitlines()]
            prompts = [prompt for prompt in shard.prompts for _ in range(self.settings.num_completions)]
            for prompt, row in zip(prompts, rows, strict=True):
                yield replace(prompt, token_ids=tuple(row["token_ids"]), text=row["text"])

    def _read_prompts(self) -> Iterator[Completion]:
        rows = read_source_rows(
            self.source,
            self.index,
            seed=self.seed,
            remote=self.remote,
            access=self.access,
            formats=PROMPT_FORMATS,
            left_out=self.left_out,
        )
        for row in rows:
            if row.held_out:
                continue
            try:
                tokens = self.encoder.encode_prompt(row.content).tolist() if row.content else []
            except RowError as error:
                if not row.is_captured:
                    raise row.make_error(error, f"data.sources[{self.index}]") from error
                tokens = []
            end = self.settings.prompt_tokens if isinstance(row.content, str) else None
            yield Completion(
                row.format, tuple(tokens[:end]), unread_columns=row.unread_columns, conversation=row.conversation
            )


def _derive_seed(seed: int, repeat: int, prompt: Completion) -> int:
    return int.from_bytes(_hash_json([seed, repeat, prompt.prompt_token_ids])[:7], "big")


def _hash_json(value: Sequence[object]) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
