"""Incremental parser that splits answers into text and tool calls. Subclasses implement the families' formats.

Most formats write calls as JSON objects, `{"name": ..., "arguments": {...}}`. A reader is a generator that yields when
it needs more text. If it finds no call, its caller must reset the position; if it has begun a call, it stops before
text that does not belong to the call. Arguments are passed on unchanged, so that the client sees a model's mistakes in
them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Generator that is resumed when there is more text, and returns its result."""


class GrowingText:
    """The text so far, and the position up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self.at = 0
        self.ended = False
        """Whether the text is complete."""

    def grow(self, text: str) -> None:
        self._text += text

    def since(self, start: int) -> str:
        return self._text[start : self.at]

    @property
    def unread(self) -> str:
        return self._text[self.at :]

    def peek(self) -> Reading[str]:
        """Return the next character; "" at the end."""
        while self.at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at]

    def skip(self, literal: str) -> Reading[bool]:
        """Skip `literal` if it comes next, and return whether it did. Waits only until a character differs."""
        start = self.at
        for character in literal:
            if (yield from self.peek()) != character:
                self.at = start
                return False
            self.at += 1
        return True

    def skip_space(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self.at += 1


ARGUMENTS = ("arguments", "parameters")
"""Keys that families use for arguments."""
_OUTSIDE_STRINGS = frozenset("{}[],:+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def read_call(text: GrowingText, calls: ToolCallParser) -> Reading[bool]:
    """Read one object. Returns whether a call has begun in it."""
    if not (yield from text.skip("{")):
        return False
    reader = _CallReader(text, calls)
    yield from reader.read()
    return reader.begun


def read_calls(text: GrowingText, calls: ToolCallParser) -> Reading[bool]:
    """Read a list of such objects. Returns whether a call has begun or the list is empty."""
    if not (yield from text.skip("[")):
        return False
    yield from text.skip_space()
    if (yield from text.skip("]")):
        return True
    if not (yield from read_call(text, calls)):
        return False
    while True:
        start = text.at
        yield from text.skip_space()
        if (yield from text.skip("]")):
            return True
        if (yield from text.skip(",")):
            yield from text.skip_space()
            if (yield from read_call(text, calls)):
                continue
        text.at = start
        return True


def read_arguments(text: GrowingText, calls: ToolCallParser, name: str) -> Reading[bool]:
    """Read a call's arguments, an object, as far as they are JSON. Returns whether a call has begun."""
    if (yield from text.peek()) != "{":
        return False
    calls.begin(name)
    yield from _copy_value(text, calls.argue)
    return True


class _CallReader:
    """Reads a call after its opening brace."""

    def __init__(self, text: GrowingText, calls: ToolCallParser) -> None:
        self._text = text
        self._calls = calls
        self._name: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._end = text.at
        self.begun = False

    def read(self) -> Reading[None]:
        """Read members and the closing brace, and stop after the last one that is valid."""
        text = self._text
        while (yield from self._read_member()):
            self._end = text.at
            yield from text.skip_space()
            if (yield from text.skip("}")):
                if self._name is not None and not self.begun:
                    self._begin("{}")
                return
            if not (yield from text.skip(",")):
                break
        text.at = self._end

    def _read_member(self) -> Reading[bool]:
        """Read a member. Returns whether it is complete and allowed in a call."""
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
        if key in ARGUMENTS and self._arguments is None and not self.begun:
            return (yield from self._read_arguments())
        return (yield from _copy_value(text, lambda _: None))

    def _read_name(self) -> Reading[bool]:
        name = yield from _read_string(self._text)
        if name is None or not self._calls.knows(name):
            return False
        self._name = name
        if self._arguments is not None:
            self._begin(self._arguments)
        return True

    def _read_arguments(self) -> Reading[bool]:
        first = yield from self._text.peek()
        if first == "{" and self._name is not None:
            self._calls.begin(self._name)
            self.begun = True
            whole = yield from _copy_value(self._text, self._calls.argue)
            self._end = self._text.at
            return whole
        if first == '"':  # some models write the object as a JSON string
            arguments = yield from _read_string(self._text)
        else:
            written: list[str] = []
            whole = yield from _copy_value(self._text, written.append)
            arguments = "".join(written) if whole else None
            arguments = "{}" if arguments == "null" else arguments
        if arguments is None or not arguments.lstrip().startswith("{"):
            return False
        if self._name is None:
            self._arguments = arguments
        else:
            self._begin(arguments)
        return True

    def _begin(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name before it begins"
        self._calls.begin(self._name)
        self._calls.argue(arguments)
        self.begun = True


def _read_string(text: GrowingText) -> Reading[str | None]:
    """Read a string. Returns None if there is none, or it is not valid or cannot be encoded."""
    start = text.at
    if (yield from text.peek()) != '"' or not (yield from _copy_string(text, lambda _: None)):
        return None
    try:
        value: str = json.loads(text.since(start), strict=False)
        value.encode()
    except ValueError:  # includes UnicodeEncodeError, for a lone surrogate
        return None
    return value


def _copy_string(text: GrowingText, put: Callable[[str], None]) -> Reading[bool]:
    """Pass on a string with its quotes. Returns whether it is closed."""
    escaped = True  # the opening quote does not close the string
    while character := (yield from text.peek()):
        text.at += 1
        put(character)
        if character == '"' and not escaped:
            return True
        escaped = character == "\\" and not escaped
    return False


def _copy_value(text: GrowingText, put: Callable[[str], None]) -> Reading[bool]:
    """Pass on a value, as far as its characters may be JSON and its brackets are open. Returns whether it is
    complete."""
    depth, size = 0, 0
    while character := (yield from text.peek()):
        if character == '"':
            if not (yield from _copy_string(text, put)):
                return False
            size += 1
            if depth == 0:
                return True
            continue
        if depth == 0 and size and (character in ",}]" or character.isspace()):
            return True  # the end of a number or of true, false or null
        if character not in _OUTSIDE_STRINGS or (depth == 0 and character in ",}]:"):
            return False
        text.at += 1
        put(character)
        size += 1
        depth += (character in "{[") - (character in "}]")
        if depth == 0 and character in "}]":
            return True
    return False


@dataclass(frozen=True)
class Text:
    """Text of the answer outside calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Beginning of a call, with its name; its arguments follow."""

    index: int
    """Number of the call within the answer."""
    name: str


@dataclass(frozen=True)
class Arguments:
    """Next part of a call's arguments; all parts together are JSON."""

    index: int
    text: str


Piece = Text | CallBegin | Arguments


@dataclass
class Call:
    """Tool call as parsed so far."""

    name: str
    arguments: str = ""


@dataclass
class Assembled:
    """An answer assembled from its pieces."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, CallBegin):
                self.calls.append(Call(piece.name))
            else:
                self.calls[piece.index].arguments += piece.text


class ToolCallParser(ABC):
    """Parses one answer as it grows.

    The result does not depend on how the answer is split into pieces. Text that looks like a call but is not one, such
    as with the name of an unknown tool, stays text. Markers and whitespace around calls are dropped. A possible
    beginning of a marker is held back until it is decided.

    Args:
        names: names of the tools that may be called.
    """

    marker: ClassVar[str]
    """Text after which calls may follow."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._text = GrowingText()
        self._pieces: list[Piece] = []
        self._space = ""
        """Held-back whitespace; dropped if a call, or the end of an answer with calls, follows."""
        self._arguments: list[str] = []
        """Arguments of the newest call that were not returned as a piece yet."""
        self.num_calls = 0
        self._reading = self._read()

    def feed(self, text: str) -> list[Piece]:
        """Append text, and return the new pieces."""
        self._text.grow(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """End the answer, and return the pieces that were held back."""
        self._text.ended = True
        return self._advance()

    def knows(self, name: str) -> bool:
        return name in self._names

    def begin(self, name: str) -> None:
        self._flush()
        self._space = ""
        self._pieces.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        self._arguments.append(text)

    @abstractmethod
    def _read_calls(self) -> Reading[bool]:
        """Read calls after the marker. Returns whether there are any; if not, the position may be anywhere."""

    def _read_opening(self) -> Reading[None]:
        """Read calls without marker at the beginning of an answer."""
        yield from ()

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Reading[None]:
        yield from self._read_opening()
        while (yield from self._read_text()):
            self._text.at += len(self.marker)
            start = self._text.at
            if not (yield from self._read_calls()):
                self._text.at = start
                self._say(self.marker)
        if self._space and not self.num_calls:
            self._pieces.append(Text(self._space))

    def _read_text(self) -> Reading[bool]:
        """Pass on text up to the marker. Returns whether there is one."""
        text = self._text
        while True:
            said, marker, _ = text.unread.partition(self.marker)
            if marker or text.ended:
                self._pass(said)
                return bool(marker)
            self._pass(said[: len(said) - _num_begun(said, self.marker)])
            yield

    def _pass(self, text: str) -> None:
        self._text.at += len(text)
        self._say(text)

    def _say(self, text: str) -> None:
        """Pass on text, holding back whitespace at its end."""
        self._flush()
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._pieces.append(Text(said))

    def _flush(self) -> None:
        if self._arguments:
            self._pieces.append(Arguments(self.num_calls - 1, "".join(self._arguments)))
            self._arguments = []

    def _skip_closing(self, marker: str) -> Reading[None]:
        """Skip a closing marker, even if cut off by the end of the text; other text is not skipped."""
        start = self._text.at
        yield from self._text.skip_space()
        if (yield from self._text.skip(marker)):
            return
        if self._text.ended and marker.startswith(self._text.unread):
            self._text.at += len(self._text.unread)
            return
        self._text.at = start


def _num_begun(text: str, marker: str) -> int:
    """Return the number of characters at the end of `text` that begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
