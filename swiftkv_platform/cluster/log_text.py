"""Logs as programs print them, made into text piece by piece: one form, whichever way of Ray's they came."""

from __future__ import annotations

import codecs
import io

from swiftkv_platform.redaction import StreamRedactor


class LogText:
    """Bytes or text in, UTF-8 out: ends of lines are `\\n`, and this process's credentials are gone.

    What comes out does not depend on where the pieces ended, so a place in it can be counted in bytes.
    """

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._text = io.IncrementalNewlineDecoder(None, translate=True)
        self._redactor = StreamRedactor()

    def feed(self, piece: bytes | str) -> bytes:
        text = self._text.decode(piece) if isinstance(piece, str) else self._bytes.decode(piece)
        return self._redactor.feed(text).encode(errors="replace")

    def close(self) -> bytes:
        """The end of it."""
        rest = self._bytes.decode(b"", final=True) + self._text.decode("", final=True)
        return (self._redactor.feed(rest) + self._redactor.close()).encode(errors="replace")
