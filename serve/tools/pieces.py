"""Parts of an answer in which tools may be called: text, and calls that grow. Knows no format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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
    """A call as far as it has come."""

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
