"""Tokenizers whose tokens can be counted by eye."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = 256, 257
WORDS = ("▁", "▁the", "the", "▁cat", "a", "é")
"""Pieces of `sentence_tokenizer`, with ids from 258 on."""


def byte_tokenizer(
    *, chat_template: str | None = None, special: bool = True, add_bos_token: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id below 256 per byte. `special`: with BOS 256 and EOS 257; `add_bos_token`: texts
    start with BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos_token} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like tokenizer: bytes as `<0x..>`, BOS, EOS, and `WORDS`; it drops a text's first
    space."""
    bytes_first = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "</s>", *WORDS]
    vocab = {piece: number for number, piece in enumerate(bytes_first)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
