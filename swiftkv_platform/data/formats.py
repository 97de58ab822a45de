"""Meaning of a row: a text, or a conversation of messages, by its columns. Knows no file and no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.errors import DataError

Row = dict[str, Any]
Message = dict[str, Any]
"""`role`, `content` (str; None of a call without words) and whatever else a chat template may read, as `tool_calls`."""

MAX_DEPTH = 100
"""Lists and objects inside each other in a message or a tool."""


class RowError(ValueError):
    """A row that its format cannot read; the caller knows which row of what it is."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the functions that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """Functions as chat templates read them."""

    def __bool__(self) -> bool:
        return bool(self.messages)

    def as_json(self) -> str:
        """Return the conversation as JSON, the same for equal conversations."""
        said = self.messages if self.tools is None else {"messages": self.messages, "tools": self.tools}
        return json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)


Content = str | Conversation


@dataclass(frozen=True)
class RowFormat:
    """One way to lay out samples in columns."""

    name: str
    columns: tuple[tuple[str, ...], ...]
    """Sets of columns, any one of which is enough."""
    parse: Callable[[list[Any], Row], Content]
    """Reads a row: the values of the matched set of columns in its order, and the whole row."""
    optional: tuple[str, ...] = ()
    """Columns read where they exist."""

    def match(self, columns: Collection[str]) -> tuple[str, ...] | None:
        return next((group for group in self.columns if set(group) <= set(columns)), None)


@dataclass(frozen=True)
class RowReader:
    """A format bound to the columns of a table."""

    format: RowFormat
    required: tuple[str, ...]
    columns: tuple[str, ...]
    """Every column the reader looks at."""

    def __call__(self, row: Row) -> Content:
        """The row's text or conversation; "" where it holds none. Raises `RowError`: a value of another type than the
        format has."""
        return self.format.parse([row[column] for column in self.required], row)


def find_format(
    name: str, columns: Sequence[str], *, origin: str, path: str, formats: Sequence[RowFormat] | None = None
) -> RowReader:
    """The reader for rows with `columns`: of the format `name`, or the first of `formats` (all) that fits where it is
    `auto`. Raises `DataError`: the columns of no format, or not those of `name`, are there."""
    formats = FORMATS if formats is None else formats
    candidates = formats if name == "auto" else [f for f in formats if f.name == name]
    for candidate in candidates:
        required = candidate.match(columns)
        if required is not None:
            optional = tuple(column for column in candidate.optional if column in columns)
            return RowReader(candidate, required, required + optional)
    wanted = "; ".join(f"{f.name}: {' or '.join(' + '.join(group) for group in f.columns)}" for f in candidates)
    raise DataError(
        f"{path}: {origin} has the columns {', '.join(columns) or '(none)'}; these are accepted: {wanted}",
        field=f"{path}.format",
        value=list(columns),
    )


def content_digest(content: Content) -> int:
    """64 bits of what a sample says, whatever file, format or tokenizer it comes through. Raises `RowError`: half of a
    surrogate pair, which JSON can write but no text holds."""
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
    raise RowError(f"{what} is {value!r:.80}, a {type(value).__name__}; a string is accepted")


def _message_text(value: Any) -> str:
    """The content of a message: a string, or a list of text parts as in the OpenAI format."""
    if not isinstance(value, list):
        return _text(value, "a message's content")
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RowError(f"a message holds the part {part!r:.80}; only text parts are accepted")
        parts.append(_text(part.get("text"), "a text part"))
    return "".join(parts)


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """Columns give every message the keys of all messages; those it does not have are null. Raises `RowError` for what
    templates could not walk."""
    if depth > MAX_DEPTH:
        raise RowError(f"a message or tool has lists and objects more than {MAX_DEPTH} deep; use fewer")
    if isinstance(value, dict):
        return {key: _without_nulls(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item, depth + 1) for item in value]
    return value


def _messages(turns: Any, what: str, roles: dict[str, str] | None = None) -> list[Message]:
    """Messages of {role, content} or {from, value}; `roles` translates the roles and refuses others."""
    if turns is None:
        return []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RowError(f"{what} is {turns!r:.80}; a list of messages is accepted")
    messages = []
    for turn in turns:
        role_key, content_key = ("from", "value") if turn.get("from") is not None else ("role", "content")
        role = turn.get(role_key)
        if not isinstance(role, str) or (roles is not None and role not in roles):
            accepted = "a string is" if roles is None else f"{', '.join(roles)} are"
            raise RowError(f"a message has the role {role!r}; {accepted} accepted")
        others = _without_nulls({key: value for key, value in turn.items() if key not in {role_key, content_key}})
        content = _message_text(turn.get(content_key))
        wordless = not content and others.get("tool_calls")
        messages.append({"role": roles[role] if roles else role, "content": None if wordless else content, **others})
    return messages


def _conversation(messages: list[Message], row: Row) -> Conversation:
    """Return a conversation with the row's other columns: `system`, unless a message has it, and `tools`."""
    system = _text(row.get("system"), "system")
    if system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Conversation(messages, _tools(row.get("tools")))


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """A list of functions, or JSON of one; None where there is none."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"tools is {value!r:.80}, which is no JSON: {error}") from error
    if not value:
        return None
    tools = [value] if isinstance(value, dict) else value
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"tools is {value!r:.80}; a list of functions is accepted")
    return [_without_nulls(tool) for tool in tools]


def _exchange(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _parse_text(values: list[Any], _row: Row) -> Content:
    return _text(values[0], "text")


def _chats(column: str, roles: dict[str, str] | None = None) -> Callable[[list[Any], Row], Content]:
    return lambda values, row: _conversation(_messages(values[0], column, roles), row)


def _unanswered_chats(column: str, roles: dict[str, str] | None = None) -> Callable[[list[Any], Row], Content]:
    return lambda values, row: _conversation(_unanswered(_messages(values[0], column, roles)), row)


def _parse_prompt_completion(values: list[Any], row: Row) -> Content:
    prompt, completion = values
    if isinstance(prompt, list) or isinstance(completion, list):
        return _conversation(_messages(prompt, "prompt") + _messages(completion, "completion"), row)
    user, assistant = _text(prompt, "the prompt"), _text(completion, "the completion")
    return _conversation(_exchange(user, assistant) if user and assistant else [], row)


def _parse_alpaca(values: list[Any], row: Row) -> Content:
    instruction, output = (_text(v, what) for v, what in zip(values, ("instruction", "output"), strict=True))
    if not (instruction and output):
        return _conversation([], row)
    return _conversation([*_history(row), *_exchange(_instruction(instruction, row), output)], row)


def _history(row: Row) -> list[Message]:
    """Earlier pairs of instruction and output."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(f"history is {history!r:.80}; a list of pairs of instruction and output is accepted")
    return [message for pair in history for message in _exchange(*(_text(part, "history") for part in pair))]


def _instruction(instruction: str, row: Row) -> str:
    context = _text(row.get("input"), "input")
    return f"{instruction}\n\n{context}" if context else instruction


def _unanswered(messages: list[Message]) -> list[Message]:
    """Return the messages up to the last one that is not the assistant's."""
    end = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "assistant"), 0)
    return messages[:end]


def _question(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}] if prompt else []


def _prompt_of_prompt(values: list[Any], row: Row) -> Content:
    if isinstance(values[0], list):
        return _conversation(_unanswered(_messages(values[0], "prompt")), row)
    return _conversation(_question(_text(values[0], "the prompt")), row)


def _prompt_of_alpaca(values: list[Any], row: Row) -> Content:
    question = _question(_instruction(_text(values[0], "instruction"), row))
    return _conversation([*_history(row), *question] if question else [], row)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

_BESIDE = ("system", "tools")
"""Columns beside those of any conversation."""

FORMATS = (
    RowFormat("messages", (("messages",),), _chats("messages"), optional=_BESIDE),
    RowFormat("sharegpt", (("conversations",),), _chats("conversations", _SHAREGPT_ROLES), optional=_BESIDE),
    RowFormat(
        "prompt_completion",
        (
            ("prompt", "completion"),
            ("prompt", "response"),
            ("question", "answer"),
            ("question", "answer_with_tags"),
            ("problem", "solution"),
        ),
        _parse_prompt_completion,
        optional=_BESIDE,
    ),
    RowFormat("alpaca", (("instruction", "output"),), _parse_alpaca, optional=("input", "history", *_BESIDE)),
    RowFormat("text", (("text",),), _parse_text),
)
"""Row formats in the order `auto` tries them: what says most about a sample first."""

PROMPT_FORMATS = (
    RowFormat("messages", (("messages",),), _unanswered_chats("messages"), optional=_BESIDE),
    RowFormat("sharegpt", (("conversations",),), _unanswered_chats("conversations", _SHAREGPT_ROLES), optional=_BESIDE),
    RowFormat("prompt_completion", (("prompt",), ("question",), ("problem",)), _prompt_of_prompt, optional=_BESIDE),
    RowFormat("alpaca", (("instruction",),), _prompt_of_alpaca, optional=("input", "history", *_BESIDE)),
    RowFormat("text", (("text",),), _parse_text),
)
"""The same for rows of which only the prompt is read, because the teacher answers it."""
