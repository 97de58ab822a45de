"""Section `data` of a job spec: the training data."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swiftkv_platform.specs.base import (
    MAX_TEMPERATURE,
    Count,
    HttpUrl,
    Name,
    Range,
    Seed,
    Size,
    Spec,
    Word,
    make_field_error,
)

BUILTIN_DATA = "builtin:python-stdlib"
"""Source code of the interpreter's standard library, as training text."""

BUILTIN_CHATS, BUILTIN_RECALL = "builtin:chat-prompts", "builtin:recall-prompts"
BUILTIN_LONG_RECALL = "builtin:long-recall-prompts"
BUILTIN_CONSTRAINTS = "builtin:constraint-prompts"
BUILTIN_PROMPTS = (BUILTIN_CHATS, BUILTIN_RECALL, BUILTIN_LONG_RECALL, BUILTIN_CONSTRAINTS)
"""Prompts that the teacher answers, from its knowledge or from a text in the prompt."""


class CompletionSpec(Spec):
    """How the teacher answers a source's prompts. By default every worker loads it; `endpoint` names a server instead,
    for teachers that do not fit into a worker."""

    endpoint: HttpUrl | None = None
    """OpenAI-compatible server of the teacher, with its path, as `http://vllm:8000/v1`. It is sent token ids, so its
    model needs the tokenizer of `model.name_or_path`. The API key is `TEACHER_API_KEY` in the workers'
    environment."""
    model: Annotated[Word, Field(min_length=1)] | None = None
    """Name of the teacher on `endpoint`."""
    max_tokens: Size = 512
    """Max tokens per answer."""
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    num_completions: Annotated[int, Range(1, 10_000)] = 1
    """Answers per prompt."""
    prompt_tokens: Size | None = None
    """For texts: max tokens from the start of a text to use as the prompt."""
    seed: Seed = 0
    """Sampling seed, combined with the prompt's tokens."""

    @model_validator(mode="after")
    def _check_served_teacher(self) -> Self:
        if (self.endpoint is None) != (self.model is None):
            missing, given = ("model", "endpoint") if self.model is None else ("endpoint", "model")
            raise make_field_error(missing, None, f"{given} is set without {missing}; a served teacher needs both")
        return self


class DataSourceSpec(Spec):
    """One data set."""

    name_or_path: Annotated[Name, Field(min_length=1)]
    """Hub id, file (`.jsonl`, `.ndjson`, `.json`, `.csv`, `.tsv`, `.parquet`, `.txt`, `.py`; all but Parquet also
    compressed: `.gz`, `.bz2`, `.xz`, `.zst`), directory of such files, `s3://` object or prefix, `file-...` (rows
    uploaded to the control plane), `builtin:python-stdlib` (source code of the interpreter's standard library),
    `builtin:chat-prompts`, `builtin:constraint-prompts`, `builtin:recall-prompts` or `builtin:long-recall-prompts`
    (prompts that the teacher answers with `complete`, from its knowledge or from a text in the prompt)."""
    split: Word = "train"
    """Split of a hub or built-in data set, or of a directory or prefix whose file names contain the split. Built-in
    prompts have a split `held_out` for evaluation, which shares no subject or person with `train`, and
    `builtin:chat-prompts` also `unseen`, with wording that the other splits do not use."""
    subset: Annotated[Word, Field(min_length=1)] | None = None
    """Configuration of a hub data set, or of a directory in the hub's layout, e.g. `main` of `openai/gsm8k`. Not for
    other sources."""
    sample_count: Count | None = None
    """Use only this many samples, chosen by the seed."""
    weight: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Weight relative to other sources: 2.0 repeats each sample twice, 0.5 keeps half."""
    format: Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"] = "auto"
    """Row format; `auto` detects it from the non-empty columns."""
    complete: CompletionSpec | None = None
    """Before training, the teacher answers the rows as prompts: it answers a conversation's last user message and
    continues a text. Answers in the rows are dropped."""
    streaming: bool = False
    """Read a hub or `s3://` source without storing its files. `sample_count` then uses the first samples."""

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
    """Max tokens per row, limited by the model's context (`max_position_embeddings`); longer samples are truncated."""
    packing: bool = True
    """Pack several samples into one row. Each sample attends only to itself, with its own positions."""
    train_on: Literal["assistant", "all"] = "all"
    """Positions that count for the loss: those that predict assistant tokens, or all. Plain text always counts,
    messages with weight 0 never."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of documents held out for evaluation, chosen by a hash of their content; parts of documents if the share is
    less than one document. `builtin:python-stdlib` has its own held-out modules."""
