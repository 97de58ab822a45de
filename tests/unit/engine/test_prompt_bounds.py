"""Bound on the bytes of text per token: a prompt with more bytes than the bound times the context never fits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.tokenizers import get_max_bytes_per_token
from swiftkv_platform.specs.base import MAX_BYTES_PER_TOKEN
from tests.support.fakes.tokenizers import byte_tokenizer

WORDS = ["the cat  sat", "the hat   and the cat", "å ǻ 각 €"]


def byte_level(normalizer: Any = None, *added: AddedToken) -> Any:
    """Byte-level BPE with some merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece() -> Any:
    """BPE on characters with byte fallback, like Llama 2's."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "t": 257, "h": 258, "th": 259, "▁th": 260}
    merges = [("t", "h"), ("▁", "th")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "make",
    [byte_tokenizer, byte_level, lambda: byte_level(normalizers.NFC(), AddedToken("<|end|>")), sentencepiece],
    ids=["bytes", "byte level", "NFC", "SentencePiece"],
)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="the ca\u1100\u1161\u11a8\u0301\u030aA\u212b", max_size=60))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(make: Callable[[], Any], text: str) -> None:
    tokenizer = _made(make)
    bound = get_max_bytes_per_token(tokenizer)
    assert len(text.encode()) <= bound * len(tokenizer(text)["input_ids"])


@cache
def _made(make: Callable[[], Any]) -> Any:
    """Make a tokenizer once for all examples."""
    return make()


def word_level() -> Any:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_nothing_is_claimed_where_a_token_may_stand_for_any_text() -> None:
    assert get_max_bytes_per_token(word_level()) is None, "an unknown word of any length is one token"
    for normalizer in (normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("  ", " ")):
        assert get_max_bytes_per_token(byte_level(normalizer)) is None
    assert get_max_bytes_per_token(byte_level(None, AddedToken("<|mask|>", lstrip=True))) is None, "it strips spaces"


def test_the_bound_follows_the_vocabulary_unless_it_is_given(dense_dir: Any) -> None:
    def largest(**options: Any) -> int:
        return LLMEngine.from_pretrained(dense_dir, EngineConfig(**options)).input_processor.max_prompt_bytes

    assert largest() == 64 * len("</s>")
    assert largest(max_model_len=32) == 32 * len("</s>")
    assert largest(max_prompt_bytes=10) == 10
    engine = LLMEngine.from_pretrained(dense_dir, EngineConfig(max_prompt_bytes=10))
    with pytest.raises(InvalidInputError, match="prompt has 12 bytes of text; 10 bytes are accepted"):
        engine.add_request("é" * 6)
    assert MAX_BYTES_PER_TOKEN > 8, "written text has three to five bytes a token"
