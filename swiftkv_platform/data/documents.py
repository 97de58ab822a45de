"""Documents as token ids: rendering, BOS and EOS, which tokens are targets, cutting to length. Knows no file and no row
format.
"""

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
"""Characters of a text that are tokenized at a time."""


@dataclass(frozen=True)
class Draft:
    """A document before its tokens."""

    passages: list[Passage]
    """Its texts; a conversation may have several."""
    digest: int
    is_conversation: bool
    is_framed: bool
    """Whether BOS and EOS are added: not where a chat template writes its own."""

    @property
    def num_characters(self) -> int:
        return sum(len(passage.text) for passage in self.passages)


@dataclass(frozen=True)
class Encoded:
    """A document's samples, none longer than `max_length`. Without a position that counts there are none."""

    samples: list[tuple[TokenIds, BoolArray]]
    """Token ids, and which positions the loss counts (see `packing.Samples.counts`)."""
    num_tokens: int
    """Tokens of the whole document."""
    was_cut: bool
    """A text was split into windows, or a conversation lost its end."""
    num_lost: int = 0
    """Tokens of such ends."""


class DocumentEncoder:
    """Turns samples into token ids for one tokenizer and data spec.

    Args:
        splits: let no sample count as a whole. One of which all tokens are targets begins with a prompt, of a length
            that its content decides, and what the teacher wrote counts without its prompt: for students of which
            counted tokens keep their own K and V, and prompts do not.
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
        self._renderer = ChatRenderer.for_tokenizer(tokenizer)
        self.max_length = max_length
        self._assistant_only = train_on == "assistant"

    def draft(self, content: Content) -> Draft:
        """Render a sample. Raises `RowError`: the chat template refuses it, or it holds what is no text."""
        digest = content_digest(content)
        if isinstance(content, str):
            return Draft([Passage(content, None)], digest, is_conversation=False, is_framed=True)
        passages = self._renderer.passages(content, "assistant" if self._assistant_only else "all")
        return Draft(passages, digest, is_conversation=True, is_framed=self._renderer.is_plain)

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokenize many documents at once. Raises `DataError`: assistant tokens are asked for and the tokenizer cannot
        tell where its tokens stand in the text."""
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
        """Tokens of a long text, which is cut at line ends: tokenizers take a hundred bytes for each character."""
        pieces, begin = list[TokenIds](), 0
        while begin < len(text):
            end = text.rfind("\n", begin, begin + _LONG_TEXT) + 1 or begin + _LONG_TEXT
            pieces.append(np.array(self._tokenize([text[begin:end]], False)["input_ids"][0], dtype=np.int32))
            begin = end
        return np.concatenate(pieces)

    def _tokenize(self, texts: list[str], with_offsets: bool) -> Any:
        if not texts:  # which some tokenizers refuse
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
        """The tokens that the teacher goes on from: of a text itself, of a conversation up to where the answer begins.
        Raises `RowError`: the chat template refuses it, or it holds what is no text."""
        content_digest(content)  # for what it refuses
        if isinstance(content, str):
            text, is_framed = content, True
        else:
            text, is_framed = self._renderer.render_prompt(content), self._renderer.is_plain
        ids = np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        bos = self._tokenizer.bos_token_id
        return np.insert(ids, 0, bos) if is_framed and bos is not None and (not len(ids) or ids[0] != bos) else ids

    def encode_written(self, prompt: Sequence[int], answer: Sequence[int]) -> Encoded:
        """A prompt with the answer the teacher wrote to it, token for token."""
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
        """BOS in front and EOS behind, where the tokenizer has them and the text does not. EOS counts if what it ends
        does.
        """
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        ends_in_target = bool(is_target[-1]) if len(is_target) else False
        if bos is not None and (not len(ids) or ids[0] != bos):
            ids, is_target = np.insert(ids, 0, bos), np.insert(is_target, 0, False)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids, is_target = np.append(ids, np.int32(eos)), np.append(is_target, ends_in_target)
        return ids, is_target


def _joined(parts: Sequence[Encoded]) -> Encoded:
    """The passages of one document."""
    if len(parts) == 1:
        return parts[0]
    return Encoded(
        [sample for part in parts for sample in part.samples],
        sum(part.num_tokens for part in parts),
        was_cut=any(part.was_cut for part in parts),
        num_lost=sum(part.num_lost for part in parts),
    )


def _prompt_length(digest: int, begin: int, num_tokens: int) -> int:
    """Tokens of a sample before its first counted one: any number that leaves one to count, as likely as any other."""
    draw = np.random.default_rng((digest, begin))
    return int(draw.integers(max(num_tokens - 1, 1)))


def _inside(offsets: IntArray, spans: Sequence[Span]) -> BoolArray:
    """Mask the tokens whose [begin, end) characters [T, 2] overlap a span. Byte-level tokenizers may give a token of
    blanks no width; it then counts by the character it stands at.
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
    """[num_documents]: held out by the source itself."""
    is_settled: BoolArray
    """[num_documents]: whether the source decided that."""

    @property
    def num_samples(self) -> IntArray:
        return np.diff(self.first_samples)

    def __len__(self) -> int:
        return len(self.digests)

    def samples_of(self, documents: IntArray) -> IntArray:
        """Indices of the samples of `documents`, in their order."""
        first = self.first_samples[documents]
        counts = self.num_samples[documents]
        before = np.cumsum(counts) - counts
        return np.repeat(first - before, counts) + np.arange(counts.sum())


class DocumentCollector:
    """Writes documents to the token files of `directory` while sources are read. In memory it keeps some 20 bytes of
    each.
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
        self._sides = array("b")  # what the source says of the hold-out: -1 nothing, 0 train, 1 held out

    def add(self, encoded: Encoded, *, digest: int, source: int, held_out: bool | None) -> None:
        """`held_out` is the source's own word, None where it has none."""
        for tokens, counts in encoded.samples:
            self._tokens.write(tokens.astype(self._dtype).tobytes())
            self._counts.write(counts.tobytes())
            self._lengths.append(len(tokens))
        self._num_samples.append(len(encoded.samples))
        self._digests.append(digest)
        self._sources.append(source)
        self._sides.append(-1 if held_out is None else int(held_out))

    def finish(self) -> Documents:
        """Everything gathered; the tokens are mapped from their files."""
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
    """[len(lengths) + 1]: where each begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
