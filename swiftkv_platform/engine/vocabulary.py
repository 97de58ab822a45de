"""Texts and bytes of single tokens, from the vocabulary itself. Knows no sequence.

A decoder looks at neighbours: alone it makes U+FFFD of a part of a character, and drops a leading space.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from swiftkv_platform.model.tokenizers import steps

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Tokens of one tokenizer; without one a token is its number."""

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
