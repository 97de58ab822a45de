"""Incremental detokenization with stop strings, and texts and bytes of single tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from swiftkv_platform.model.tokenizers import list_tokenizer_steps

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_CHARACTER_BYTES = 4
"""Max bytes of a UTF-8 character."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class StopString:
    """A stop string with the failure function of Knuth, Morris and Pratt: the search costs O(1) per character.
    Immutable, so sequences can share it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallback_lengths = [0] * len(text)
        """At index k - 1: length of the longest proper prefix of `text[:k]` that is also its suffix."""
        size = 0
        for at in range(1, len(text)):
            size = self.advance(size, text[at])
            self._fallback_lengths[at] = size

    def advance(self, size: int, character: str) -> int:
        """Return the length of the longest prefix of the stop string with which a text ends after one more character.
        `size`: that length before the character, less than the whole stop string's."""
        while size and self.text[size] != character:
            size = self._fallback_lengths[size - 1]
        return size + (self.text[size] == character)


class IncrementalDetokenizer:
    """Converts tokens to text, token by token, and stops before a stop string.

    A tokenizer's decoder joins bytes to characters and drops the first token's leading space. So each token is decoded
    together with the tokens before it, back to the last complete character. `text` only grows. The start of a possible
    stop string or an incomplete character is held back until it is decided. The cost per token is constant.

    Args:
        skipped_token_ids: token ids that `decode` leaves out, such as special ones.
        skipped_stop_texts: texts of skipped tokens that occur in stop strings; they are searched but not shown.
        min_tokens: number of tokens after which stop strings are searched.
        include_stop_string: keep the stop string at the end of the text.
        get_text: function that returns the text of a single token; if given, `offsets` are recorded.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[StopString | str] = (),
        skipped_token_ids: Set[int] = frozenset(),
        *,
        min_tokens: int = 0,
        include_stop_string: bool = False,
        skipped_stop_texts: Mapping[int, str] | None = None,
        get_text: Callable[[int], str] | None = None,
    ) -> None:
        self._decode = decode
        self._stop = [StopString(one) if isinstance(one, str) else one for one in stop]
        self._matched = [0] * len(self._stop)  # characters at the end of `_decoded_text` that begin each stop string
        self._skipped_token_ids = skipped_token_ids
        self._skipped_stop_texts = skipped_stop_texts or {}
        self._hidden: list[tuple[int, int]] = []  # spans of special tokens in `_decoded_text`, which are not shown
        self._num_hidden = 0  # characters in them
        self._get_text = get_text
        self.offsets: list[int] = []
        """Start index of each token's text. A token that continues a character has the character's index."""
        self._num_unsearched = min_tokens
        self._include_stop_string = include_stop_string
        self._window: list[int] = []  # context and the tokens after it
        self._context_size = 0  # tokens of the window that are context
        self._num_emitted = 0  # characters of the decoded window that are in `_decoded_text`
        self._decoded_text = ""
        self._num_released = 0  # characters of `_decoded_text` that cannot belong to a stop string
        self.stop_string: str | None = None
        """Stop string that was found, or None."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found. Further tokens are ignored."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """Text without special tokens and text that is held back."""
        shown, start = "", 0
        for begin, end in self._hidden:
            shown += self._decoded_text[start : min(begin, self._num_released)]
            start = end
        return shown + self._decoded_text[start : self._num_released]

    def append(self, token_id: int) -> None:
        if self._get_text is None:
            self._append_token(token_id)
            return
        before = self._num_shown
        self._append_token(token_id)
        # Text that was held back is released before this token's text, so the token's start is counted from the end.
        whole = not self._has_partial_character and not self.is_stopped and token_id not in self._skipped_token_ids
        self.offsets.append(max(before, self._num_shown - len(self._get_text(token_id))) if whole else before)

    def append_stop_token(self, token_id: int) -> None:
        """Add the stop token. It is not part of the text unless a stop string contains it."""
        if token_id in self._skipped_stop_texts or self._include_stop_string:
            self.append(token_id)
        elif self._get_text is not None:
            self.offsets.append(self._num_shown)

    @property
    def _num_shown(self) -> int:
        """Number of characters of the text, including text that is held back."""
        return len(self._decoded_text) - self._num_hidden

    @property
    def _has_partial_character(self) -> bool:
        """Whether the last tokens do not form a whole character yet."""
        return len(self._window) > self._context_size

    def _append_token(self, token_id: int) -> None:
        if self.is_stopped:
            return
        self._num_unsearched -= 1
        if token_id in self._skipped_stop_texts:
            self._hidden.append(
                (len(self._decoded_text), len(self._decoded_text) + len(self._skipped_stop_texts[token_id]))
            )
            self._num_hidden += len(self._skipped_stop_texts[token_id])
            self._append_text(self._skipped_stop_texts[token_id])
        if token_id in self._skipped_token_ids:
            return
        self._window.append(token_id)
        window_text = self._decode(self._window)
        complete = len(window_text) - self._count_pending_characters(window_text)
        if complete <= self._num_emitted:
            return
        self._append_text(window_text[self._num_emitted : complete])
        self._num_emitted = complete
        if complete == len(window_text):
            self._slide_window()

    def finish(self) -> None:
        """Release text that was held back, as no token follows. An incomplete character becomes U+FFFD."""
        if self.is_stopped:
            return
        self._append_text(self._decode(self._window)[self._num_emitted :])
        if not self.is_stopped:
            self._num_released = len(self._decoded_text)

    def _count_pending_characters(self, window_text: str) -> int:
        """Return the number of characters at the window's end that the next token may change.

        SentencePiece decodes a run of bytes to U+FFFD while the run's last character is incomplete. So all trailing
        U+FFFD are pending while there are fewer tokens than `MAX_CHARACTER_BYTES`.
        """
        trailing = len(window_text) - len(window_text.rstrip(REPLACEMENT_CHARACTER))
        num_tokens = len(self._window) - self._context_size
        return trailing if num_tokens < MAX_CHARACTER_BYTES else min(trailing, MAX_CHARACTER_BYTES - 1)

    def _slide_window(self) -> None:
        """Make the tokens after the context, now whole characters, the new context."""
        self._window = self._window[self._context_size :]
        self._context_size = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _append_text(self, addition: str) -> None:
        """Add text, and search for the first stop string. It may begin in text that was held back."""
        start = self._num_released
        self._decoded_text += addition
        if self._num_unsearched >= 0:
            self._num_released = len(self._decoded_text)
            return
        found = [(at, stop) for stop in self._stop if (at := self._decoded_text.find(stop.text, start)) >= 0]
        if found:
            at, stop = min(found, key=lambda one: (one[0], len(one[1].text)))
            self.stop_string = stop.text
            self._decoded_text = self._decoded_text[: at + len(stop.text) * self._include_stop_string]
            self._num_released = len(self._decoded_text)
            # Show special tokens that are part of the included stop string.
            self._hidden = [(begin, end) for begin, end in self._hidden if end <= at]
            return
        for number, stop in enumerate(self._stop):
            for character in addition:
                self._matched[number] = stop.advance(self._matched[number], character)
        self._num_released = len(self._decoded_text) - max(self._matched, default=0)


class Vocabulary:
    """Texts and bytes of single tokens, from a tokenizer's vocabulary. Without a tokenizer, a token's text is its id.

    `decode` of a single token would drop a leading space, and turn a part of a character into U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._added: dict[int, str] = {}
        self._steps: dict[str, Any] = {}
        if getattr(tokenizer, "is_fast", False):
            backend = tokenizer.backend_tokenizer
            self._added = {one: token.content for one, token in backend.get_added_tokens_decoder().items()}
            self._steps = {step["type"]: step for step in list_tokenizer_steps(backend.decoder)}
        is_byte_level = "ByteLevel" in self._steps or hasattr(tokenizer, "byte_decoder")
        characters = bytes_to_unicode() if is_byte_level else {}
        self._byte_level = {character: bytes([byte]) for byte, character in characters.items()}

    def get_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that the token adds to a text, possibly a part of a character. Empty for an unknown
        id."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute_bytes(token_id)
        return found

    def get_text(self, token_id: int) -> str:
        r"""Return the token's text, or e.g. `bytes:\xe2\x82`, as OpenAI's API does, if its bytes are not valid
        UTF-8."""
        data = self.get_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _compute_bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return str(token_id).encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(self._byte_level.get(character) or character.encode() for character in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if "WordPiece" in self._steps or "BPEDecoder" in self._steps or "CTC" in self._steps:
            return self._decode_single(token_id)
        if "▁" in piece:  # SentencePiece's space
            return piece.replace("▁", " ").encode()
        return self._decode_single(token_id) if not self._steps else piece.encode()

    def _decode_single(self, token_id: int) -> bytes:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.encode()
