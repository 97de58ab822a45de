"""Incremental text: whole characters only, monotone, equal to decoding at once, cut at the first stop string."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from swiftkv_platform.engine.detokenizer import REPLACEMENT_CHARACTER, IncrementalDetokenizer, Vocabulary
from tests.support.fakes.tokenizers import BOS, EOS, WORDS, byte_tokenizer, sentence_tokenizer


def decode_bytes(token_ids: Sequence[int]) -> str:
    """Decode tokens that are single bytes, as byte-level BPE does."""
    return bytes(token_ids).decode(errors="replace")


def texts_shown(token_ids: Sequence[int], stop: tuple[str, ...] = ()) -> list[str]:
    """The text that is shown after each token, and after the end."""
    detokenizer = IncrementalDetokenizer(decode_bytes, stop)
    shown = []
    for token_id in token_ids:
        detokenizer.append(token_id)
        shown.append(detokenizer.text)
    detokenizer.finish()
    return [*shown, detokenizer.text]


def expected_text(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first."""
    ends = [(text.find(string) + len(string), string) for string in stop if string in text]
    if not ends:
        return text
    end = min(ends)[0]
    return text[: min(text[:end].find(string) for at, string in ends if at == end)]


def test_a_character_appears_with_its_last_byte() -> None:
    shown = texts_shown("aé€🙂z".encode())
    assert shown == ["a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€", "aé€", "aé€🙂", "aé€🙂z", "aé€🙂z"]
    assert texts_shown("a€".encode()[:-1]) == ["a", "a", "a", "a" + REPLACEMENT_CHARACTER], (
        "half a character only at the end"
    )


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple))
def test_any_text_streams_whole_and_stops_where_it_should(text: str, stop: tuple[str, ...]) -> None:
    shown = texts_shown(text.encode(), stop)
    assert shown[-1] == expected_text(text, stop)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_decode_as_they_do_at_once(data: bytes) -> None:
    shown = texts_shown(data)
    assert shown[-1] == decode_bytes(data)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


def test_a_leading_space_that_the_decoder_drops_survives_streaming() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2, "</s>": 3}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    for token_id in [0, 3, 1, 2, 0]:
        detokenizer.append(token_id)
    assert detokenizer.text == "the cats the"


def test_byte_fallback_keeps_what_it_has_shown() -> None:
    """A SentencePiece decoder turns a whole run of bytes into U+FFFD while its last character is incomplete."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    shown = []
    for token_id in "€€é".encode():
        detokenizer.append(token_id)
        shown.append(detokenizer.text)
    assert shown == ["", "", "€", "€", "€", "€€", "€€", "€€é"]


def test_tokens_without_text_do_not_make_each_one_dearer() -> None:
    """A caller may force special tokens, which decode to nothing, up to the length of the context."""
    sizes = []

    def decode(token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return decode_bytes([token for token in token_ids if token < 256])

    detokenizer = IncrementalDetokenizer(decode, skipped_token_ids=frozenset({256}))
    for token_id in [*b"ab", *[256] * 5000, *b"c"]:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.text == "abc"
    assert max(sizes) <= 8


def test_a_stop_string_costs_the_same_a_token_however_long_it_is() -> None:
    """Text that is held back because it may begin a stop string is compared once a character."""

    def seconds(length: int) -> float:
        detokenizer = IncrementalDetokenizer(decode_bytes, ("a" * length + "b",))
        for token_id in b"a" * 2000:
            detokenizer.append(token_id)
        start = time.perf_counter()
        for token_id in (b"a" * 50 + b"c") * 10:
            detokenizer.append(token_id)
        return time.perf_counter() - start

    assert min(seconds(1000) for _ in range(5)) < 10 * min(seconds(10) for _ in range(5))


@given(
    st.text(alphabet="ab", max_size=60), st.lists(st.text(alphabet="ab", min_size=1, max_size=8), max_size=3).map(tuple)
)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    for at, shown in enumerate(texts_shown(text.encode(), stop)[:-1], start=1):
        so_far = text[:at]
        if any(string in so_far for string in stop):
            break
        held = max(
            (size for string in stop for size in range(len(string)) if so_far.endswith(string[:size])), default=0
        )
        assert shown == so_far[: at - held]


WORD = {piece: 258 + number for number, piece in enumerate(WORDS)}


@pytest.mark.parametrize("make", [byte_tokenizer, sentence_tokenizer])
def test_a_tokens_text_and_bytes_are_the_vocabularys(make: Callable[[], Any]) -> None:
    tokenizer = make()
    vocabulary = Vocabulary(tokenizer)
    text = "a é€🙂\x00\xff\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(vocabulary.get_bytes, ids)).decode().removeprefix(" ") == text
    every = [vocabulary.get_bytes(token_id) for token_id in range(256)]
    assert sorted(every) == [bytes([byte]) for byte in range(256)]
    texts = [vocabulary.get_text(token_id) for token_id in range(258)]
    assert len(set(texts)) == 258, "tokens that are parts of characters have texts of their own"
    assert r"bytes:\xe2" in texts
    assert texts[256:] == ["<s>", "</s>"]
    assert (vocabulary.get_bytes(9999), vocabulary.get_text(9999)) == (b"", "")


def test_a_word_of_sentencepiece_keeps_its_space() -> None:
    vocabulary = Vocabulary(sentence_tokenizer())
    assert [vocabulary.get_text(WORD[piece]) for piece in WORDS] == [" ", " the", "the", " cat", "a", "é"]


def placed(token_ids: Sequence[int], tokenizer: Any, **options: Any) -> tuple[str, list[int]]:
    """The text of the tokens, and the offset of each token in it."""
    vocabulary = Vocabulary(tokenizer)
    detokenizer = IncrementalDetokenizer(tokenizer.decode, get_text=vocabulary.get_text, **options)
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    return detokenizer.text, detokenizer.offsets


@given(st.text(max_size=20))
def test_an_offset_is_where_the_character_begins(text: str) -> None:
    tokenizer = byte_tokenizer()
    shown, offsets = placed(tokenizer(text)["input_ids"], tokenizer)
    assert shown == text
    assert offsets == [at for at, character in enumerate(text) for _ in character.encode()]


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        (["▁the", "▁cat"], "the cat", [0, 3]),
        ([0xE2, "a"], REPLACEMENT_CHARACTER + "a", [0, 1]),
        (["▁the", 0xE2, 0x82, 0xAC, "▁cat"], "the€ cat", [0, 3, 3, 3, 4]),
        ([0xE2, 0x82, 0xAC, 0xC3, 0xA9, "a"], "€éa", [0, 0, 0, 1, 1, 2]),
    ],
    ids=str,
)
def test_offsets_in_text_of_sentencepiece(pieces: list[Any], text: str, offsets: list[int]) -> None:
    assert placed([WORD.get(piece, piece) for piece in pieces], sentence_tokenizer()) == (text, offsets)


def test_offsets_count_what_is_held_back() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("abENxEND")["input_ids"]
    assert placed(ids, tokenizer, stop=("END",)) == ("abENx", [*range(8)])


SPECIAL = {BOS: "<s>", EOS: "</s>"}


@pytest.mark.parametrize(
    ("stop", "include", "shown"),
    [
        ("<s>", False, "ab\n"),
        ("<s>", True, "ab\n<s>"),
        ("\n<s>", False, "ab"),
        ("\n<s>c", True, "ab\n<s>c"),
        ("<s>c</s>", False, "ab\n"),
        ("x<s>", False, "ab\ncd"),
    ],
)
def test_a_stop_string_may_name_special_tokens_which_are_not_shown(stop: str, include: bool, shown: str) -> None:
    tokenizer = byte_tokenizer()
    a, b, line, c, d = tokenizer("ab\ncd")["input_ids"]
    skipped_stop_texts = {token_id: text for token_id, text in SPECIAL.items() if text in stop}
    told = []
    detokenizer = IncrementalDetokenizer(
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        (stop,),
        frozenset(SPECIAL),
        include_stop_string=include,
        skipped_stop_texts=skipped_stop_texts,
    )
    for token_id in (a, b, line, BOS, c, EOS, d):
        detokenizer.append(token_id)
        told.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == shown
    assert all(shown.startswith(text) for text in told), "no streamed text is taken back"
