"""Answers to text and calls, while they are written. A family's format is a subclass's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import ClassVar

from swiftkv_platform.serve.tools.json_calls import GrowingText, Reading


@dataclass(frozen=True)
class Text:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Name of a call; its arguments follow."""

    index: int
    """Number of the call within the answer."""
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, which together are JSON."""

    index: int
    text: str


Piece = Text | CallBegin | Arguments


@dataclass
class Call:
    """Tool call, as far as it has been parsed."""

    name: str
    arguments: str = ""


@dataclass
class Assembled:
    """An answer put together from its pieces."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take the next pieces."""
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, CallBegin):
                self.calls.append(Call(piece.name))
            else:
                self.calls[piece.index].arguments += piece.text


class ToolCallParser(ABC):
    """Takes one answer as it grows.

    Pieces put together are the same however the answer was cut. What looks like a call and is none, the name of no tool
    among it, stays text; whitespace around calls is left out, and so are the markers. A beginning of a marker is held
    back until it is known to be one.

    Args:
        names: of the tools that may be called.
    """

    marker: ClassVar[str]
    """Text behind which calls may stand."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._text = GrowingText()
        self._pieces: list[Piece] = []
        self._space = ""
        """Whitespace that is text unless a call, or the end behind one, follows."""
        self._arguments: list[str] = []
        """Arguments of the newest call that are no piece yet."""
        self.num_calls = 0
        self._reading = self._read()

    def feed(self, text: str) -> list[Piece]:
        """Return what follows from more text."""
        self._text.grow(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """Return what was held back; no text follows."""
        self._text.ended = True
        return self._advance()

    def knows(self, name: str) -> bool:
        """Whether there is such a tool."""
        return name in self._names

    def begin(self, name: str) -> None:
        """A call begins."""
        self._flush()
        self._space = ""
        self._pieces.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the newest call."""
        self._arguments.append(text)

    @abstractmethod
    def _read_calls(self) -> Reading[bool]:
        """Read what stands behind the marker; whether calls do. If not, the reader may stay anywhere."""

    def _read_opening(self) -> Reading[None]:
        """Read calls at the beginning of an answer that have no marker."""
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
        """Hand on text up to the marker; whether there is one."""
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
        """Hand on text, the whitespace at its end apart."""
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
        """Pass over a closing marker, cut off by the end or not; what is none stays."""
        start = self._text.at
        yield from self._text.skip_space()
        if (yield from self._text.skip(marker)):
            return
        if self._text.ended and marker.startswith(self._text.unread):
            self._text.at += len(self._text.unread)
            return
        self._text.at = start


def _num_begun(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
