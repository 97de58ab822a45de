"""Choices of OpenAI's shape with the calls in their text told apart. Knows dictionaries and parsers, no engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from swiftkv_platform.serve.tools.calling import ToolCalling
from swiftkv_platform.serve.tools.parser import Arguments, Assembled, CallBegin, Piece, Text, ToolCallParser


def with_calls(choice: dict[str, Any], calling: ToolCalling) -> dict[str, Any]:
    """A whole choice whose message names its calls."""
    parser, answer = calling.parser(), Assembled()
    answer.add(parser.feed(choice["message"]["content"]))
    answer.add(parser.finish())
    if not answer.calls:
        return {**choice, "message": {**choice["message"], "content": answer.text}}
    calls = [
        {
            "id": calling.family.new_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.calls
    ]
    message = {**choice["message"], "content": answer.text or None, "tool_calls": calls}
    return {**choice, "message": message, "finish_reason": _reason(choice, [call.arguments for call in answer.calls])}


class CallStreams:
    """Deltas of a request's choices with the calls in their text told apart."""

    def __init__(self, calling: ToolCalling) -> None:
        self._calling = calling
        self._parsers: dict[int, ToolCallParser] = {}
        self._arguments: dict[int, list[str]] = {}
        """Arguments of each choice's calls, so far."""

    def delta(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The next chunk of a choice; each is taken once, in order."""
        parser = self._parsers.setdefault(choice["index"], self._calling.parser())
        pieces = parser.feed(choice["delta"]["content"])
        if choice["finish_reason"] is not None:
            pieces += parser.finish()
        delta = {name: value for name, value in choice["delta"].items() if name != "content"}
        arguments = self._arguments.setdefault(choice["index"], [])
        for piece in pieces:
            if isinstance(piece, CallBegin):
                arguments.append("")
            elif isinstance(piece, Arguments):
                arguments[piece.index] += piece.text
        return {**choice, "delta": delta | self._added(pieces), "finish_reason": _reason(choice, arguments)}

    def _added(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A delta's content and calls: one entry a call, since clients join deltas by position in the first of them."""
        text, calls = "", dict[int, dict[str, Any]]()
        for piece in pieces:
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, CallBegin):
                function = {"name": piece.name, "arguments": ""}
                new_id = self._calling.family.new_id()
                calls[piece.index] = {"index": piece.index, "id": new_id, "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return ({"content": text} if text else {}) | ({"tool_calls": list(calls.values())} if calls else {})


def _reason(choice: dict[str, Any], arguments: Sequence[str]) -> str | None:
    """The reason of an end: calls, unless the answer was cut off in them, by its length or by a stop."""
    reason: str | None = choice["finish_reason"]
    return "tool_calls" if reason == "stop" and arguments and all(map(_is_object, arguments)) else reason


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
