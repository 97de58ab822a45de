"""Normalize messages of any convention to the form that chat templates read. Rows, uploads, evaluation and served
requests follow the same rules. Knows no row, no template and no route.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swiftkv_platform.specs.base import MAX_SCHEMA_DEPTH

Message = dict[str, Any]
"""`role`, `content` (str; None for a call without text) and other keys that chat templates read, such as `tool_calls`;
`weight` is 0 if the loss leaves the message out."""

MAX_DEPTH = 100
"""Most nested lists and objects in a message or a tool."""

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
_CALLS = frozenset({"function_call", "tool_call"})
"""Role names of an assistant's turn whose content is a call as JSON."""
_CONTENTS = ("content", "value", "text")
_READ = frozenset({"role", "from", *_CONTENTS, "weight", "tool_calls", "function_call"})
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key that holds the text of a content part, by the part's type."""


class RowError(ValueError):
    """A row or message that cannot be read; the caller adds its place."""


def read_messages(turns: Any, what: str) -> list[Message]:
    """Return messages to train on. `turns`: a list, or a JSON list as text. `what`: its name in error messages.

    Raises `RowError` if it is not a list, or for an unknown role, a turn without content, an assistant turn without
    content and calls, or call arguments that are not an object.
    """
    return _checked(turns_of(turns, what))


def read_prompt(turns: Any, what: str) -> list[Message]:
    """Return the messages up to the last one that is not the assistant's; answers after it are not checked. Raises as
    `read_messages`."""
    found = turns_of(turns, what)
    end = next((i for i in range(len(found), 0, -1) if _role_of(found[i - 1])[1] != "assistant"), 0)
    return _checked(found[:end])


def turns_of(turns: Any, what: str) -> list[Mapping[str, Any]]:
    """Return the turns unchanged except for null values. Raises `RowError` if `turns` is neither a list nor JSON of
    one."""
    if turns is None:
        return []
    found = parse_json(turns, what) if isinstance(turns, str) and turns.lstrip().startswith("[") else turns
    if not isinstance(found, list) or not all(isinstance(turn, Mapping) for turn in found):
        raise RowError(f"{what} is {shown(turns)}; a list of messages is accepted")
    return [without_nulls(turn) for turn in found]


def template_messages(turns: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages as chat templates read them; those in this form already stay the same. Calls without an id get
    one, and so do the results that follow them, since some templates write it. Raises `RowError` for content or a call
    in an unknown form."""
    messages = [_message(turn) for turn in turns]
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
    found = parse_json(value, "tools") if isinstance(value, str) else without_nulls(value)
    tools = [found] if isinstance(found, Mapping) else found
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"tools is {shown(value)}; a list of functions is accepted")
    return template_tools(tools) or None


def template_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as chat templates read them, with keys in a fixed order, in which templates write them."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool if "name" in tool else tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    first = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    others = {key: value for key, value in function.items() if key != "type"}
    return {"type": "function", "function": {**first, **others}}


def _message(turn: Mapping[str, Any]) -> Message:
    name, role = _role_of(turn)
    content, calls = _content(turn), _calls(turn)
    if content and name in _CALLS:
        calls, content = _listed_calls(parse_json(content, f"the content of {name}")), None
    others = {key: value for key, value in turn.items() if key not in _READ and value is not None}
    message = {"role": role, "content": (content or None) if calls else content, **others}
    if calls:
        message["tool_calls"] = calls
    if _weight(turn) == 0:
        message["weight"] = 0
    return message


def _role_of(turn: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the role name of a turn in lower case (None if it is not text), and the role; an unknown one unchanged."""
    name = turn.get("role") if turn.get("from") is None else turn["from"]
    known = name.lower() if isinstance(name, str) else None
    return known, ROLES.get(known or "", name)


def _checked(turns: Sequence[Mapping[str, Any]]) -> list[Message]:
    for turn in turns:
        if _role_of(turn)[0] not in ROLES:
            given = turn.get("role") if turn.get("from") is None else turn["from"]
            raise RowError(f"a message has the role {given!r}; {', '.join(ROLES)} are accepted")
    messages = template_messages(turns)
    for number, (message, turn) in enumerate(zip(messages, turns, strict=True), start=1):
        _check(message, f"message {number}, of the role {_role_of(turn)[0]},")
    return messages


def _check(message: Message, where: str) -> None:
    calls, speaks = message.get("tool_calls"), message["role"] == "assistant"
    for call in calls or ():
        function = call["function"]
        if not isinstance(function["arguments"], dict):
            raise RowError(
                f"{where} calls {function['name']} with the arguments {function['arguments']!r:.80}; an object, or "
                "JSON of one, is accepted"
            )
    if calls and not speaks:
        raise RowError(f"{where} has tool_calls; they are accepted only from the assistant")
    says = message["content"] is not None and (not speaks or message["content"].strip())
    if not says and not calls and not message.get("reasoning_content") and message.get("weight") != 0:
        can = "content or tool_calls are needed, or weight: 0" if speaks else "content (or value) is needed"
        raise RowError(f"{where} has no text; {can}")


def _content(turn: Mapping[str, Any]) -> str | None:
    """Return the text of a message, given as a string or a list of text parts; None if it has none."""
    found = [(key, turn[key]) for key in _CONTENTS if turn.get(key) is not None]
    if len(found) > 1:
        raise RowError(f"a message has {' and '.join(key for key, _ in found)}; one of them is accepted")
    if not found:
        return None
    key, value = found[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(f"a message's {key} is {shown(value)}, a {type(value).__name__}; a string is accepted")
    return "".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    key = _TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
    text = part.get(key) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RowError(f"a message holds the part {part!r:.80}; only text parts are accepted")
    return text


def _calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls, legacy = turn.get("tool_calls"), turn.get("function_call")
    if calls and legacy:
        raise RowError("a message has tool_calls and function_call; one of them is accepted")
    if isinstance(calls, str) and calls.strip():
        calls = parse_json(calls, "tool_calls")
    return _listed_calls(calls or legacy)


def _listed_calls(value: Any) -> list[dict[str, Any]]:
    calls = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(calls, list):
        raise RowError(f"tool_calls is {shown(value)}; a list of calls is accepted")
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    """Return a call in OpenAI's current form, with arguments as `call_arguments` returns them."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RowError(f"a call is {call!r:.80}; an object with name and arguments is accepted")
    assert isinstance(function, Mapping)
    arguments = function.get("arguments", function.get("parameters"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": call_arguments(arguments)},
    }


def call_arguments(value: Any) -> Any:
    """Return arguments of a call as templates take them: an object if they are one, or JSON of one, that templates can
    nest; {} for None and ""; anything else unchanged, such as a model's text that was cut off."""
    if value in (None, ""):
        return {}
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
    return found if isinstance(found, dict) and not _is_deep(found) else value


def _is_deep(value: Any, most: int = MAX_SCHEMA_DEPTH) -> bool:
    """Whether a value has more than `most` nested lists and objects; by default, more than templates can follow."""
    level: list[Any] = [value]
    for _ in range(most):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
    return bool(level)


def _weight(turn: Mapping[str, Any]) -> int:
    """Return 0 if the loss leaves the message out (`weight` is 0, or `train` or `loss` is false), else 1."""
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise RowError(f"a message has the weight {shown(weight)}; 0 and 1 are accepted")
    return 0 if weight == 0 or any(turn.get(key) is False for key in ("train", "loss")) else 1


def without_nulls(value: Any, depth: int = 0) -> Any:
    """Return the value without keys that hold null, which tables add to give every message the same keys. Raises
    `RowError` for NaN and infinities, and for values nested too deeply."""
    if depth > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, Mapping):
        return {key: without_nulls(item, depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"a value is {shown(value)}, which is not a JSON number; null or a number is accepted")
    return value


def shown(value: Any) -> str:
    """Return a value as error messages show it, with NaN and infinities by their names in JSON files."""
    return json.dumps(value) if isinstance(value, float) else f"{value!r:.80}"


def parse_json(text: str, what: str) -> Any:
    """Parse JSON. Raises `RowError`, also for NaN and infinities and for deep nesting."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}, which is not valid JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is {text!r:.80}, which is not JSON: {error}") from error
    if _is_deep(found, MAX_DEPTH):
        raise _too_deep()
    return found


def _too_deep() -> RowError:
    return RowError(f"a message or tool has lists and objects more than {MAX_DEPTH} deep; use fewer")
