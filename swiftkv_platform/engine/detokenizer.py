"""Tokens to text, one token at a time, and where the text ends; texts and bytes of single tokens. Knows no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from swiftkv_platform.model.tokenizers import steps

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
"""Most bytes of a UTF-8 character, so that at most three bytes wait for a character's last one."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class StopString:
    """A stop string, prepared so that a character costs the same however long it is (Knuth, Morris, Pratt). Immutable:
    any number of answers may share it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0] * len(text)
        """Longest shorter beginning that each beginning of the string ends with, by its length minus one."""
        size = 0
        for at in range(1, len(text)):
            size = self.advance(size, text[at])
            self._shorter[at] = size

    def advance(self, size: int, character: str) -> int:
        """Return how much of the string's beginning a text ends with, after one more character; `size` before it, less
        than the whole string."""
        while size and self.text[size] != character:
            size = self._shorter[size - 1]
        return size + (self.text[size] == character)


class IncrementalDetokenizer:
    """Turns tokens into text that never has half a character, and stops before a stop string.

    A decoder looks at neighbours (it drops the first token's leading space, joins bytes to characters), so each token
    is decoded behind those that made the last complete text. `text` only ever grows; what might be the beginning of a
    character or of a stop string is held back until that is known. A token costs the same wherever in the answer it is.

    Args:
        silent: token ids that `decode` leaves out, as it does special ones.
        named: texts of those among them that stop strings name; they are looked for, and not shown.
        min_tokens: tokens behind which stop strings are looked for.
        include_stop: leave the stop string at the end of the text.
        text_of: text of a single token; given, `offsets` are kept.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[StopString | str] = (),
        silent: Set[int] = frozenset(),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        named: Mapping[int, str] | None = None,
        text_of: Callable[[int], str] | None = None,
    ) -> None:
        self._decode = decode
        self._stop = [StopString(one) if isinstance(one, str) else one for one in stop]
        self._matched = [0] * len(self._stop)  # characters at the end of `_decoded` that begin each stop string
        self._silent = silent
        self._named = named or {}
        self._hidden: list[tuple[int, int]] = []  # places in `_decoded` of special tokens, which are not shown
        self._num_hidden = 0  # characters in them
        self._text_of = text_of
        self.offsets: list[int] = []
        """Places in the text at which each token's own text begins; of what continues a character, that of it."""
        self._num_unsearched = min_tokens
        self._include_stop = include_stop
        self._window: list[int] = []  # context and the tokens after it
        self._context_size = 0  # tokens of the window that are context
        self._num_emitted = 0  # characters of the decoded window that are in `_decoded`
        self._decoded = ""
        self._released = 0  # characters of `_decoded` that cannot belong to a stop string
        self.stop_string: str | None = None
        """The stop string that has been found."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found; further tokens are ignored."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """Text that may be shown."""
        shown, start = "", 0
        for begin, end in self._hidden:
            shown += self._decoded[start : min(begin, self._released)]
            start = end
        return shown + self._decoded[start : self._released]

    def append(self, token_id: int) -> None:
        """Take the next token of the answer."""
        if self._text_of is None:
            self._append(token_id)
            return
        before = self._num_shown
        self._append(token_id)
        # What waited for this token is before it, so its place is counted from the end.
        whole = not self._is_waiting and not self.stopped and token_id not in self._silent
        self.offsets.append(max(before, self._num_shown - len(self._text_of(token_id))) if whole else before)

    def append_end(self, token_id: int) -> None:
        """Take the token that ended the answer, which is no text of it; a stop string may name it."""
        if token_id in self._named or self._include_stop:
            self.append(token_id)
        elif self._text_of is not None:
            self.offsets.append(self._num_shown)

    @property
    def _num_shown(self) -> int:
        """Characters of the text, those included that are held back."""
        return len(self._decoded) - self._num_hidden

    @property
    def _is_waiting(self) -> bool:
        """Whether the last tokens are not a whole character yet."""
        return len(self._window) > self._context_size

    def _append(self, token_id: int) -> None:
        if self.stopped:
            return
        self._num_unsearched -= 1
        if token_id in self._named:
            self._hidden.append((len(self._decoded), len(self._decoded) + len(self._named[token_id])))
            self._num_hidden += len(self._named[token_id])
            self._extend(self._named[token_id])
        if token_id in self._silent:
            return
        self._window.append(token_id)
        window_text = self._decode(self._window)
        complete = len(window_text) - self._num_pending(window_text)
        if complete <= self._num_emitted:
            return
        self._extend(window_text[self._num_emitted : complete])
        self._num_emitted = complete
        if complete == len(window_text):
            self._slide()

    def finish(self) -> None:
        """Release what was held back, as no token follows. An unfinished character becomes U+FFFD, as in `decode`."""
        if self.stopped:
            return
        self._extend(self._decode(self._window)[self._num_emitted :])
        if not self.stopped:
            self._released = len(self._decoded)

    def _num_pending(self, window_text: str) -> int:
        """Characters at the window's end that the next byte may turn into others.

        SentencePiece decodes a whole run of bytes to U+FFFD while its last character is incomplete, so all of them
        count, until there are more tokens than a character can have.
        """
        trailing = len(window_text) - len(window_text.rstrip(REPLACEMENT))
        num_tokens = len(self._window) - self._context_size
        return trailing if num_tokens < MAX_CHARACTER_BYTES else min(trailing, MAX_CHARACTER_BYTES - 1)

    def _slide(self) -> None:
        """Make the tokens behind the context, which now are whole characters, the new context."""
        self._window = self._window[self._context_size :]
        self._context_size = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _extend(self, addition: str) -> None:
        """Add text and look for the first stop string; one may have begun in what was held back."""
        start = self._released
        self._decoded += addition
        if self._num_unsearched >= 0:
            self._released = len(self._decoded)
            return
        found = [(at, stop) for stop in self._stop if (at := self._decoded.find(stop.text, start)) >= 0]
        if found:
            at, stop = min(found, key=lambda one: (one[0], len(one[1].text)))
            self.stop_string = stop.text
            self._decoded = self._decoded[: at + len(stop.text) * self._include_stop]
            self._released = len(self._decoded)
            # What is left of the stop string is shown as it was asked for.
            self._hidden = [(begin, end) for begin, end in self._hidden if end <= at]
            return
        for number, stop in enumerate(self._stop):
            for character in addition:
                self._matched[number] = stop.advance(self._matched[number], character)
        self._released = len(self._decoded) - max(self._matched, default=0)


class Vocabulary:
    """Texts and bytes of one tokenizer's tokens, from the vocabulary itself; without a tokenizer a token is its number.

    A decoder looks at neighbours: alone it makes U+FFFD of a part of a character, and drops a leading space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added: dict[int, str] = {}
        self._steps: dict[str, Any] = {}
        if getattr(tokenizer, "is_fast", False):
            backend = tokenizer.backend_tokenizer
            self._added = {one: token.content for one, token in backend.get_added_tokens_decoder().items()}
            self._steps = {step["type"]: step for step in steps(backend.decoder)}
        is_byte_level = "ByteLevel" in self._steps or hasattr(tokenizer, "byte_decoder")
        self._byte_level = _byte_level() if is_byte_level else {}

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to a text, of which a character may be spread over several tokens. Empty for
        an id that the tokenizer does not have."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._bytes_of(token_id)
        return found

    def text_of(self, token_id: int) -> str:
        r"""Text of the token; `bytes:\xe2\x82`, as OpenAI writes it, where its bytes are no text by themselves."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return str(token_id).encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(self._byte_level.get(character) or character.encode() for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if "WordPiece" in self._steps or "BPEDecoder" in self._steps or "CTC" in self._steps:
            return self._decoded(token_id)
        if "▁" in piece:  # SentencePiece's space
            return piece.replace("▁", " ").encode()
        return self._decoded(token_id) if not self._steps else piece.encode()

    def _decoded(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.encode()


def _byte_level() -> dict[str, bytes]:
    """Bytes by the characters that stand for them in byte-level vocabularies: printable ones for themselves, the others
    in order from U+0100 on."""
    alphabet = ByteLevel.alphabet()
    printable = {ord(character) for character in alphabet if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + at): bytes([byte]) for at, byte in enumerate(others)
    }
