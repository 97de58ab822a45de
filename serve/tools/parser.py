"""Incremental parser that splits completions into text and tool calls. Subclasses implement the families' formats.

Most formats write calls as JSON objects, `{"name": ..., "arguments": {...}}`. A parsing function is a generator that
yields when it needs more text. If it finds no call, its caller resets the position. After a call it stops before text
that is not part of the call. Arguments are passed on unchanged, so that clients see a model's mistakes in them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

T = TypeVar("T")
Parsing = Generator[None, None, T]
"""Generator that is resumed when there is more text, and returns its result."""


class TextBuffer:
    def __init__(self) -> None:
        self._text = ""
        self.position = 0
        self.is_complete = False
        """Whether the text is complete."""

    def append(self, text: str) -> None:
        self._text += text

    def read_since(self, start: int) -> str:
        return self._text[start : self.position]

    @property
    def remaining_text(self) -> str:
        return self._text[self.position :]

    def peek(self) -> Parsing[str]:
        """Return the next character; "" at the end."""
        while self.position >= len(self._text):
            if self.is_complete:
                return ""
            yield
        return self._text[self.position]

    def skip(self, literal: str) -> Parsing[bool]:
        """Skip `literal` if it comes next, and return whether it did. Waits only until a character differs."""
        start = self.position
        for character in literal:
            if (yield from self.peek()) != character:
                self.position = start
                return False
            self.position += 1
        return True

    def skip_space(self) -> Parsing[None]:
        while (yield from self.peek()).isspace():
            self.position += 1


ARGUMENTS = ("arguments", "parameters")
_JSON_SYNTAX_CHARACTERS = frozenset("{}[],:+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def read_call(text: TextBuffer, parser: ToolCallParser) -> Parsing[bool]:
    """Read an object. Returns whether it contains a call."""
    if not (yield from text.skip("{")):
        return False
    reader = _CallReader(text, parser)
    yield from reader.read()
    return reader.has_begun


def read_calls(text: TextBuffer, parser: ToolCallParser) -> Parsing[bool]:
    """Read a list of objects. Returns whether it contains a call or is empty."""
    if not (yield from text.skip("[")):
        return False
    yield from text.skip_space()
    if (yield from text.skip("]")):
        return True
    if not (yield from read_call(text, parser)):
        return False
    while True:
        start = text.position
        yield from text.skip_space()
        if (yield from text.skip("]")):
            return True
        if (yield from text.skip(",")):
            yield from text.skip_space()
            if (yield from read_call(text, parser)):
                continue
        text.position = start
        return True


def read_arguments(text: TextBuffer, parser: ToolCallParser, name: str) -> Parsing[bool]:
    """Read a call's arguments, an object, as far as they are JSON. Returns whether there are any."""
    if (yield from text.peek()) != "{":
        return False
    parser.begin_call(name)
    yield from _copy_value(text, parser.add_arguments)
    return True


class _CallReader:
    def __init__(self, text: TextBuffer, parser: ToolCallParser) -> None:
        self._text = text
        self._parser = parser
        self._name: str | None = None
        self._arguments: str | None = None
        self._end = text.position
        self.has_begun = False

    def read(self) -> Parsing[None]:
        """Read members and the closing brace. Stops after the last valid member."""
        text = self._text
        while (yield from self._read_member()):
            self._end = text.position
            yield from text.skip_space()
            if (yield from text.skip("}")):
                if self._name is not None and not self.has_begun:
                    self._begin_call("{}")
                return
            if not (yield from text.skip(",")):
                break
        text.position = self._end

    def _read_member(self) -> Parsing[bool]:
        """Read a member. Returns whether it is complete and valid in a call."""
        text = self._text
        yield from text.skip_space()
        key = yield from _read_string(text)
        if key is None:
            return False
        yield from text.skip_space()
        if not (yield from text.skip(":")):
            return False
        yield from text.skip_space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in ARGUMENTS and self._arguments is None and not self.has_begun:
            return (yield from self._read_arguments())
        return (yield from _copy_value(text, lambda _: None))

    def _read_name(self) -> Parsing[bool]:
        name = yield from _read_string(self._text)
        if name is None or not self._parser.is_tool(name):
            return False
        self._name = name
        if self._arguments is not None:
            self._begin_call(self._arguments)
        return True

    def _read_arguments(self) -> Parsing[bool]:
        first = yield from self._text.peek()
        if first == "{" and self._name is not None:
            self._parser.begin_call(self._name)
            self.has_begun = True
            is_complete = yield from _copy_value(self._text, self._parser.add_arguments)
            self._end = self._text.position
            return is_complete
        if first == '"':  # some models write the object as a JSON string
            arguments = yield from _read_string(self._text)
        else:
            parts: list[str] = []
            is_complete = yield from _copy_value(self._text, parts.append)
            arguments = "".join(parts) if is_complete else None
            arguments = "{}" if arguments == "null" else arguments
        if arguments is None or not arguments.lstrip().startswith("{"):
            return False
        if self._name is None:
            self._arguments = arguments
        else:
            self._begin_call(arguments)
        return True

    def _begin_call(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name before it begins"
        self._parser.begin_call(self._name)
        self._parser.add_arguments(arguments)
        self.has_begun = True


def _read_string(text: TextBuffer) -> Parsing[str | None]:
    """Read a string. Returns None if it is missing or invalid, or cannot be encoded."""
    start = text.position
    if (yield from text.peek()) != '"' or not (yield from _copy_string(text, lambda _: None)):
        return None
    try:
        value: str = json.loads(text.read_since(start), strict=False)
        value.encode()
    except ValueError:  # includes UnicodeEncodeError, for a lone surrogate
        return None
    return value


def _copy_string(text: TextBuffer, emit: Callable[[str], None]) -> Parsing[bool]:
    """Emit a string with its quotes. Returns whether it is closed."""
    escaped = True  # the opening quote does not close the string
    while character := (yield from text.peek()):
        text.position += 1
        emit(character)
        if character == '"' and not escaped:
            return True
        escaped = character == "\\" and not escaped
    return False


def _copy_value(text: TextBuffer, emit: Callable[[str], None]) -> Parsing[bool]:
    """Emit a value up to its end or its first invalid character. Returns whether it is complete."""
    depth, size = 0, 0
    while character := (yield from text.peek()):
        if character == '"':
            if not (yield from _copy_string(text, emit)):
                return False
            size += 1
            if depth == 0:
                return True
            continue
        if depth == 0 and size and (character in ",}]" or character.isspace()):
            return True  # the end of a number or of true, false or null
        if character not in _JSON_SYNTAX_CHARACTERS or (depth == 0 and character in ",}]:"):
            return False
        text.position += 1
        emit(character)
        size += 1
        depth += (character in "{[") - (character in "}]")
        if depth == 0 and character in "}]":
            return True
    return False


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class NewCall:
    index: int
    name: str


@dataclass(frozen=True)
class CallDelta:
    """Next part of a call's arguments, as JSON text."""

    index: int
    text: str


Delta = TextDelta | NewCall | CallDelta


@dataclass
class ParsedCall:
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """Text and calls of a completion, as far as it is parsed."""

    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add_deltas(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self.text += delta.text
            elif isinstance(delta, NewCall):
                self.calls.append(ParsedCall(delta.name))
            else:
                self.calls[delta.index].arguments += delta.text


class ToolCallParser(ABC):
    """Parses a completion as it grows.

    The result does not depend on how the completion is split. A call of an unknown tool stays text. Markers and
    whitespace around calls are dropped. A possible beginning of a marker is held back until more text decides.

    Args:
        names: names of the callable tools.
    """

    marker: ClassVar[str]
    """Text after which calls may follow."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._text = TextBuffer()
        self._deltas: list[Delta] = []
        self._space = ""
        """Held-back whitespace; dropped before a call, and at the end of a completion with calls."""
        self._arguments: list[str] = []
        """Arguments of the last call that are not in a delta yet."""
        self.num_calls = 0
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Delta]:
        """Append text, and return the new deltas."""
        self._text.append(text)
        return self._parse_appended()

    def finish(self) -> list[Delta]:
        """End the completion, and return the last deltas."""
        self._text.is_complete = True
        return self._parse_appended()

    def is_tool(self, name: str) -> bool:
        return name in self._names

    def begin_call(self, name: str) -> None:
        self._flush_arguments()
        self._space = ""
        self._deltas.append(NewCall(self.num_calls, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        self._arguments.append(text)

    @abstractmethod
    def _read_calls(self) -> Parsing[bool]:
        """Read calls after the marker. Returns whether there are any; else the position is undefined."""

    def _read_opening(self) -> Parsing[None]:
        """Read calls without marker at the beginning of the completion."""
        yield from ()

    def _parse_appended(self) -> list[Delta]:
        next(self._parsing, None)
        self._flush_arguments()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _parse(self) -> Parsing[None]:
        yield from self._read_opening()
        while (yield from self._read_text()):
            self._text.position += len(self.marker)
            start = self._text.position
            if not (yield from self._read_calls()):
                self._text.position = start
                self._emit_text(self.marker)
        if self._space and not self.num_calls:
            self._deltas.append(TextDelta(self._space))

    def _read_text(self) -> Parsing[bool]:
        """Emit text up to the marker. Returns whether there is a marker."""
        text = self._text
        while True:
            visible, marker, _ = text.remaining_text.partition(self.marker)
            if marker or text.is_complete:
                self._emit_and_skip(visible)
                return bool(marker)
            self._emit_and_skip(visible[: len(visible) - _count_marker_prefix(visible, self.marker)])
            yield

    def _emit_and_skip(self, text: str) -> None:
        self._text.position += len(text)
        self._emit_text(text)

    def _emit_text(self, text: str) -> None:
        """Emit text without trailing whitespace, which is emitted with the next text."""
        self._flush_arguments()
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if visible:
            self._deltas.append(TextDelta(visible))

    def _flush_arguments(self) -> None:
        if self._arguments:
            self._deltas.append(CallDelta(self.num_calls - 1, "".join(self._arguments)))
            self._arguments = []

    def _skip_closing(self, marker: str) -> Parsing[None]:
        """Skip a closing marker, even one that the end of the text cuts off; does not skip other text."""
        start = self._text.position
        yield from self._text.skip_space()
        if (yield from self._text.skip(marker)):
            return
        if self._text.is_complete and marker.startswith(self._text.remaining_text):
            self._text.position += len(self._text.remaining_text)
            return
        self._text.position = start


def _count_marker_prefix(text: str, marker: str) -> int:
    """Return the length of the longest marker prefix at the end of `text`."""
    max_length = min(len(text), len(marker) - 1)
    return next((size for size in range(max_length, 0, -1) if text.endswith(marker[:size])), 0)
