"""Data that a job trains on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swiftkv_platform.specs.base import MAX_TEMPERATURE, Name, Spec, Word
from swiftkv_platform.specs.limits import Count, Range, Seed, Size

BUILTIN_DATA = "builtin:python-stdlib"
"""The sources of the interpreter's standard library."""

BUILTIN_CHATS, BUILTIN_RECALL = "builtin:chat-prompts", "builtin:recall-prompts"
BUILTIN_LONG_RECALL = "builtin:long-recall-prompts"
BUILTIN_PROMPTS = (BUILTIN_CHATS, BUILTIN_RECALL, BUILTIN_LONG_RECALL)
"""Requests to a chat model, for the teacher to answer: for what it knows, and for what a text in them says."""


class CompletionSpec(Spec):
    """Settings of the teacher's answers to the prompts of a source."""

    max_tokens: Size = 512
    """Most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    """0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Samples among the fewest tokens whose probabilities sum to at least this."""
    num_completions: Annotated[int, Range(1, 10_000)] = 1
    """Answers to each prompt."""
    prompt_tokens: Size | None = None
    """Most tokens of a text, counted from its beginning, that are the prompt."""
    seed: Seed = 0
    """Seed that decides every draw, together with the prompt's own tokens."""


class DataSourceSpec(Spec):
    """One data set."""

    name_or_path: Annotated[Name, Field(min_length=1)]
    """Hub id, file (`.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet`, `.txt`, `.py`; all but Parquet also
    compressed: `.gz`, `.bz2`, `.xz`, `.zst`), directory of such files, `s3://` object or prefix,
    `file-...` (rows that were uploaded to the control plane), `builtin:python-stdlib` (the sources of the interpreter's
    standard library), `builtin:chat-prompts`, `builtin:recall-prompts` or `builtin:long-recall-prompts` (requests that
    the teacher answers, with `complete`: for what it knows, and for what a text in them says)."""
    split: Word = "train"
    """Split of a hub or built-in data set, or of a directory or prefix whose files' names tell one (`train`,
    `validation`, `test`, or another of their names). `held_out` of built-in requests is never trained on, but measured;
    it shares no subject, or no person, with `train`. `unseen` of `builtin:chat-prompts` is held out as well, and
    worded as no other request is."""
    subset: Annotated[Word, Field(min_length=1)] | None = None
    """Configuration of a data set of the hub, or laid out as there, that has several: `main` of `openai/gsm8k`. Refused
    elsewhere."""
    sample_count: Count | None = None
    """Take only this number of samples, chosen by the seed."""
    weight: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Share of this source relative to the others: 2.0 repeats each sample twice, 0.5 keeps half."""
    format: Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Row format; `auto` detects it from the columns that hold something."""
    complete: CompletionSpec | None = None
    """Rows are prompts, which the teacher answers before training; answers that they bring are left out. Conversations
    are answered at their last user message, texts are continued."""
    streaming: bool = False
    """Keep nothing of a hub or `s3://` source on disk but the tokens made of it. `sample_count` then takes the first so
    many."""

    @property
    def is_held_out(self) -> bool:
        """Whether all of its rows are held out."""
        return self.name_or_path in BUILTIN_PROMPTS and self.split in ("held_out", "unseen")


class DataSpec(Spec):
    """Training text."""

    sources: Annotated[tuple[DataSourceSpec, ...], Field(min_length=1, max_length=1000, fail_fast=True)] = (
        DataSourceSpec(name_or_path=BUILTIN_DATA),
    )
    max_length: Annotated[int, Range(16, 1 << 24)] = 8192
    """Tokens per sequence, at most the model's context (`max_position_embeddings`); a longer sample is cut."""
    packing: bool = True
    """Pack samples into one sequence, attention kept apart and positions restarted."""
    train_on: Literal["assistant", "all"] = "all"
    """Positions the loss counts: those that predict an assistant's token, or all. In plain text all count; messages of
    weight 0 never do."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of the documents held out for evaluation, chosen by a hash of their content; of fewer documents than one in
    this share, parts. `builtin:python-stdlib` brings its own held-out modules instead."""
