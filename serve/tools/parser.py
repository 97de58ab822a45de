"""Incremental parser that splits answers into text and tool calls. Subclasses implement the families' formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar

from swiftkv_platform.serve.tools.json_calls import GrowingText, Reading


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
        """Append the next pieces."""
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
        """Whether there is a tool with this name."""
        return name in self._names

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._flush()
        self._space = ""
        self._pieces.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """Append to the arguments of the newest call."""
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
