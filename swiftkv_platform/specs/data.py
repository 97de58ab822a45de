"""Section `data` of a job spec: the training data."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

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

TRAFFIC_SCHEME = "traffic:"
"""Beginning of the name of captured traffic, before the deployment's id."""
_RELATIVE_TIME = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
_EPOCH = "1970-01-01"
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def _format_date(value: Any) -> Any:
    """Return a date as text. YAML reads dates and times that are not quoted as such."""
    return value.isoformat() if isinstance(value, date) else value


def _parse_time(text: str) -> datetime | timedelta:
    """Return a time in UTC, or how long it is before the submission. Raises `ValueError`."""
    relative = _RELATIVE_TIME.fullmatch(text)
    if relative is not None:
        return timedelta(**{_UNITS[relative[2]]: int(relative[1])})
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        accepted = "2026-11-30, 2026-11-30T18:00:00Z (UTC), or a time before the submission: 90m, 12h, 7d"
        raise ValueError(f"use a date or time such as {accepted}") from error


def _check_time(text: str) -> str:
    _parse_time(text)
    return text


Time = Annotated[str, Field(max_length=40), BeforeValidator(_format_date), AfterValidator(_check_time)]
"""Date or time (ISO 8601, UTC), or time before the submission (`90m`, `12h`, `7d`)."""


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
    uploaded to the control plane), `traffic:dep_...` (captured traffic of a deployment), `builtin:python-stdlib`
    (source code of the interpreter's standard library), `builtin:chat-prompts`, `builtin:constraint-prompts`,
    `builtin:recall-prompts` or `builtin:long-recall-prompts` (prompts that the teacher answers with `complete`, from
    its knowledge or from a text in the prompt)."""
    split: Word = "train"
    """Split of a hub or built-in data set, or of a directory or prefix whose file names contain the split. Built-in
    prompts have a split `held_out` for evaluation, which shares no subject or person with `train`, and
    `builtin:chat-prompts` also `unseen`, with wording that the other splits do not use."""
    subset: Annotated[Word, Field(min_length=1)] | None = None
    """Configuration of a hub data set, or of a directory in the hub's layout, e.g. `main` of `openai/gsm8k`. Not for
    other sources."""
    sample_count: Count | None = None
    """Use only this many samples, chosen by the seed."""
    since: Time | None = None
    """Captured traffic: use requests that ended at or after this date or time (UTC), such as `2026-11-30` or
    `2026-11-30T18:00:00Z`, or this long before the submission (`90m`, `12h`, `7d`). Default: all."""
    until: Time | None = None
    """Captured traffic: use requests that ended before this date or time, as in `since`. Default and max: the
    submission."""
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

    @property
    def is_traffic(self) -> bool:
        """Whether the source is captured traffic."""
        return self.name_or_path.startswith(TRAFFIC_SCHEME)

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the window [since, until) of captured traffic, in Unix seconds; only after
        `resolve_window`."""
        assert self.until is not None, "the window is resolved at submission"
        since, until = _parse_time(self.since or _EPOCH), _parse_time(self.until)
        assert isinstance(since, datetime), "the window is resolved at submission"
        assert isinstance(until, datetime), "the window is resolved at submission"
        return since.timestamp(), until.timestamp()

    def resolve_window(self, now: float) -> Self:
        """Return the source with times that do not depend on when they are read, and `until` no later than `now` (Unix
        seconds), so that all attempts of a job read the same requests. Raises `ValueError` for an empty window."""
        submission = datetime.fromtimestamp(int(now), UTC)
        since, until = (
            None if each is None else _resolve_time(_parse_time(each), submission) for each in (self.since, self.until)
        )
        until = submission if until is None else min(until, submission)
        if since is not None and since >= until:
            raise ValueError(f", which is not before until ({_format_time(until)}); use an earlier time")
        return self.model_copy(
            update={"since": None if since is None else _format_time(since), "until": _format_time(until)}
        )

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        for field in ("since", "until"):
            if (value := getattr(self, field)) is not None and not self.is_traffic:
                why = f"but only captured traffic ({TRAFFIC_SCHEME}dep_...) has times; remove {field}"
                raise make_field_error(field, value, f"{field} is {value!r}, {why}")
        return self


def _resolve_time(time: datetime | timedelta, submission: datetime) -> datetime:
    return submission - time if isinstance(time, timedelta) else time


def _format_time(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


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
