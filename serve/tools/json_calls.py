"""Incremental parser for calls written as JSON objects, `{"name": ..., "arguments": {...}}`.

A reader is a generator that yields when it needs more text. If it finds no call, its caller must reset the position; if
it has begun a call, it stops before text that does not belong to the call. Arguments are passed on unchanged, so that
the client sees a model's mistakes in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

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
        """Append new text."""
        self._text += text

    def since(self, start: int) -> str:
        """Return the text from `start` to the current position."""
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
        """Skip whitespace."""
        while (yield from self.peek()).isspace():
            self.at += 1


ARGUMENTS = ("arguments", "parameters")
"""Keys that families use for arguments."""
_OUTSIDE_STRINGS = frozenset("{}[],:+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Calls(Protocol):
    """Receiver of calls as they are read."""

    def knows(self, name: str) -> bool:
        """Whether there is a tool with this name."""
        ...

    def begin(self, name: str) -> None:
        """Begin a call."""
        ...

    def argue(self, text: str) -> None:
        """Append to the arguments of the newest call."""
        ...


def read_call(text: GrowingText, calls: Calls) -> Reading[bool]:
    """Read one object. Returns whether a call has begun in it."""
    if not (yield from text.skip("{")):
        return False
    reader = _CallReader(text, calls)
    yield from reader.read()
    return reader.begun


def read_calls(text: GrowingText, calls: Calls) -> Reading[bool]:
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


def read_arguments(text: GrowingText, calls: Calls, name: str) -> Reading[bool]:
    """Read a call's arguments, an object, as far as they are JSON. Returns whether a call has begun."""
    if (yield from text.peek()) != "{":
        return False
    calls.begin(name)
    yield from _copy_value(text, calls.argue)
    return True


class _CallReader:
    """Reads a call after its opening brace."""

    def __init__(self, text: GrowingText, calls: Calls) -> None:
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
