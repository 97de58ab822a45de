"""Turn documents into token ids: rendering, BOS and EOS, loss targets, splitting and truncation to length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from swiftkv_platform.data.chat import ChatRenderer, RenderedText, Span
from swiftkv_platform.data.formats import Content, Conversation, hash_content, make_rendered_error
from swiftkv_platform.data.packing import BoolArray, IntArray, Samples
from swiftkv_platform.data.prepared import open_tokens
from swiftkv_platform.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenIds = npt.NDArray[np.int32]
_MAX_PIECE_LENGTH = 1 << 20
"""Characters above which a text is tokenized in pieces of at most this length."""


@dataclass(frozen=True)
class RenderedDocument:
    """A document before tokenization."""

    texts: list[RenderedText]
    """One text, or several for some conversations."""
    digest: int
    is_conversation: bool
    add_special_tokens: bool
    """Whether BOS and EOS are added; False if a chat template writes them."""

    @property
    def num_characters(self) -> int:
        return sum(len(text.text) for text in self.texts)


@dataclass(frozen=True)
class EncodedDocument:
    """A document's samples of at most `max_length` tokens each; empty without loss targets."""

    samples: list[tuple[TokenIds, BoolArray]]
    """Token ids and loss masks (see `packing.Samples.loss_mask`)."""
    num_tokens: int
    is_too_long: bool
    """Whether the document exceeded `max_length`: a text was split into windows, or a conversation was truncated."""
    num_truncated_tokens: int = 0
    """Tokens truncated from a conversation."""


class DocumentEncoder:
    """Turns documents into token ids for one tokenizer and data spec.

    Args:
        mask_prompts: exclude a leading prompt of each sample from the loss, for students whose target tokens keep their
            own K and V while prompt tokens do not. If all tokens are targets, the prompt's length (0 or more) is drawn
            by the content's digest; a teacher-written sample has a prompt already.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        train_on: Literal["assistant", "all"],
        mask_prompts: bool = False,
    ) -> None:
        self._mask_prompts = mask_prompts
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer)
        self.max_length = max_length
        self._assistant_only = train_on == "assistant"
        template = str(tokenizer.chat_template or "")
        added = tokenizer.added_tokens_decoder.values()
        self._start_ids = np.array(_find_start_ids(tokenizer), dtype=np.int32)
        self._template_tokens = tuple(t.content for t in added if t.special and t.content in template)

    @property
    def warning(self) -> str | None:
        """What a data set of conversations should know about the tokenizer; None if there is nothing to say."""
        end = self._renderer.find_excluded_end_marker() if self._assistant_only else None
        if end is None:
            return None
        return (
            f"the chat template ends {{% generation %}} before {end!r}, so the student is not trained to end its "
            f"answers; move {{% endgeneration %}} after {end!r}"
        )

    def render(self, content: Content) -> RenderedDocument:
        """Render a document. Raises `RowError` if the chat template refuses it or is already rendered, or if it has
        lone surrogates."""
        digest = hash_content(content)
        if isinstance(content, str):
            return RenderedDocument(
                [RenderedText(content, None)], digest, is_conversation=False, add_special_tokens=True
            )
        self._refuse_rendered(content)
        texts = self._renderer.render_for_training(content, "assistant" if self._assistant_only else "all")
        return RenderedDocument(
            texts, digest, is_conversation=True, add_special_tokens=not self._renderer.has_chat_template
        )

    def encode(self, documents: Sequence[RenderedDocument]) -> list[EncodedDocument]:
        """Tokenize many documents at once. Raises `DataError` if assistant tokens must be found and the tokenizer has
        no offset mapping."""
        # 1. tokenize all short texts in one call, with offsets if targets are spans
        texts = [text for document in documents for text in document.texts]
        with_offsets = any(text.loss_spans is not None for text in texts)
        if with_offsets and not self._tokenizer.is_fast:
            raise DataError(
                "data.train_on 'assistant' and messages with weight 0 require a tokenizer with a tokenizer.json, and "
                f"{type(self._tokenizer).__name__} has none; set data.train_on to 'all', without weights",
                field="data.train_on",
                value="assistant" if self._assistant_only else "all",
            )
        long = [len(text.text) > _MAX_PIECE_LENGTH and text.loss_spans is None for text in texts]
        encoding = self._tokenize_texts(
            ["" if is_long else text.text for text, is_long in zip(texts, long, strict=True)], with_offsets
        )
        # 2. tokenize long texts in pieces, and add loss masks
        offsets = encoding["offset_mapping"] if with_offsets else [None] * len(texts)
        tokens = zip(
            (
                self._tokenize_in_pieces(text.text) if is_long else np.array(ids, dtype=np.int32)
                for text, is_long, ids in zip(texts, long, encoding["input_ids"], strict=True)
            ),
            offsets,
            strict=True,
        )
        return [
            _merge_encoded([self._encode_text(document, text, *next(tokens)) for text in document.texts])
            for document in documents
        ]

    def _tokenize_in_pieces(self, text: str) -> TokenIds:
        """Tokenize a long text in pieces cut at line ends, since tokenizers need about 100 bytes per character.

        SentencePiece adds a space before a text. So that it does not before a later piece, this is tokenized after a
        line end, whose tokens are removed.
        """
        [line_end] = self._tokenize_texts(["\n"], False)["input_ids"]
        pieces, begin = list[TokenIds](), 0
        while begin < len(text):
            end = text.rfind("\n", begin, begin + _MAX_PIECE_LENGTH) + 1 or begin + _MAX_PIECE_LENGTH
            [ids] = self._tokenize_texts([text[begin:end] if not begin else f"\n{text[begin:end]}"], False)["input_ids"]
            if begin and ids[: len(line_end)] == line_end:
                ids = ids[len(line_end) :]
            elif begin:  # the line end is one token with what follows it
                [ids] = self._tokenize_texts([text[begin:end]], False)["input_ids"]
            pieces.append(np.array(ids, dtype=np.int32))
            begin = end
        return np.concatenate(pieces)

    def _tokenize_texts(self, texts: list[str], with_offsets: bool) -> Any:
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
        """Return the tokens of a prompt for the teacher: a text, or a conversation with the generation prompt. Raises
        as `render`."""
        hash_content(content)  # raises for lone surrogates
        if isinstance(content, str):
            text, add_special_tokens = content, True
        else:
            self._refuse_rendered(content)
            text, add_special_tokens = self._renderer.render_prompt(content), not self._renderer.has_chat_template
        ids = np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        return np.append(self._find_missing_start(ids), ids) if add_special_tokens else ids

    def _refuse_rendered(self, conversation: Conversation) -> None:
        """Raise `RowError` for a message with special tokens of the chat template."""
        for number, message in enumerate(conversation.messages, start=1):
            found = next((token for token in self._template_tokens if token in (message["content"] or "")), None)
            if found is not None:
                raise make_rendered_error(f"message {number} (role {message['role']})", found)

    def encode_completion(self, prompt: Sequence[int], completion: Sequence[int]) -> EncodedDocument:
        ids = np.array([*prompt, *completion], dtype=np.int32)
        is_target = np.ones(len(ids), dtype=np.bool_)
        if self._assistant_only or self._mask_prompts:
            is_target[: len(prompt)] = False
        truncated = ids[: self.max_length]
        loss_mask = np.append(is_target[1 : len(truncated)], False)
        samples = [(truncated, loss_mask)] if loss_mask.any() else []
        return EncodedDocument(
            samples, len(ids), is_too_long=len(ids) > self.max_length, num_truncated_tokens=len(ids) - len(truncated)
        )

    def _encode_text(
        self, document: RenderedDocument, text: RenderedText, ids: TokenIds, offsets: list[Span] | None
    ) -> EncodedDocument:
        # 1. find target tokens
        if text.loss_spans is None:
            is_target = np.ones(len(ids), dtype=np.bool_)
        else:
            assert offsets is not None
            is_target = _mask_tokens_in_spans(np.array(offsets, dtype=np.int64).reshape(-1, 2), text.loss_spans)
        if document.add_special_tokens:
            ids, is_target = self._add_special_tokens(ids, is_target)
        # 2. truncate conversations; split plain texts into windows, which all begin like a text
        num_tokens = len(ids)
        if document.is_conversation:
            ids, is_target = ids[: self.max_length], is_target[: self.max_length]
        start = self._start_ids if document.add_special_tokens else self._start_ids[:0]
        samples = []
        for begin in (0, *range(self.max_length, len(ids), self.max_length - len(start))):
            own = slice(begin, begin + self.max_length - (len(start) if begin else 0))
            window, loss_mask = ids[own], np.append(is_target[own][1:], False)
            if begin:  # the first token of its own does not start a text, so it is no target after BOS
                window = np.append(start, window)
                loss_mask = np.append(np.zeros(len(start), dtype=np.bool_), loss_mask)
            if self._mask_prompts and (text.loss_spans is None or (loss_mask[0] and not self._assistant_only)):
                loss_mask[: _draw_prompt_length(document.digest, begin, len(loss_mask))] = False
            if loss_mask.any():
                samples.append((window, loss_mask))
        return EncodedDocument(
            samples, num_tokens, is_too_long=num_tokens > self.max_length, num_truncated_tokens=num_tokens - len(ids)
        )

    def _add_special_tokens(self, ids: TokenIds, is_target: BoolArray) -> tuple[TokenIds, BoolArray]:
        """Return (token ids, targets) with BOS, if the tokenizer adds it, and EOS, if it has one. EOS is a target after
        a target."""
        eos, start = self._tokenizer.eos_token_id, self._find_missing_start(ids)
        ends_in_target = bool(is_target[-1]) if len(is_target) else False
        ids, is_target = np.append(start, ids), np.append(np.zeros(len(start), dtype=np.bool_), is_target)
        if eos is not None and (not len(ids) or ids[-1] != eos):
            ids, is_target = np.append(ids, np.int32(eos)), np.append(is_target, ends_in_target)
        return ids, is_target

    def _find_missing_start(self, ids: TokenIds) -> TokenIds:
        """Return the tokens that a text starts with, unless `ids` start with them."""
        start = self._start_ids
        return start[:0] if np.array_equal(ids[: len(start)], start) else start


def _find_start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that the tokenizer adds before a text, such as BOS. Served prompts get the same."""
    own: list[int]
    whole: list[int]
    own, whole = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    behind = own or [tokenizer.eos_token_id]  # this vocabulary may have no "a"
    begins = (i for i in range(len(whole)) if whole[i : i + len(behind)] == behind)
    return whole[: next(begins, 0 if own else len(whole))]


def _merge_encoded(parts: Sequence[EncodedDocument]) -> EncodedDocument:
    if len(parts) == 1:
        return parts[0]
    return EncodedDocument(
        [sample for part in parts for sample in part.samples],
        sum(part.num_tokens for part in parts),
        is_too_long=any(part.is_too_long for part in parts),
        num_truncated_tokens=sum(part.num_truncated_tokens for part in parts),
    )


def _draw_prompt_length(digest: int, begin: int, num_tokens: int) -> int:
    """Draw, uniformly, the number of leading positions to mask; at least one stays a target."""
    draw = np.random.default_rng((digest, begin))
    return int(draw.integers(max(num_tokens - 1, 1)))


def _mask_tokens_in_spans(offsets: IntArray, spans: Sequence[Span]) -> BoolArray:
    """Mask the tokens whose [begin, end) characters [T, 2] overlap a span. A byte-level tokenizer may give blanks a
    width of 0; such a token covers the character at its position.
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
    """[num_documents]: equal for documents that belong to the same split: of equal content, answers to one prompt, or
    captured requests of one conversation."""
    sources: IntArray
    """[num_documents]: index of the source in the spec."""
    held_out: BoolArray
    """[num_documents]: whether the source assigns the document to the held-out split."""
    has_source_split: BoolArray
    """[num_documents]: whether the source assigns the document to a split, held out or training."""
    is_undivided: BoolArray
    """[num_documents]: whether all samples of the document belong to the same split, even of little data."""

    @property
    def num_samples(self) -> IntArray:
        return np.diff(self.first_samples)

    def __len__(self) -> int:
        return len(self.digests)

    def select_samples(self, documents: IntArray) -> IntArray:
        """Return the indices of the samples of `documents`, in their order."""
        first = self.first_samples[documents]
        counts = self.num_samples[documents]
        before = np.cumsum(counts) - counts
        return np.repeat(first - before, counts) + np.arange(counts.sum())


class DocumentWriter:
    """Writes documents to the token files of `directory`. Keeps about 20 bytes per document in memory."""

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
        self._source_splits = array("b")  # -1: not assigned by the source, 0: train, 1: held out
        self._undivided = array("b")

    def add_document(
        self, encoded: EncodedDocument, *, digest: int, source: int, held_out: bool | None, is_undivided: bool = False
    ) -> None:
        """Add a document.

        Args:
            digest: see `Documents.digests`.
            held_out: whether its source holds it out; None if the source has no splits.
            is_undivided: see `Documents.is_undivided`.
        """
        for tokens, loss_mask in encoded.samples:
            self._tokens.write(tokens.astype(self._dtype).tobytes())
            self._counts.write(loss_mask.tobytes())
            self._lengths.append(len(tokens))
        self._num_samples.append(len(encoded.samples))
        self._digests.append(digest)
        self._sources.append(source)
        self._source_splits.append(-1 if held_out is None else int(held_out))
        self._undivided.append(is_undivided)

    def finish(self) -> Documents:
        """Close the files and return all documents, with tokens memory-mapped."""
        self._tokens.close()
        self._counts.close()
        splits = np.array(self._source_splits, dtype=np.int8)
        digests = np.array(self._digests, dtype=np.uint64)
        texts = np.repeat(np.unique(digests, return_inverse=True)[1], np.array(self._num_samples, dtype=np.int64))
        return Documents(
            samples=Samples(*open_tokens(self._directory, self._dtype), _compute_starts(self._lengths), texts),
            first_samples=_compute_starts(self._num_samples),
            digests=digests,
            sources=np.array(self._sources, dtype=np.int64),
            held_out=splits == 1,
            has_source_split=splits >= 0,
            is_undivided=np.array(self._undivided, dtype=np.bool_),
        )


def _compute_starts(lengths: array[int]) -> IntArray:
    """Return [len(lengths) + 1]: the start of each item, then the end of the last."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])
