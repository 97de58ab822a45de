"""Needles in haystacks that a model finds, without a harness: for a look at many depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from swiftkv_platform.evaluation.harness.needle import ANSWER_TOKENS, needle_prompt


@dataclass(frozen=True)
class Needles:
    """Prompts of about one length, each with a number in it that it asks for."""

    length: int
    """Tokens of a prompt, the chat template's own aside."""
    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]
    tokenizer: Any

    @classmethod
    def create(cls, tokenizer: Any, length: int, num_samples: int) -> Self:
        """The evaluation's prompts, through the chat template where the tokenizer has one."""
        texts, answers = zip(
            *(needle_prompt(tokenizer, length, i, num_samples) for i in range(num_samples)), strict=True
        )
        if tokenizer.chat_template:
            chats = [[{"role": "user", "content": text}] for text in texts]
            prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        else:
            prompts = tokenizer(list(texts))["input_ids"]
        return cls(length, prompts, answers, tokenizer)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max(map(len, self.prompts)) + ANSWER_TOKENS

    @torch.no_grad()
    def share_found(self, model: Any) -> float:
        """Share of the numbers that are in the model's greedy answers."""
        found = 0
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            ids = torch.tensor([prompt], device=model.device)
            settings = {
                "max_new_tokens": ANSWER_TOKENS,
                "do_sample": False,
                "pad_token_id": self.tokenizer.pad_token_id,
            }
            written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :]
            found += answer in self.tokenizer.decode(written)
        return found / len(self.prompts)
