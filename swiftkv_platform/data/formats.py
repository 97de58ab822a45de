"""Row formats: which columns make a row a text or a conversation. Knows no file and no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.data.files import Row
from swiftkv_platform.data.messages import Message, RowError, read_messages, read_prompt, read_tools, shown, turns_of
from swiftkv_platform.errors import DataError


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Functions as chat templates read them."""

    def __bool__(self) -> bool:
        return bool(self.messages)

    def as_json(self) -> str:
        """Return the conversation as canonical JSON, without the weights of its messages."""
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in self.messages]
        said = messages if self.tools is None else {"messages": messages, "tools": self.tools}
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)


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
    """Every column that is read."""

    def __call__(self, row: Row) -> Content:
        """Return the row's text or conversation, which may be empty. Raises `RowError` for a value of a wrong type."""
        try:
            return self.format.parse([row[column] for column in self.required], row)
        except RecursionError as error:
            raise RowError("it is nested too deeply to be read") from error


class Holdings:
    """Tells which columns of a table are not empty, reading only as many rows as needed. `read` returns the rows from
    the beginning."""

    def __init__(self, read: Callable[[], Iterator[Row]]) -> None:
        self._read = read
        self._rows: Iterator[Row] | None = None
        self._held: dict[frozenset[str], set[str]] = {}

    def hold(self, layout: Collection[str], columns: Collection[str]) -> bool:
        """Whether each of `columns` has a value that is not empty in some row with the columns `layout`."""
        wanted = _known(layout)
        held = self._held.setdefault(wanted, set())
        while not held.issuperset(columns):
            self._rows = self._read() if self._rows is None else self._rows
            row = next(self._rows, None)
            if row is None:
                return False
            found = self._held.get(_known(row))
            if found is None and len(self._held) < _LAYOUTS_KEPT:
                found = self._held.setdefault(_known(row), set())
            if found is not None:
                found.update(column for column, value in row.items() if not _is_nothing(value))
        return True


_LONGEST_LIST = 500
"""Most characters of a list of columns in a message."""
_LAYOUTS_KEPT = 256
"""Most sets of columns that a `Holdings` keeps track of."""


def _known(columns: Iterable[str]) -> frozenset[str]:
    return COLUMNS.intersection(columns)


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value) or value != value


def match_format(
    columns: Collection[str], formats: Sequence[RowFormat], holdings: Holdings | None = None
) -> tuple[RowFormat, tuple[str, ...], bool] | None:
    """Return the first of `formats` that fits, its matched set of columns, and whether those are not empty. Formats
    whose columns are all empty are tried last; without `holdings`, no column counts as empty."""
    found = [(candidate, group) for candidate in formats for group in candidate.matches(columns)]
    for candidate, group in found:
        if holdings is None or holdings.hold(columns, group):
            return candidate, group, True
    return (*found[0], False) if found else None


def find_format(
    name: str,
    columns: Sequence[str],
    *,
    origin: str,
    path: str,
    formats: Sequence[RowFormat],
    holdings: Holdings | None = None,
    field: str | None = None,
) -> RowReader:
    """Return the reader for rows with `columns`: of the format `name`, or if that is `auto` of the first of `formats`
    that fits, see `match_format`. Raises `DataError` about `field` (default: the format of `path`) if none fits."""
    candidates = formats if name == "auto" else [f for f in formats if f.name == name]
    matched = match_format(columns, candidates, holdings)
    if matched is not None:
        candidate, required, _ = matched
        optional = tuple(column for column in candidate.optional if column in columns)
        return RowReader(candidate, required, required + optional)
    message = f"{path}: {describe_mismatch(origin, columns, candidates)}"
    raise DataError(message, field=field or f"{path}.format", value=list(columns))


def describe_mismatch(origin: str, columns: Collection[str], formats: Sequence[RowFormat]) -> str:
    """Return the sentence about rows whose columns fit none of `formats`."""
    accepted = "; ".join(f"{f.name}: {' or '.join(' + '.join(group) for group in f.columns)}" for f in formats)
    held = ", ".join(columns)[:_LONGEST_LIST] or "(none)"
    return f"{origin} has the columns {held}; these are accepted: {accepted}"


def content_digest(content: Content) -> int:
    """Return a 64-bit hash of a sample's content, the same for every file, format and tokenizer. Raises `RowError` for
    a lone surrogate, which JSON can express but UTF-8 cannot encode."""
    data = content if isinstance(content, str) else content.as_json()
    try:
        return int.from_bytes(hashlib.blake2b(data.encode("utf-8"), digest_size=8).digest(), "big")
    except UnicodeEncodeError as error:
        raise RowError(f"character {error.start} is half of a surrogate pair; whole characters are accepted") from error


def _text(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise RowError(f"{what} is {shown(value)}, a {type(value).__name__}; a string is accepted")


def _conversation(messages: list[Message], row: Row) -> Conversation:
    """Return a conversation with the row's `system`, unless its first message is one, and its `tools`, formerly called
    `functions` by OpenAI."""
    system = _text(row.get("system"), "system")
    if system and messages and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": system}, *messages]
    return Conversation(messages, read_tools(row.get("tools") or row.get("functions")))


def _exchange(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _parse_text(values: list[Any], _row: Row) -> Content:
    return _text(values[0], "text")


def _chats(read: Callable[[Any, str], list[Message]], column: str) -> Callable[[list[Any], Row], Content]:
    return lambda values, row: _conversation(read(values[0], column), row)


def _parse_prompt_completion(values: list[Any], row: Row) -> Content:
    prompt, completion = values
    if isinstance(prompt, list) or isinstance(completion, list):
        return _conversation(_both(prompt, completion), row)
    user, assistant = _text(prompt, "the prompt"), _text(completion, "the completion")
    return _conversation(_exchange(user, assistant) if user and assistant else [], row)


def _both(prompt: Any, completion: Any) -> list[Message]:
    """Return the messages of a prompt and its completion, each a list of messages or a text."""
    sides = (("prompt", "user", prompt), ("completion", "assistant", completion))
    return read_messages(
        [
            turn
            for what, role, said in sides
            for turn in ([{"role": role, "content": said}] if isinstance(said, str) else turns_of(said, what))
        ],
        "prompt and completion",
    )


def _parse_alpaca(values: list[Any], row: Row) -> Content:
    instruction, output = (_text(v, what) for v, what in zip(values, ("instruction", "output"), strict=True))
    if not (instruction and output):
        return _conversation([], row)
    return _conversation([*_history(row), *_exchange(_instruction(instruction, row), output)], row)


def _history(row: Row) -> list[Message]:
    """Return the messages of `history`, pairs of instruction and output."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"history is {history!r:.80}; a list of pairs of instruction and output is accepted")
    pairs = (_exchange(*(_text(part, "history") for part in pair)) for pair in history)
    return read_messages([message for pair in pairs for message in pair], "history")


def _instruction(instruction: str, row: Row) -> str:
    context = _text(row.get("input") or row.get("context"), "input")
    return f"{instruction}\n\n{context}" if context else instruction


def _question(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}] if prompt else []


def _prompt_of_prompt(values: list[Any], row: Row) -> Content:
    if isinstance(values[0], list):
        return _conversation(read_prompt(values[0], "prompt"), row)
    return _conversation(_question(_text(values[0], "the prompt")), row)


def _prompt_of_alpaca(values: list[Any], row: Row) -> Content:
    question = _question(_instruction(_text(values[0], "instruction"), row))
    return _conversation([*_history(row), *question] if question else [], row)


_BESIDE = ("system", "tools", "functions")
"""Optional columns of every conversation."""
_SHAREGPT = (("conversations",), ("conversation",))
_OF_ALPACA = ("input", "context", "history", *_BESIDE)

FORMATS = (
    RowFormat("messages", (("messages",),), _chats(read_messages, "messages"), optional=_BESIDE),
    RowFormat("sharegpt", _SHAREGPT, _chats(read_messages, "conversations"), optional=_BESIDE),
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
        optional=_BESIDE,
    ),
    RowFormat("alpaca", (("instruction", "output"), ("instruction", "response")), _parse_alpaca, optional=_OF_ALPACA),
    RowFormat("text", (("text",),), _parse_text),
)
"""Row formats in the order in which `auto` tries them, the most specific first."""

PROMPT_FORMATS = (
    RowFormat("messages", (("messages",),), _chats(read_prompt, "messages"), optional=_BESIDE),
    RowFormat("sharegpt", _SHAREGPT, _chats(read_prompt, "conversations"), optional=_BESIDE),
    RowFormat(
        "prompt_completion", (("prompt",), ("query",), ("question",), ("problem",)), _prompt_of_prompt, optional=_BESIDE
    ),
    RowFormat("alpaca", (("instruction",),), _prompt_of_alpaca, optional=_OF_ALPACA),
    RowFormat("text", (("text",),), _parse_text),
)
"""Row formats that read only the prompt, for the teacher to answer; in the same order."""

COLUMNS = frozenset(
    column for formats in (FORMATS, PROMPT_FORMATS) for each in formats for group in each.columns for column in group
)
"""Columns that decide which format fits."""
