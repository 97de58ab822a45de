"""Read own rows for an evaluation (`evaluation.rows`): a prompt and, if the metric needs one, the expected answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.data.formats import FORMATS, PROMPT_FORMATS, Content, Conversation, RowFormat, hash_content
from swiftkv_platform.data.messages import Message, RowError, format_value, parse_json
from swiftkv_platform.data.row_metrics import compile_schema, normalize_text, parse_last_number
from swiftkv_platform.data.source_rows import RemoteFiles, SourceRow, read_source_rows
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import RowTaskSpec


@dataclass(frozen=True)
class EvaluationRow:
    """One row of a `RowTaskSpec`."""

    key: str
    """Hash of the prompt, the same for all tokenizers and jobs."""
    prompt: Content
    answer: Message | None
    """Expected answer, as a message of the assistant; None if the row has none."""
    schema: Mapping[str, Any] | None
    """JSON schema of the answer, for the metric `json_schema`."""
    source: SourceRow

    @property
    def expected(self) -> str | None:
        """Text of the expected answer."""
        return None if self.answer is None else get_message_text(self.answer)


def get_message_text(message: Message) -> str:
    """Return the text of an assistant's message, with its tool calls as JSON."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message["content"] or "") + (json.dumps(calls, ensure_ascii=False) if calls else "")


def get_row_formats(task: RowTaskSpec) -> Sequence[RowFormat]:
    """Return the accepted formats of a task's rows: with answers, without, or both."""
    if task.metric == "json_schema" or task.answer_column is not None:
        return PROMPT_FORMATS
    return (*FORMATS, *PROMPT_FORMATS) if task.metric == "likelihood" else FORMATS


def read_evaluation_rows(
    task: RowTaskSpec, index: int, *, remote: RemoteFiles | None, access: Access = UNRESTRICTED
) -> Iterator[EvaluationRow]:
    """Yield the rows of `evaluation.rows[index]`. `sample_count` of them are the same for all jobs.

    Captured requests that lack what the metric needs are left out, since nobody can correct them.

    Raises `DataError` with the line of another row that lacks a prompt, the expected answer or a valid schema, and if
    there is no row.
    """
    field = f"evaluation.rows[{index}].source"
    columns = [name for name in (task.answer_column, task.json_schema_column) if name is not None]
    rows = read_source_rows(
        task.source,
        0,
        seed=0,
        remote=remote,
        access=access,
        formats=get_row_formats(task),
        source_field=field,
        other_columns=columns,
    )
    is_empty = True
    for row in rows:
        try:
            yield _parse_row(task, row)
        except RowError as error:
            if not row.is_captured:
                raise row.make_error(error, field) from error
        else:
            is_empty = False
    if is_empty:
        raise DataError.for_field(
            f"{field}.name_or_path", task.source.name_or_path, ", which has no rows; add rows, or leave out the task"
        )


def _parse_row(task: RowTaskSpec, row: SourceRow) -> EvaluationRow:
    # 1. split prompt and answer
    prompt, answer = row.content, None
    if not prompt:
        raise RowError("its prompt or its answer is empty; fill it, or leave the row out")
    if task.answer_column is not None:
        answer = {"role": "assistant", "content": _parse_answer(row.values.get(task.answer_column), task.answer_column)}
    elif row.is_captured and isinstance(prompt, str):
        prompt, answer = row.values["prompt"], {"role": "assistant", "content": row.values["completion"]}
    elif isinstance(prompt, Conversation) and prompt.messages[-1]["role"] == "assistant":
        answer = prompt.messages[-1]
        prompt = Conversation(prompt.messages[:-1], prompt.tools)
        if not prompt:
            raise RowError("it has an answer, but no message before it; add the user's message")
    # 2. check what the metric needs
    _check_answer(task, answer)
    schema = None
    if task.metric == "json_schema":
        schema = task.json_schema or _parse_schema(row.values.get(task.json_schema_column or ""), task)
    return EvaluationRow(f"{hash_content(prompt):016x}", prompt, answer, schema, row)


def _parse_answer(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(
            f"the answer in column {column} is {format_value(value)}; fill in a text or number, or change answer_column"
        )
    return value if isinstance(value, str) else repr(value)


def _check_answer(task: RowTaskSpec, answer: Message | None) -> None:
    """Raise `RowError` if a row's answer is missing, or not one that the metric can compare with."""
    metric = task.metric
    if metric == "json_schema" or (metric == "likelihood" and answer is None):
        return
    if answer is None:
        raise RowError(
            f"it has no answer, which metric {metric} needs; end the messages with the assistant's, or set "
            "answer_column to the column with the answer"
        )
    text, place = get_message_text(answer), task.answer_column or "the last message"
    if not text.strip():
        raise RowError(f"the answer in {place} is empty; fill it, or leave the row out")
    if metric == "likelihood":
        return
    if answer.get("tool_calls"):
        raise RowError(f"the answer in {place} calls a tool, which metric {metric} cannot score; use likelihood")
    if metric == "numeric" and parse_last_number(text) is None:
        raise RowError(f"the answer in {place} is {text!r:.80}, which has no number; metric numeric needs one")
    if metric == "classification" and find_label(task, text) is None:
        known = ", ".join(task.labels)
        raise RowError(f"the answer in {place} is {text!r:.80}, none of the labels ({known:.200}); add it to labels")


def find_label(task: RowTaskSpec, answer: str) -> int | None:
    """Return the index of the label that an expected answer is; None if it is none."""
    labels = [normalize_text(label) for label in task.labels]
    text = normalize_text(answer)
    return labels.index(text) if text in labels else None


def _parse_schema(value: Any, task: RowTaskSpec) -> Mapping[str, Any]:
    column = task.json_schema_column
    if value is None or value == "":
        raise RowError(f"column {column} has no schema; fill in a JSON schema, or set json_schema for all rows")
    schema: Mapping[str, Any] = parse_json(value, str(column)) if isinstance(value, str) else value
    compile_schema(schema)
    return schema
