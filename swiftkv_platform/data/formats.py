"""Row formats: parse the columns of a row as a text or a conversation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from swiftkv_platform.data.files import Row
from swiftkv_platform.data.messages import (
    MEDIA_KEYS,
    Message,
    RowError,
    format_value,
    is_empty,
    parse_turns,
    read_messages,
    read_prompt,
    read_tools,
)
from swiftkv_platform.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Functions as chat templates read them."""

    def __bool__(self) -> bool:
        return bool(self.messages)

    def to_json(self) -> str:
        """Return the conversation as canonical JSON, without the weights of its messages."""
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in self.messages]
        value = messages if self.tools is None else {"messages": messages, "tools": self.tools}
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


Content = str | Conversation


@dataclass(frozen=True)
class RowFormat:
    """One way to lay out samples in columns."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """Alternative sets of required columns."""
    parse: Callable[[list[Any], Row], Content]
    """(values of the matched set of columns, whole row) -> content"""
    optional: tuple[str, ...] = ()
    """Columns that are read if they exist."""

    def matches(self, columns: Collection[str]) -> list[tuple[str, ...]]:
        """Return the sets of required columns that `columns` contains."""
        return [group for group in self.columns if set(group) <= set(columns)]


@dataclass(frozen=True)
class RowReader:
    """A format bound to the columns of a table."""

    format: RowFormat
    required: tuple[str, ...]
    columns: tuple[str, ...]
    """Columns that are read: `required`, then existing optional columns."""
    unread_columns: tuple[str, ...] = ()
    """The table's other columns."""

    def __call__(self, row: Row) -> Content:
        """Return the row's text or conversation, which may be empty. Raises `RowError` for a value of a wrong type."""
        try:
            return self.format.parse([row[column] for column in self.required], row)
        except RecursionError as error:
            raise RowError("it is nested too deeply to be read") from error


class NonEmptyColumns:
    """Finds the non-empty columns of a table, reading only as many rows as necessary. `read` returns the rows from the
    beginning."""

    def __init__(self, read: Callable[[], Iterator[Row]]) -> None:
        self._read = read
        self._rows: Iterator[Row] | None = None
        self._filled_by_column_set: dict[frozenset[str], set[str]] = {}

    def are_non_empty(self, table_columns: Collection[str], columns: Collection[str]) -> bool:
        """Whether each of `columns` is non-empty in some row with the set of columns `table_columns`."""
        wanted = _select_format_columns(table_columns)
        filled = self._filled_by_column_set.setdefault(wanted, set())
        while not filled.issuperset(columns):
            self._rows = self._read() if self._rows is None else self._rows
            row = next(self._rows, None)
            if row is None:
                return False
            found = self._filled_by_column_set.get(_select_format_columns(row))
            if found is None and len(self._filled_by_column_set) < _MAX_COLUMN_SETS:
                found = self._filled_by_column_set.setdefault(_select_format_columns(row), set())
            if found is not None:
                found.update(column for column, value in row.items() if not is_empty(value))
        return True


_MAX_LISTED_LENGTH = 500
"""Max characters of a list of columns in a message."""
_MAX_UNREAD_COLUMNS, _MAX_COLUMN_LENGTH = 64, 128
"""Max number of reported unread columns, and max characters of each."""
_MAX_COLUMN_SETS = 256
"""Max sets of columns that a `NonEmptyColumns` tracks."""


def _select_format_columns(columns: Iterable[str]) -> frozenset[str]:
    return FORMAT_COLUMNS.intersection(columns)


def match_format(
    columns: Collection[str], formats: Sequence[RowFormat], non_empty: NonEmptyColumns | None = None
) -> tuple[RowFormat, tuple[str, ...], bool] | None:
    """Return (first matching format, its matched set of columns, whether these columns are non-empty); None without a
    match. Formats with empty columns are tried last; without `non_empty`, no column counts as empty."""
    found = [(candidate, group) for candidate in formats for group in candidate.matches(columns)]
    for candidate, group in found:
        if non_empty is None or non_empty.are_non_empty(columns, group):
            return candidate, group, True
    return (*found[0], False) if found else None


def find_row_reader(
    name: str,
    columns: Sequence[str],
    *,
    origin: str,
    source_field: str,
    formats: Sequence[RowFormat],
    non_empty: NonEmptyColumns | None = None,
    field: str | None = None,
    value: str | None = None,
) -> RowReader:
    """Return the reader for rows with `columns`: of the format `name`, or for `auto` the first match of `formats`, see
    `match_format`. Raises `DataError` without a match, about `field` (default: the source's `format`) with `value`
    (default: the columns)."""
    candidates = formats if name == "auto" else [f for f in formats if f.name == name]
    matched = match_format(columns, candidates, non_empty)
    if matched is not None:
        candidate, required, _ = matched
        optional = tuple(column for column in candidate.optional if column in columns)
        read = required + optional
        return RowReader(candidate, required, read, list_unread_columns(c for c in columns if c not in read))
    message = f"{source_field}: {_describe_mismatch(origin, columns, candidates)}"
    raise DataError(message, field=field or f"{source_field}.format", value=list(columns) if value is None else value)


def list_unread_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the first distinct names, shortened: rows may have any number of columns with names of any length."""
    return tuple(islice(dict.fromkeys(column[:_MAX_COLUMN_LENGTH] for column in columns), _MAX_UNREAD_COLUMNS))


def _describe_mismatch(origin: str, columns: Collection[str], formats: Sequence[RowFormat]) -> str:
    accepted = "; ".join(f"{f.name}: {' or '.join(' + '.join(group) for group in f.columns)}" for f in formats)
    listed = ", ".join(columns)[:_MAX_LISTED_LENGTH] or "(none)"
    return f"{origin} has the columns {listed}; these are accepted: {accepted}"


def hash_content(content: Content) -> int:
    """Return a 64-bit hash of a sample's content, the same for every file, format and tokenizer. Raises `RowError` for
    a lone surrogate, which JSON can express but UTF-8 cannot encode."""
    data = content if isinstance(content, str) else content.to_json()
    try:
        return int.from_bytes(hashlib.blake2b(data.encode("utf-8"), digest_size=8).digest(), "big")
    except UnicodeEncodeError as error:
        raise RowError(f"character {error.start} is half of a surrogate pair; whole characters are accepted") from error


def _parse_string(value: Any, label: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise RowError(f"{label} is {format_value(value)}, a {type(value).__name__}; a string is accepted")


def _build_conversation(messages: list[Message], row: Row) -> Conversation:
    """Return a conversation with the row's `system`, unless its first message is a system message, and its `tools`
    (OpenAI formerly called them `functions`). Raises `RowError` for columns that would change its meaning."""
    system = _parse_string(row.get("system") or row.get("system_prompt"), "system")
    if system and messages and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    _refuse_unsupported_columns(row, has_answer=bool(messages) and messages[-1]["role"] == "assistant")
    for number, message in enumerate(messages, start=1):
        marker = _RENDERED_MESSAGE.match(message["content"] or "")
        if marker is not None:
            raise make_rendered_error(f"message {number} (role {message['role']})", marker[1])
    return Conversation(messages, read_tools(row.get("tools") or row.get("functions")))


def _refuse_unsupported_columns(row: Row, *, has_answer: bool) -> None:
    for column, cure in _UNSUPPORTED_COLUMNS.items():
        value = row.get(column)
        if not is_empty(value):
            raise RowError(f"{column} is {format_value(value)}; {cure}")
    label = row.get("label")
    if has_answer and (label is False or (isinstance(label, str) and label.strip().lower() == "false")):
        raise RowError(f"label is {format_value(label)}, which marks a bad answer; remove rows with this label")


def make_rendered_error(label: str, marker: str) -> RowError:
    """Return the error for a message with the text of a chat template, which would render it again."""
    return RowError(
        f"{label} contains {marker!r}, a marker of a chat template; remove it from the messages, or put the whole "
        "rendered conversation into a column `text`"
    )


def _make_exchange(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _parse_text(values: list[Any], _row: Row) -> Content:
    return _parse_string(values[0], "text")


def _make_chat_parser(read: Callable[[Any, str], list[Message]], column: str) -> Callable[[list[Any], Row], Content]:
    return lambda values, row: _build_conversation(read(values[0], column), row)


def _parse_prompt_completion(values: list[Any], row: Row) -> Content:
    prompt, completion = values
    if isinstance(prompt, list) or isinstance(completion, list):
        return _build_conversation(_join_prompt_and_completion(prompt, completion), row)
    user, assistant = _parse_string(prompt, "the prompt"), _parse_string(completion, "the completion")
    return _build_conversation(_make_exchange(user, assistant) if user and assistant else [], row)


def _join_prompt_and_completion(prompt: Any, completion: Any) -> list[Message]:
    """Return the messages of a prompt and its completion, each a list of messages or a text."""
    sides = (("prompt", "user", prompt), ("completion", "assistant", completion))
    return read_messages(
        [
            turn
            for label, role, value in sides
            for turn in ([{"role": role, "content": value}] if isinstance(value, str) else parse_turns(value, label))
        ],
        "prompt and completion",
    )


def _parse_alpaca(values: list[Any], row: Row) -> Content:
    instruction, output = (_parse_string(v, label) for v, label in zip(values, ("instruction", "output"), strict=True))
    if not (instruction and output):
        return _build_conversation([], row)
    return _build_conversation(
        [*_parse_history(row), *_make_exchange(_join_instruction_and_input(instruction, row), output)], row
    )


def _parse_history(row: Row) -> list[Message]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"history is {history!r:.80}; a list of pairs of instruction and output is accepted")
    pairs = (_make_exchange(*(_parse_string(part, "history") for part in pair)) for pair in history)
    return read_messages([message for pair in pairs for message in pair], "history")


def _join_instruction_and_input(instruction: str, row: Row) -> str:
    context = _parse_string(row.get("input") or row.get("context"), "input")
    return f"{instruction}\n\n{context}" if context else instruction


def _make_user_messages(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}] if prompt else []


def _parse_prompt(values: list[Any], row: Row) -> Content:
    if isinstance(values[0], list):
        return _build_conversation(read_prompt(values[0], "prompt"), row)
    return _build_conversation(_make_user_messages(_parse_string(values[0], "the prompt")), row)


def _parse_alpaca_prompt(values: list[Any], row: Row) -> Content:
    question = _make_user_messages(_join_instruction_and_input(_parse_string(values[0], "instruction"), row))
    return _build_conversation([*_parse_history(row), *question] if question else [], row)


_UNSUPPORTED_COLUMNS = {
    "documents": "write the documents into a message",
    "chat_template_kwargs": "chat templates are rendered with their defaults: remove the column",
    "chat_template": "the tokenizer's chat template is used: remove the column",
    **dict.fromkeys(MEDIA_KEYS, "only text is accepted: leave out such rows, or remove the column"),
}
"""Columns that change what a conversation means, with what to do; accepted if they are empty."""
_RENDERED_MESSAGE = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>)?\s*"
    r"(<[|\uff5c](?:im_start|start_header_id|start_of_role|start|system|user|assistant|User|Assistant)[|\uff5c]>"
    r"|<start_of_turn>|\[INST\])"
)
"""Beginning of a message that a chat template has already rendered."""
_CONVERSATION_COLUMNS = ("system", "system_prompt", "tools", "functions", "label", *_UNSUPPORTED_COLUMNS)
"""Optional columns of every conversation."""
_SHAREGPT = (("conversations",), ("conversation",))
_ALPACA_COLUMNS = ("input", "context", "history", *_CONVERSATION_COLUMNS)

FORMATS = (
    RowFormat(
        "messages", (("messages",),), _make_chat_parser(read_messages, "messages"), optional=_CONVERSATION_COLUMNS
    ),
    RowFormat("sharegpt", _SHAREGPT, _make_chat_parser(read_messages, "conversations"), optional=_CONVERSATION_COLUMNS),
    RowFormat(
        "prompt_completion",
        (
            ("prompt", "completion"),
            ("prompt", "response"),
            ("question", "answer"),
            ("question", "answer_with_tags"),
            ("problem", "solution"),
            ("query", "response"),
        ),
        _parse_prompt_completion,
        optional=_CONVERSATION_COLUMNS,
    ),
    RowFormat(
        "alpaca", (("instruction", "output"), ("instruction", "response")), _parse_alpaca, optional=_ALPACA_COLUMNS
    ),
    RowFormat("text", (("text",),), _parse_text),
)
"""Row formats in the order in which `auto` tries them, the most specific first."""

PROMPT_FORMATS = (
    RowFormat("messages", (("messages",),), _make_chat_parser(read_prompt, "messages"), optional=_CONVERSATION_COLUMNS),
    RowFormat("sharegpt", _SHAREGPT, _make_chat_parser(read_prompt, "conversations"), optional=_CONVERSATION_COLUMNS),
    RowFormat(
        "prompt_completion",
        (("prompt",), ("query",), ("question",), ("problem",)),
        _parse_prompt,
        optional=_CONVERSATION_COLUMNS,
    ),
    RowFormat("alpaca", (("instruction",),), _parse_alpaca_prompt, optional=_ALPACA_COLUMNS),
    RowFormat("text", (("text",),), _parse_text),
)
"""Row formats that read only the prompt, which the teacher completes; in the same order."""

FORMAT_COLUMNS = frozenset(
    column for formats in (FORMATS, PROMPT_FORMATS) for each in formats for group in each.columns for column in group
)
"""Columns that decide which format fits."""
