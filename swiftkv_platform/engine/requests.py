"""Prompts and parameters to sequences; what cannot be answered is refused here, with the numbers. Knows no schedule."""

from __future__ import annotations

import hashlib
import random
from collections import abc
from typing import Any

from swiftkv_platform.engine.config import MAX_SEED, EngineConfig, SamplingParams
from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer
from swiftkv_platform.engine.loading import LoadedModel
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.errors import InvalidInputError

Prompt = str | abc.Sequence[int]
"""Text, or token ids."""


class RequestReader:
    """Makes the sequences of a request, one for each of its `n` samples."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, *, num_slots: int) -> None:
        self._tokenizer = loaded.tokenizer
        self._eos_token_ids = loaded.eos_token_ids
        self._max_model_len = loaded.context_length
        self._vocab_size: int = loaded.model.config.get_text_config().vocab_size
        self._has_exit_head = bool(getattr(loaded.model.config, "early_exit", False))
        self._num_slots = num_slots
        self._random = random.Random(config.seed)  # noqa: S311  # sampling, not secrets
        self._arrivals = 0

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        constraint: Constraint | None = None,
    ) -> list[Sequence]:
        """The sequences of a request; `constraint` is that of its first answer, the others get copies.

        Raises:
            InvalidInputError: an empty or too long prompt, a token id outside the vocabulary, parameters that this
                model cannot serve, more tokens than the KV cache holds.
        """
        token_ids = tuple(self._encode(prompt))
        self._check_params(params)
        self._check_fits(len(token_ids), params)
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        self._arrivals += 1
        others = [None if constraint is None else constraint.fresh() for _ in range(params.n - 1)]
        return [
            Sequence(
                request_id,
                token_ids,
                params,
                seed=_sample_seed(seed, index),
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                max_model_len=self._max_model_len,
                detokenizer=self._new_detokenizer(params),
                arrival=self._arrivals,
                index=index,
                priority=priority,
                tenant=tenant,
                constraint=own,
            )
            for index, own in enumerate([constraint, *others])
        ]

    def _check_fits(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        num_output_tokens = min(params.max_tokens, self._max_model_len - num_prompt_tokens)
        needed = num_prompt_tokens + num_output_tokens - 1  # the last token's KV is never needed
        if needed > self._num_slots:
            raise InvalidInputError(
                f"the request needs the KV of {needed} tokens ({num_prompt_tokens} of the prompt, up to "
                f"{num_output_tokens} of the answer); the whole cache holds {self._num_slots}: shorten one of them, or "
                "raise kv_cache_bytes",
                field="prompt",
                value=num_prompt_tokens,
            )

    def _check_params(self, params: SamplingParams) -> None:
        mode = params.early_exit.mode
        if mode != "off" and not self._has_exit_head:
            raise InvalidInputError(
                f"early_exit is {mode!r}, but this model has no exit head; 'off' is accepted, or a model that was "
                "converted with early_exit=True",
                field="early_exit",
                value=mode,
            )
        outside = next((token for token in params.logit_bias if token >= self._vocab_size), None)
        if outside is not None:
            raise InvalidInputError(
                f"logit_bias has the token id {outside}; this model's vocabulary accepts 0..{self._vocab_size - 1}",
                field="logit_bias",
                value=outside,
            )

    def _new_detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            if params.stop:
                raise InvalidInputError(
                    "stop needs a tokenizer, which this model's directory lacks; give stop_token_ids",
                    field="stop",
                    value=list(params.stop),
                )
            return None

        def decode(token_ids: abc.Sequence[int]) -> str:
            text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return text

        return IncrementalDetokenizer(decode, params.stop)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt the model can answer."""
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not prompt or not token_ids:
            raise InvalidInputError("prompt is empty; give at least one token", field="prompt", value=prompt)
        if len(token_ids) >= self._max_model_len:
            raise InvalidInputError(
                f"prompt has {len(token_ids)} tokens; the context of {self._max_model_len} tokens holds prompts of "
                f"1..{self._max_model_len - 1} tokens, and their answer",
                field="prompt",
                value=len(token_ids),
            )
        for token_id in token_ids:
            if not self._is_token_id(token_id):
                raise InvalidInputError(
                    f"prompt has the token id {token_id!r}; this model's vocabulary accepts 0..{self._vocab_size - 1}",
                    field="prompt",
                    value=token_id,
                )
        return token_ids

    def _is_token_id(self, token_id: Any) -> bool:
        return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < self._vocab_size

    def _tokenize(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidInputError(
                "prompt is text, but this model's directory has no tokenizer; give a list of token ids",
                field="prompt",
                value=f"{text[:32]}...",
            )
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids


def _sample_seed(seed: int, index: int) -> int:
    """Seed of a request's sample; the first has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") & MAX_SEED
