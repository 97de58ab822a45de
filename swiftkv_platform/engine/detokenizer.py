"""Tokens to text, one token at a time, and where the text ends. Knows no model and no tokenizer but a `decode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
"""Most bytes of a UTF-8 character, so that at most three bytes wait for a character's last one."""


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
        self.stopped = False
        """A stop string has been found; further tokens are ignored."""

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
            self.stopped = True
            self._decoded = self._decoded[: at + len(stop.text) * self._include_stop]
            self._released = len(self._decoded)
            # What is left of the stop string is shown as it was asked for.
            self._hidden = [(begin, end) for begin, end in self._hidden if end <= at]
            return
        for number, stop in enumerate(self._stop):
            for character in addition:
                self._matched[number] = stop.advance(self._matched[number], character)
        self._released = len(self._decoded) - max(self._matched, default=0)
