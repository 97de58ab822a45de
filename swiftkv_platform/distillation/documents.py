"""Documents as token ids: rendering, BOS and EOS, which tokens are targets, cutting to length. Knows no file and no row
format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from swiftkv_platform.distillation.chat import ChatRenderer, Span
from swiftkv_platform.distillation.data_formats import Content, content_digest
from swiftkv_platform.distillation.packing import BoolArray, IntArray, Samples
from swiftkv_platform.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Draft:
    """A document before its tokens."""

    text: str
    digest: int
    assistant: list[Span] | None
    """Characters that are targets; None where all are."""
    is_conversation: bool
    is_framed: bool
    """Whether BOS and EOS are added: not where a chat template writes its own."""


@dataclass(frozen=True)
class Encoded:
    """A document's samples, none longer than `max_length`. Without a position that counts there are none."""

    samples: list[tuple[TokenIds, BoolArray]]
    """Token ids, and which positions the loss counts (see `packing.Samples.counts`)."""
    was_cut: bool
    """A text was split into windows, or a conversation lost its end."""


class DocumentEncoder:
    """Turns samples into token ids for one tokenizer and data spec."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, train_on: Literal["assistant", "all"]
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer.for_tokenizer(tokenizer)
        self._max_length = max_length
        self._assistant_only = train_on == "assistant"

    def draft(self, content: Content) -> Draft:
        """Render a sample.

        Raises:
            RowError: the chat template refuses it.
        """
        digest = content_digest(content)
        if isinstance(content, str):
            return Draft(content, digest, assistant=None, is_conversation=False, is_framed=True)
        if self._assistant_only:
            text, spans = self._renderer.render_with_spans(content)
            return Draft(text, digest, spans, is_conversation=True, is_framed=self._renderer.is_plain)
        text = self._renderer.render(content)
        return Draft(text, digest, assistant=None, is_conversation=True, is_framed=self._renderer.is_plain)

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokenize many documents at once.

        Raises:
            DataError: assistant tokens are asked for and the tokenizer cannot tell where its tokens stand in the text.
        """
        with_offsets = any(draft.assistant is not None for draft in drafts)
        if with_offsets and not self._tokenizer.is_fast:
            raise DataError(
                "data.train_on is 'assistant', which needs a tokenizer with a tokenizer.json; this one "
                f"({type(self._tokenizer).__name__}) has none; 'all' would do",
                field="data.train_on",
                value="assistant",
            )
        encoding = self._tokenizer(
            [draft.text for draft in drafts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=with_offsets,
            verbose=False,
        )
        offsets = encoding["offset_mapping"] if with_offsets else [None] * len(drafts)
        return [
            self._encode(draft, np.array(ids, dtype=np.int32), characters)
            for draft, ids, characters in zip(drafts, encoding["input_ids"], offsets, strict=True)
        ]

    def _encode(self, draft: Draft, ids: TokenIds, offsets: list[Span] | None) -> Encoded:
        if draft.assistant is None:
            is_target = np.ones(len(ids), dtype=np.bool_)
        else:
            assert offsets is not None
            is_target = _inside(np.array(offsets, dtype=np.int64).reshape(-1, 2), draft.assistant)
        if draft.is_framed:
            ids, is_target = self._frame(ids, is_target)
        was_cut = len(ids) > self._max_length
        if draft.is_conversation:
            ids, is_target = ids[: self._max_length], is_target[: self._max_length]
        samples = []
        for begin in range(0, len(ids), self._max_length):
            window = slice(begin, begin + self._max_length)
            counts = np.append(is_target[window][1:], False)
            if counts.any():
                samples.append((ids[window], counts))
        return Encoded(samples, was_cut)

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


def _inside(offsets: IntArray, spans: Sequence[Span]) -> BoolArray:
    """Which tokens, by their [begin, end) characters [T, 2], overlap a span. Byte-level tokenizers may give a token of
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

    def __len__(self) -> int:
        return len(self.digests)

    def samples_of(self, documents: IntArray) -> IntArray:
        """Indices of the samples of `documents`, in their order."""
        parts = [np.arange(self.first_samples[i], self.first_samples[i + 1], dtype=np.int64) for i in documents]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


@dataclass
class DocumentCollector:
    """Gathers documents while sources are read."""

    _samples: list[tuple[TokenIds, BoolArray]] = field(default_factory=list)
    _num_samples: list[int] = field(default_factory=list)
    _digests: list[int] = field(default_factory=list)
    _sources: list[int] = field(default_factory=list)
    _held_out: list[bool | None] = field(default_factory=list)

    def add(self, encoded: Encoded, *, digest: int, source: int, held_out: bool | None) -> None:
        """`held_out` is the source's own word, None where it has none."""
        self._samples += encoded.samples
        self._num_samples.append(len(encoded.samples))
        self._digests.append(digest)
        self._sources.append(source)
        self._held_out.append(held_out)

    def finish(self, *, vocab_size: int) -> Documents:
        """Everything gathered, token ids in 16 bits where the vocabulary allows it."""
        dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max + 1 else np.int32
        starts = np.cumsum([0, *(len(tokens) for tokens, _ in self._samples)], dtype=np.int64)
        tokens, counts = np.empty(starts[-1], dtype=dtype), np.empty(starts[-1], dtype=np.bool_)
        for begin, (sample_tokens, sample_counts) in zip(starts, self._samples, strict=False):
            tokens[begin : begin + len(sample_tokens)] = sample_tokens
            counts[begin : begin + len(sample_counts)] = sample_counts
        return Documents(
            samples=Samples(tokens, counts, starts),
            first_samples=np.cumsum([0, *self._num_samples], dtype=np.int64),
            digests=np.array(self._digests, dtype=np.uint64),
            sources=np.array(self._sources, dtype=np.int64),
            held_out=np.array([side is True for side in self._held_out], dtype=np.bool_),
            is_settled=np.array([side is not None for side in self._held_out], dtype=np.bool_),
        )
