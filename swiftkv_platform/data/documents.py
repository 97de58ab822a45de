"""Documents as token ids: rendering, BOS and EOS, loss targets, cutting to length. Knows no file and no row format."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from swiftkv_platform.data.chat import ChatRenderer, Passage, Span
from swiftkv_platform.data.formats import Content, content_digest
from swiftkv_platform.data.packing import BoolArray, IntArray, Samples
from swiftkv_platform.data.prepared import open_tokens
from swiftkv_platform.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = npt.NDArray[np.int32]
_LONG_TEXT = 1 << 20
"""Characters above which a text is tokenized in pieces of at most this length."""


@dataclass(frozen=True)
class Draft:
    """A rendered document, not yet tokenized."""

    passages: list[Passage]
    """Texts of the document; a conversation may have several."""
    digest: int
    is_conversation: bool
    is_framed: bool
    """Whether BOS and EOS are added; False if a chat template writes them."""

    @property
    def num_characters(self) -> int:
        return sum(len(passage.text) for passage in self.passages)


@dataclass(frozen=True)
class Encoded:
    """A document's samples of at most `max_length` tokens each; empty if the loss would count no position."""

    samples: list[tuple[TokenIds, BoolArray]]
    """Token ids, and which positions the loss counts (see `packing.Samples.counts`)."""
    num_tokens: int
    """Tokens of the whole document."""
    was_cut: bool
    """Whether a text was split into windows, or the end of a conversation was cut off."""
    num_lost: int = 0
    """Tokens cut off the end."""


class DocumentEncoder:
    """Turns samples into token ids for one tokenizer and data spec.

    Args:
        splits: begin samples with an uncounted prompt, for students whose counted tokens keep their own K and V while
            prompt tokens do not. If all tokens are targets, the prompt's length (which may be 0) is drawn by the
            content's digest; a teacher-written sample has a prompt already.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        train_on: Literal["assistant", "all"],
        splits: bool = False,
    ) -> None:
        self._splits = splits
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self.max_length = max_length
        self._assistant_only = train_on == "assistant"

    def draft(self, content: Content) -> Draft:
        """Render a sample. Raises `RowError` if the chat template refuses it, or if it has lone surrogates."""
        digest = content_digest(content)
        if isinstance(content, str):
            return Draft([Passage(content, None)], digest, is_conversation=False, is_framed=True)
        passages = self._renderer.passages(content, "assistant" if self._assistant_only else "all")
        return Draft(passages, digest, is_conversation=True, is_framed=self._renderer.is_plain)

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokenize many documents at once. Raises `DataError` if assistant tokens must be found and the tokenizer has
        no offset mapping."""
        passages = [passage for draft in drafts for passage in draft.passages]
        with_offsets = any(passage.spans is not None for passage in passages)
        if with_offsets and not self._tokenizer.is_fast:
            raise DataError(
                "data.train_on is 'assistant', or messages have a weight of 0, which needs a tokenizer with a "
                f"tokenizer.json; this one ({type(self._tokenizer).__name__}) has none; use 'all', and no weights",
                field="data.train_on",
                value="assistant" if self._assistant_only else "all",
            )
        long = [len(passage.text) > _LONG_TEXT and passage.spans is None for passage in passages]
        encoding = self._tokenize(
            ["" if apart else passage.text for passage, apart in zip(passages, long, strict=True)], with_offsets
        )
        offsets = encoding["offset_mapping"] if with_offsets else [None] * len(passages)
        tokens = zip(
            (
                self._in_pieces(passage.text) if apart else np.array(ids, dtype=np.int32)
                for passage, apart, ids in zip(passages, long, encoding["input_ids"], strict=True)
            ),
            offsets,
            strict=True,
        )
        return [_joined([self._encode(draft, each, *next(tokens)) for each in draft.passages]) for draft in drafts]

    def _in_pieces(self, text: str) -> TokenIds:
        """Tokenize a long text in pieces cut at line ends, since tokenizers need about 100 bytes per character."""
        pieces, begin = list[TokenIds](), 0
        while begin < len(text):
            end = text.rfind("\n", begin, begin + _LONG_TEXT) + 1 or begin + _LONG_TEXT
            pieces.append(np.array(self._tokenize([text[begin:end]], False)["input_ids"][0], dtype=np.int32))
            begin = end
        return np.concatenate(pieces)

    def _tokenize(self, texts: list[str], with_offsets: bool) -> Any:
        if not texts:  # some tokenizers refuse an empty list
            return {"input_ids": [], "offset_mapping": []}
        return self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=with_offsets,
            verbose=False,
        )

    def encode_prompt(self, content: Content) -> TokenIds:
        """Return the tokens that the teacher continues: of a text, or of a conversation up to where the answer begins.
        Raises as `draft`."""
        content_digest(content)  # raises for lone surrogates
        if isinstance(content, str):
            text, is_framed = content, True
        else:
            text, is_framed = self._renderer.render_prompt(content), self._renderer.is_plain
        ids = np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        bos = self._tokenizer.bos_token_id
        return np.insert(ids, 0, bos) if is_framed and bos is not None and (not len(ids) or ids[0] != bos) else ids

    def encode_written(self, prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
        """Encode a prompt and the teacher's answer to it from their token ids, unchanged."""
        ids = np.array([*prompt, *answer], dtype=np.int32)
        is_target = np.ones(len(ids), dtype=np.bool_)
        if self._assistant_only or self._splits:
            is_target[: len(prompt)] = False
        kept = ids[: self.max_length]
        counts = np.append(is_target[1 : len(kept)], False)
        samples = [(kept, counts)] if counts.any() else []
        return Encoded(samples, len(ids), was_cut=len(ids) > self.max_length, num_lost=len(ids) - len(kept))

    def _encode(self, draft: Draft, passage: Passage, ids: TokenIds, offsets: list[Span] | None) -> Encoded:
        if passage.spans is None:
            is_target = np.ones(len(ids), dtype=np.bool_)
        else:
            assert offsets is not None
            is_target = _inside(np.array(offsets, dtype=np.int64).reshape(-1, 2), passage.spans)
        if draft.is_framed:
            ids, is_target = self._frame(ids, is_target)
        num_tokens = len(ids)
        if draft.is_conversation:
            ids, is_target = ids[: self.max_length], is_target[: self.max_length]
        samples = []
        for begin in range(0, len(ids), self.max_length):
            window = slice(begin, begin + self.max_length)
            counts = np.append(is_target[window][1:], False)
            if self._splits and (passage.spans is None or (counts[0] and not self._assistant_only)):
                counts[: _prompt_length(draft.digest, begin, len(counts))] = False
            if counts.any():
                samples.append((ids[window], counts))
        return Encoded(samples, num_tokens, was_cut=num_tokens > self.max_length, num_lost=num_tokens - len(ids))

    def _frame(self, ids: TokenIds, is_target: BoolArray) -> tuple[TokenIds, BoolArray]:
        """Add BOS and EOS if the tokenizer has them and the text does not. EOS is a target if its predecessor is."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        ends_in_target = bool(is_target[-1]) if len(is_target) else False
        if bos is not None and (not len(ids) or ids[0] != bos):
            ids, is_target = np.insert(ids, 0, bos), np.insert(is_target, 0, False)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids, is_target = np.append(ids, np.int32(eos)), np.append(is_target, ends_in_target)
        return ids, is_target


def _joined(parts: Sequence[Encoded]) -> Encoded:
    """Join the encoded passages of one document."""
    if len(parts) == 1:
        return parts[0]
    return Encoded(
        [sample for part in parts for sample in part.samples],
        sum(part.num_tokens for part in parts),
        was_cut=any(part.was_cut for part in parts),
        num_lost=sum(part.num_lost for part in parts),
    )


def _prompt_length(digest: int, begin: int, num_tokens: int) -> int:
    """Draw, uniformly, the number of leading positions of a sample that are not counted; at least one stays counted."""
    draw = np.random.default_rng((digest, begin))
    return int(draw.integers(max(num_tokens - 1, 1)))


def _inside(offsets: IntArray, spans: Sequence[Span]) -> BoolArray:
    """Mask the tokens whose [begin, end) characters [T, 2] overlap a span. Byte-level tokenizers may give blanks a
    width of zero; such a token is taken to cover the character at its position.
    """
    begin, end = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        inside |= (begin < last) & (end > first)
    return inside


@dataclass(frozen=True)
class Documents:
    """All documents of a data spec; a document owns consecutive samples."""

    samples: Samples
    first_samples: IntArray
    """[num_documents + 1]"""
    digests: npt.NDArray[np.uint64]
    """[num_documents]: equal for equal content."""
    sources: IntArray
    """[num_documents]: index of the source in the spec."""
    held_out: BoolArray
    """[num_documents]: whether the source itself marks the document as held out."""
    is_settled: BoolArray
    """[num_documents]: whether the source marks the document at all, as held out or as training data."""

    @property
    def num_samples(self) -> IntArray:
        return np.diff(self.first_samples)

    def __len__(self) -> int:
        return len(self.digests)

    def samples_of(self, documents: IntArray) -> IntArray:
        """Return the indices of the samples of `documents`, in their order."""
        first = self.first_samples[documents]
        counts = self.num_samples[documents]
        before = np.cumsum(counts) - counts
        return np.repeat(first - before, counts) + np.arange(counts.sum())


class DocumentCollector:
    """Writes documents to the token files of `directory` while sources are read. Keeps about 20 bytes per document in
    memory.
    """

    def __init__(self, directory: Path, *, vocab_size: int) -> None:
        self._directory = directory
        fits_16_bits = vocab_size <= np.iinfo(np.uint16).max + 1
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if fits_16_bits else np.int32)
        self._tokens = (directory / "tokens.bin").open("wb")
        self._counts = (directory / "counts.bin").open("wb")
        self._lengths = array("q")
        self._num_samples = array("i")
        self._digests = array("Q")
        self._sources = array("i")
        self._sides = array("b")  # the source's mark: -1 none, 0 train, 1 held out

    def add(self, encoded: Encoded, *, digest: int, source: int, held_out: bool | None) -> None:
        """Add a document. `held_out`: whether the source marks it as held out; None if the source does not say."""
        for tokens, counts in encoded.samples:
            self._tokens.write(tokens.astype(self._dtype).tobytes())
            self._counts.write(counts.tobytes())
            self._lengths.append(len(tokens))
        self._num_samples.append(len(encoded.samples))
        self._digests.append(digest)
        self._sources.append(source)
        self._sides.append(-1 if held_out is None else int(held_out))

    def finish(self) -> Documents:
        """Close the files and return all documents, with tokens memory-mapped."""
        self._tokens.close()
        self._counts.close()
        sides = np.array(self._sides, dtype=np.int8)
        digests = np.array(self._digests, dtype=np.uint64)
        texts = np.repeat(np.unique(digests, return_inverse=True)[1], np.array(self._num_samples, dtype=np.int64))
        return Documents(
            samples=Samples(*open_tokens(self._directory, self._dtype), _starts(self._lengths), texts),
            first_samples=_starts(self._num_samples),
            digests=digests,
            sources=np.array(self._sources, dtype=np.int64),
            held_out=sides == 1,
            is_settled=sides >= 0,
        )


def _starts(lengths: array[int]) -> IntArray:
    """Return [len(lengths) + 1]: the start of each item, then the end of the last."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
