"""A tokenizer whose tokens can be counted by eye: one a byte, and `<s>` and `</s>`."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS = 256, 257


def byte_tokenizer(*, chat_template: str | None = None, special: bool = True) -> PreTrainedTokenizerFast:
    """Byte b has some id below 256; `special` adds BOS 256 and EOS 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "eos_token": "</s>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **names)
