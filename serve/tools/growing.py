"""A text that is read while it grows. A reader is a generator that yields where it needs more of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads on whenever there is more text, and returns what it has read."""


class GrowingText:
    """Text so far, and the place up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self.at = 0
        self.ended = False
        """Nothing follows."""

    def grow(self, text: str) -> None:
        """Append what has come."""
        self._text += text

    def since(self, start: int) -> str:
        """The text from `start` to the present place."""
        return self._text[start : self.at]

    @property
    def unread(self) -> str:
        return self._text[self.at :]

    def peek(self) -> Reading[str]:
        """The next character, empty at the end."""
        while self.at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at]

    def skip(self, literal: str) -> Reading[bool]:
        """Pass over `literal` if it comes next; else stay. No more is waited for than tells it apart."""
        start = self.at
        for character in literal:
            if (yield from self.peek()) != character:
                self.at = start
                return False
            self.at += 1
        return True

    def skip_space(self) -> Reading[None]:
        """Pass over whitespace."""
        while (yield from self.peek()).isspace():
            self.at += 1
