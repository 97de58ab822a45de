"""Data that a job trains on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swiftkv_platform.specs.base import MAX_TEMPERATURE, Count, Name, Range, Seed, Size, Spec, Word

BUILTIN_DATA = "builtin:python-stdlib"
"""Source code of the interpreter's standard library, as training text."""

BUILTIN_CHATS, BUILTIN_RECALL = "builtin:chat-prompts", "builtin:recall-prompts"
BUILTIN_LONG_RECALL = "builtin:long-recall-prompts"
BUILTIN_PROMPTS = (BUILTIN_CHATS, BUILTIN_RECALL, BUILTIN_LONG_RECALL)
"""Requests for the teacher to answer: from its knowledge, or from a text in the request."""


class CompletionSpec(Spec):
    """Settings for the teacher's answers to a source's prompts."""

    max_tokens: Size = 512
    """Most tokens of an answer."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    """0 takes the most probable token."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Samples among the fewest tokens whose probabilities sum to at least this."""
    num_completions: Annotated[int, Range(1, 10_000)] = 1
    """Answers to each prompt."""
    prompt_tokens: Size | None = None
    """Most tokens from the beginning of a text to use as the prompt."""
    seed: Seed = 0
    """Seed of every draw, combined with the prompt's tokens."""


class DataSourceSpec(Spec):
    """One data set."""

    name_or_path: Annotated[Name, Field(min_length=1)]
    """Hub id, file (`.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet`, `.txt`, `.py`; all but Parquet also
    compressed: `.gz`, `.bz2`, `.xz`, `.zst`), directory of such files, `s3://` object or prefix, `file-...` (rows
    uploaded to the control plane), `builtin:python-stdlib` (source code of the interpreter's standard library),
    `builtin:chat-prompts`, `builtin:recall-prompts` or `builtin:long-recall-prompts` (requests for the teacher to
    answer with `complete`: from its knowledge, or from a text in the request)."""
    split: Word = "train"
    """Split of a hub or built-in data set, or of a directory or prefix whose file names contain one (`train`,
    `validation`, `test`, or another). `held_out` of built-in requests is used for measuring only and shares no subject
    or person with `train`. `unseen` of `builtin:chat-prompts` is held out as well, in wording that no other request
    uses."""
    subset: Annotated[Word, Field(min_length=1)] | None = None
    """Configuration of a data set on the hub, or in the hub's layout, that has several: `main` of `openai/gsm8k`.
    Refused for other sources."""
    sample_count: Count | None = None
    """Take only this number of samples, chosen by the seed."""
    weight: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Share of this source relative to the others: 2.0 repeats each sample twice, 0.5 keeps half."""
    format: Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Row format; `auto` detects it from the columns that hold something."""
    complete: CompletionSpec | None = None
    """The teacher answers the rows, as prompts, before training; answers in the rows are dropped. Conversations are
    answered at their last user message, texts are continued."""
    streaming: bool = False
    """Keep only the tokens of a hub or `s3://` source on disk. `sample_count` then takes the first samples."""

    @property
    def is_held_out(self) -> bool:
        """Whether all rows of the source are held out."""
        return self.name_or_path in BUILTIN_PROMPTS and self.split in ("held_out", "unseen")


class DataSpec(Spec):
    """Training text."""

    sources: Annotated[tuple[DataSourceSpec, ...], Field(min_length=1, max_length=1000, fail_fast=True)] = (
        DataSourceSpec(name_or_path=BUILTIN_DATA),
    )
    max_length: Annotated[int, Range(16, 1 << 24)] = 8192
    """Tokens per sequence, at most the model's context (`max_position_embeddings`); a longer sample is cut."""
    packing: bool = True
    """Pack samples into one sequence; each attends to itself only, and positions restart."""
    train_on: Literal["assistant", "all"] = "all"
    """Positions the loss counts: those that predict an assistant's token, or all. In plain text all count; messages of
    weight 0 never do."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of the documents held out for evaluation, chosen by a hash of their content. If that is less than one
    document, parts of documents are held out. `builtin:python-stdlib` has its own held-out modules instead."""
