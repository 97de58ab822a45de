"""Normalize messages of any convention to the form that chat templates read; the same for rows, uploads, evaluation and
served requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swiftkv_platform.specs.base import MAX_SCHEMA_DEPTH

Message = dict[str, Any]
"""`role`, `content` (str; None for a call without text) and other keys that chat templates read, such as `tool_calls`;
`weight` 0 excludes the message from the loss."""

MAX_MESSAGE_DEPTH = 100
"""Max nesting of lists and objects in a message or a tool."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""Roles by their names in any convention."""
_TOOL_CALL_ROLES = frozenset({"function_call", "tool_call"})
"""Role names of assistant messages whose content is a call as JSON."""
_CONTENT_KEYS = ("content", "value", "text")
_PARSED_KEYS = frozenset({"role", "from", *_CONTENT_KEYS, "weight", "tool_calls", "function_call"})
_TEXT_KEY_BY_PART_TYPE = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key that holds the text of a content part, by the part's type."""


MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of a row or a message with pictures, films or sounds, which are refused unless they are empty."""


class RowError(ValueError):
    """An invalid row or message; the caller adds its location."""


def read_messages(turns: Any, label: str) -> list[Message]:
    """Return messages to train on. `turns`: a list, or a JSON list as text. `label`: its name in error messages.

    Raises `RowError` if it is not a list, or for an unknown role, a turn without content, an assistant turn without
    content and calls, or call arguments that are not an object.
    """
    return _parse_messages(parse_turns(turns, label))


def read_prompt(turns: Any, label: str) -> list[Message]:
    """Return the messages without the assistant's last ones, which are not checked. Raises as `read_messages`."""
    found = parse_turns(turns, label)
    end = next((i for i in range(len(found), 0, -1) if _parse_role(found[i - 1])[1] != "assistant"), 0)
    return _parse_messages(found[:end])


def parse_turns(turns: Any, label: str) -> list[Mapping[str, Any]]:
    """Return the turns without null values. Raises `RowError` if `turns` is neither a list nor a JSON list."""
    if turns is None:
        return []
    found = parse_json(turns, label) if isinstance(turns, str) and turns.lstrip().startswith("[") else turns
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found):
        raise RowError(f"{label} is {format_value(turns)}; a list of messages is accepted")
    return [remove_nulls(turn) for turn in found]


def normalize_messages(turns: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages as chat templates read them; normalized messages stay the same. Calls without an id get one, and
    so do the results that follow them, since some templates write it. Raises `RowError` for content or a call in an
    unknown form."""
    messages = [_normalize_message(turn) for turn in turns]
    unanswered, number = list[str](), 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call["id"] is None:
                call["id"] = f"call{number:05}"
            unanswered.append(call["id"])
            number += 1
        if message["role"] == "tool":
            answered = message.setdefault("tool_call_id", unanswered[0]) if unanswered else message.get("tool_call_id")
            unanswered = [call_id for call_id in unanswered if call_id != answered]
    return messages


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row as chat templates read them; None if there are none. `value`: a list, or JSON of one,
    of functions or tools. Raises `RowError`."""
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    found = parse_json(value, "tools") if isinstance(value, str) else remove_nulls(value)
    tools = [found] if isinstance(found, Mapping) else found
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"tools is {format_value(value)}; a list of functions is accepted")
    return normalize_tools(tools) or None


def normalize_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them. Templates write the keys in this order."""
    return [_normalize_tool(tool) for tool in tools]


def _normalize_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool if "name" in tool else tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    first = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    others = {key: value for key, value in function.items() if key != "type"}
    return {"type": "function", "function": {**first, **others}}


def _normalize_message(turn: Mapping[str, Any]) -> Message:
    name, role = _parse_role(turn)
    content, calls = _parse_content(turn), _parse_calls(turn)
    if content and name in _TOOL_CALL_ROLES:
        calls, content = _normalize_calls(parse_json(content, f"the content of {name}")), None
    others = {key: value for key, value in turn.items() if key not in _PARSED_KEYS and value is not None}
    message = {"role": role, "content": (content or None) if calls else content, **others}
    if calls:
        message["tool_calls"] = calls
    if _parse_weight(turn) == 0:
        message["weight"] = 0
    return message


def _parse_role(turn: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the role name of a turn in lower case (None if it is not text), and the role; an unknown one unchanged."""
    name = turn.get("role") if turn.get("from") is None else turn["from"]
    known = name.lower() if isinstance(name, str) else None
    return known, ROLES.get(known or "", name)


def _parse_messages(turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    for turn in turns:
        if _parse_role(turn)[0] not in ROLES:
            given = turn.get("role") if turn.get("from") is None else turn["from"]
            raise RowError(f"a message has the role {given!r}; {', '.join(ROLES)} are accepted")
    messages = normalize_messages(turns)
    for number, (message, turn) in enumerate(zip(messages, turns, strict=True), start=1):
        if message["role"] in ("system", "developer") and message["content"] is None:
            message["content"] = ""  # as tables write an empty system prompt
        _validate_message(message, f"message {number} (role {_parse_role(turn)[0]})")
    return messages


def _validate_message(message: Message, label: str) -> None:
    calls, is_assistant = message.get("tool_calls"), message["role"] == "assistant"
    for key in MEDIA_KEYS:
        if not is_empty(message.get(key)):
            raise RowError(f"{label} has {key} {format_value(message[key])}; only text is accepted")
    for call in calls or ():
        function = call["function"]
        if not isinstance(function["arguments"], dict):
            raise RowError(
                f"{label} calls {function['name']} with the arguments {function['arguments']!r:.80}; an object, or "
                "JSON of one, is accepted"
            )
    if calls and not is_assistant:
        raise RowError(f"{label} has tool_calls; they are accepted only from the assistant")
    has_text = message["content"] is not None and (not is_assistant or message["content"].strip())
    if not has_text and not calls and not message.get("reasoning_content") and message.get("weight") != 0:
        accepted = "add content or tool_calls, or set weight: 0" if is_assistant else "add content (or value)"
        raise RowError(f"{label} has no text; {accepted}")


def _parse_content(turn: Mapping[str, Any]) -> str | None:
    """Return the text of a message, given as a string or a list of text parts; None if it has none."""
    found = [(key, turn[key]) for key in _CONTENT_KEYS if turn.get(key) is not None]
    if len(found) > 1:
        raise RowError(f"a message has {' and '.join(key for key, _ in found)}; one of them is accepted")
    if not found:
        return None
    key, value = found[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(f"a message's {key} is {format_value(value)}, a {type(value).__name__}; a string is accepted")
    return "".join(map(_parse_text_part, value))


def _parse_text_part(part: Any) -> str:
    key = _TEXT_KEY_BY_PART_TYPE.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RowError(f"a message has the part {part!r:.80}; only text parts are accepted")
    return text


def _parse_calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls, legacy = turn.get("tool_calls"), turn.get("function_call")
    if calls and legacy:
        raise RowError("a message has tool_calls and function_call; one of them is accepted")
    if isinstance(calls, str) and calls.strip():
        calls = parse_json(calls, "tool_calls")
    return _normalize_calls(calls or legacy)


def _normalize_calls(value: Any) -> list[dict[str, Any]]:
    calls = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(calls, list):
        raise RowError(f"tool_calls is {format_value(value)}; a list of calls is accepted")
    return [_normalize_call(call) for call in calls]


def _normalize_call(call: Any) -> dict[str, Any]:
    """Return a call in OpenAI's current form, with arguments as `parse_call_arguments` returns them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowError(f"a call is {call!r:.80}; an object with name and arguments is accepted")
    assert isinstance(function, Mapping)
    arguments = function.get("arguments", function.get("parameters"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": parse_call_arguments(arguments)},
    }


def parse_call_arguments(value: Any) -> Any:
    """Return arguments of a call as templates read them: an object, also from JSON, {} for None and "". Other values,
    such as a model's truncated text, and objects too deep for templates, stay unchanged."""
    if value in (None, ""):
        return {}
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return found if isinstance(found, dict) and not _exceeds_depth(found) else value


def _exceeds_depth(value: Any, max_depth: int = MAX_SCHEMA_DEPTH) -> bool:
    """Whether lists and objects are nested more than `max_depth` deep (default: the limit of templates)."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
    return bool(level)


def _parse_weight(turn: Mapping[str, Any]) -> int:
    """Return 0 if the message is excluded from the loss (`weight` is 0, or `train` or `loss` is false), else 1."""
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise RowError(f"a message has the weight {format_value(weight)}; 0 and 1 are accepted")
    return 0 if weight == 0 or any(turn.get(key) is False for key in ("train", "loss")) else 1


def remove_nulls(value: Any, depth: int = 0) -> Any:
    """Return the value without null keys, which tables add to give all messages the same keys. Raises `RowError` for
    NaN and infinities, and for values nested too deeply."""
    if depth > MAX_MESSAGE_DEPTH:
        raise _make_depth_error()
    if isinstance(value, Mapping):
        return {key: remove_nulls(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [remove_nulls(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"a value is {format_value(value)}, which is not a JSON number; null or a number is accepted")
    return value


def is_empty(value: Any) -> bool:
    """Whether a row has no such value: null, NaN, or an empty text, list or object, which may be JSON as in CSV."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]", "{}")
    return value is None or (isinstance(value, list | dict) and not value) or value != value


def format_value(value: Any) -> str:
    """Return a value as text for error messages, with NaN and infinities as in JSON files."""
    return json.dumps(value) if isinstance(value, float) else f"{value!r:.80}"


def parse_json(text: str, label: str) -> Any:
    """Parse JSON. Raises `RowError`, also for NaN, infinities, numbers that are too large, and deep nesting."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}, which is not valid JSON")

    def parse_float(number: str) -> float:
        if math.isinf(found := float(number)):
            raise ValueError(f"it has {number:.40}, which is too large; use a number below 1.8e308")
        return found

    try:
        found = json.loads(text, parse_constant=refuse, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{label} is {text!r:.80}, which is not JSON: {error}") from error
    if _exceeds_depth(found, MAX_MESSAGE_DEPTH):
        raise _make_depth_error()
    return found


def _make_depth_error() -> RowError:
    return RowError(f"a message or tool has lists and objects more than {MAX_MESSAGE_DEPTH} deep; use fewer")
