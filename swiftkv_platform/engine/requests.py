"""Prompts and parameters to sequences; what cannot be answered is refused here, with the numbers. Knows no schedule.

In three parts, so that a text of any length holds up no other request: `check` takes no time and tokenizes nothing,
`read` takes as long as the text does, in a thread of `Readers`, and `sequences` belongs to the engine's own. While it
works, a tokenizer lets go of Python's lock: the model and the event loop go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import abc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer, StopString, Vocabulary
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.errors import ContextLengthError, EngineDeadError, InvalidInputError, QueueFullError
from swiftkv_platform.model.tokenizers import max_bytes_per_token, special_ids
from swiftkv_platform.specs.base import MAX_BYTES_PER_TOKEN, MAX_PROMPT_LOGPROBS, MAX_SEED
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams

R = TypeVar("R")
NUM_SHORT = 2
"""Threads for short texts."""
LONG_BYTES = 1 << 16
"""A text of more has a thread that all long ones share, so that one at a time takes a tokenizer's memory."""
Prompt = str | abc.Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True)
class ReadRequest:
    """A request that can be answered: its tokens, and what its parameters need prepared."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    stops: tuple[StopString, ...]
    named: Mapping[int, str]
    """Texts of special tokens that stop strings name."""


class RequestReader:
    """Makes the sequences of a request, one for each of its `n` samples."""

    def __init__(self, model: ModelDescription, config: EngineConfig, *, num_slots: int) -> None:
        self._tokenizer = model.tokenizer
        self._eos_token_ids = model.eos_token_ids
        self._max_model_len = model.context_length
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._has_exit_head = bool(getattr(model.config, "early_exit", False))
        self._num_slots = num_slots
        self.vocabulary = Vocabulary(model.tokenizer)
        self._random = random.Random(config.seed)  # noqa: S311  # sampling, not secrets
        self._arrivals = 0
        bytes_per_token, self._silent = MAX_BYTES_PER_TOKEN, frozenset[int]()
        if self._tokenizer is not None:
            # The first call undoes truncation and padding in the tokenizer's file; later ones change nothing in it, so
            # that several threads may make them.
            self._tokenizer("")
            bytes_per_token = min(max_bytes_per_token(self._tokenizer) or bytes_per_token, bytes_per_token)
            self._silent = special_ids(self._tokenizer)
        self.max_prompt_bytes = config.max_prompt_bytes or self._max_model_len * bytes_per_token
        """Longest text that is tokenized."""

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Refuse what need not be read to be refused. Raises as `read`."""
        self._check_params(params)
        if isinstance(prompt, str):
            self.check_text(prompt)
        if not prompt:
            raise InvalidInputError("prompt is empty; give at least one token", field="prompt", value=prompt)
        if not isinstance(prompt, str):
            self._check_length(self._num_kept(len(prompt), params))

    def check_text(self, *texts: str, field: str = "prompt") -> None:
        """Refuse texts that together are too long to be tokenized. Raises `InvalidInputError`."""
        if self._tokenizer is None:
            raise InvalidInputError(
                f"{field} is text, but this model's directory has no tokenizer; give a list of token ids",
                field=field,
                value=f"{texts[0][:32]}..." if texts else None,
            )
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if size > self.max_prompt_bytes:
            raise ContextLengthError(
                f"{field} has {size} bytes of text; {self.max_prompt_bytes} bytes are accepted for the context of "
                f"{self._max_model_len} tokens (max_prompt_bytes)",
                field=field,
                value=size,
                most=self._max_model_len,
            )

    def read(self, prompt: Prompt, params: SamplingParams) -> ReadRequest:
        """Tokenize. Blocks for as long as the text takes; any thread may do so. Raises `InvalidInputError`: an empty or
        too long prompt, a token id outside the vocabulary, parameters that this model cannot serve, more tokens than
        the KV cache holds."""
        self.check(prompt, params)
        token_ids = tuple(self._encode(prompt, params))
        self._check_fits(len(token_ids), params)
        self._check_logprobs(len(token_ids), params)
        return ReadRequest(token_ids, params, tuple(map(StopString, params.stop)), self._named(params))

    def sequences(
        self,
        request_id: str,
        request: ReadRequest,
        *,
        priority: int = 0,
        tenant: str = "",
        constraint: Constraint | None = None,
    ) -> list[Sequence]:
        """The sequences of a request; `constraint` is that of its first answer, the others get copies."""
        params = request.params
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        self._arrivals += 1
        others = [None if constraint is None else constraint.sibling() for _ in range(params.n - 1)]
        return [
            Sequence(
                request_id,
                request.token_ids,
                params,
                seed=_sample_seed(seed, index),
                stop_token_ids=eos | self._known(params.stop_token_ids),
                max_model_len=self._max_model_len,
                excluded_token_ids=self._excluded(params),
                detokenizer=self._new_detokenizer(request),
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
        # The last generated token's KV is never needed.
        needed = num_prompt_tokens + max(num_output_tokens - 1, 0)
        if needed > self._num_slots:
            raise ContextLengthError(
                f"the request needs the KV of {needed} tokens ({num_prompt_tokens} of the prompt, up to "
                f"{num_output_tokens} of the answer); the whole cache holds {self._num_slots}: shorten one of them, or "
                "raise kv_cache_bytes",
                field="prompt",
                value=num_prompt_tokens,
                most=self._num_slots + 1,
            )

    def _check_logprobs(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        wanted = 0 if params.prompt_logprobs is None else (params.prompt_logprobs + 1) * num_prompt_tokens
        if wanted > MAX_PROMPT_LOGPROBS:
            raise InvalidInputError(
                f"prompt_logprobs is {params.prompt_logprobs}, for {num_prompt_tokens} tokens of the prompt; "
                f"{MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1} is accepted for that number",
                field="prompt_logprobs",
                value=params.prompt_logprobs,
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
        if params.structured_outputs is not None:
            params.structured_outputs.check_followed()
        outside = next((token for token in params.logit_bias if token >= self._vocab_size), None)
        if outside is not None:
            raise InvalidInputError(
                f"logit_bias has the token id {outside}; this model's vocabulary accepts 0..{self._vocab_size - 1}",
                field="logit_bias",
                value=outside,
            )
        allowed = params.allowed_token_ids
        outside = next((token for token in allowed or () if token >= self._vocab_size), None)
        if outside is not None:
            raise InvalidInputError(
                f"allowed_token_ids has {outside}; this model's vocabulary accepts 0..{self._vocab_size - 1}",
                field="allowed_token_ids",
                value=outside,
            )
        excluded = self._excluded(params)
        if len(excluded) >= self._vocab_size if allowed is None else excluded.issuperset(allowed):
            raise InvalidInputError.of(
                "min_tokens",
                params.min_tokens,
                ", and stop_token_ids leave no token of the vocabulary that is allowed; give fewer",
            )
        if self._tokenizer is None and params.stop:
            raise InvalidInputError(
                "stop needs a tokenizer, which this model's directory lacks; give stop_token_ids",
                field="stop",
                value=list(params.stop),
            )

    def _excluded(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that may not be among the first `min_tokens`: the ends of sequence too, ignored or not."""
        if not params.min_tokens:
            return frozenset()
        return self._known(self._eos_token_ids | frozenset(params.stop_token_ids))

    def _known(self, token_ids: abc.Iterable[int]) -> frozenset[int]:
        """Those that the model can put out; vLLM takes no others."""
        return frozenset(token for token in token_ids if token < self._vocab_size)

    def decoded(self, token_ids: abc.Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens. Not without a tokenizer."""
        assert self._tokenizer is not None, "checked before"
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def detokenizer_of_prompts(self) -> IncrementalDetokenizer | None:
        """A new detokenizer that shows special tokens and keeps offsets; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(self.decoded, text_of=self.vocabulary.text_of)

    def _new_detokenizer(self, request: ReadRequest) -> IncrementalDetokenizer | None:
        params = request.params
        skip = params.skip_special_tokens
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            partial(self.decoded, skip_special_tokens=skip),
            request.stops,
            self._silent if skip else frozenset(),
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            named=request.named if skip else {},
            text_of=None if params.logprobs is None else self.vocabulary.text_of,
        )

    def _named(self, params: SamplingParams) -> dict[int, str]:
        if not params.stop:
            return {}
        texts = {token_id: self.vocabulary.text_of(token_id) for token_id in self._silent}
        return {
            token_id: text for token_id, text in texts.items() if text and any(text in stop for stop in params.stop)
        }

    def _num_kept(self, num_tokens: int, params: SamplingParams) -> int:
        """Number of a prompt's tokens that `truncate_prompt_tokens` leaves."""
        wanted = params.truncate_prompt_tokens
        if wanted is None:
            return num_tokens
        return min(num_tokens, max(self._max_model_len - max(params.max_tokens, 1), 1) if wanted < 0 else wanted)

    def _encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt the model can answer, the last ones that are to be kept."""
        token_ids = self._tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        token_ids = token_ids[len(token_ids) - self._num_kept(len(token_ids), params) :]
        if not token_ids:
            raise InvalidInputError("prompt is empty; give at least one token", field="prompt", value=prompt)
        self._check_length(len(token_ids))
        for token_id in token_ids:
            is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not (is_number and 0 <= token_id < self._vocab_size):
                raise InvalidInputError(
                    f"prompt has the token id {token_id!r}; this model's vocabulary accepts 0..{self._vocab_size - 1}",
                    field="prompt",
                    value=token_id,
                )
        return token_ids

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"prompt has {num_tokens} tokens; the context of {self._max_model_len} tokens holds prompts of "
                f"1..{self._max_model_len - 1} tokens, and their answer",
                field="prompt",
                value=num_tokens,
                most=self._max_model_len,
            )

    def _tokenize(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "checked before"
        token_ids: list[int] = self._tokenizer(text, return_attention_mask=False)["input_ids"]
        return token_ids


def _sample_seed(seed: int, index: int) -> int:
    """Seed of a request's sample; the first has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") & MAX_SEED


class Readers:
    """Threads beside the engine's, in which texts become tokens and tokens text. A long text holds up other long ones,
    never a short one.

    Args:
        max_waiting: calls that may run or wait and belong to no admitted request; one more is refused at once.
    """

    def __init__(self, max_waiting: int) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT, thread_name_prefix="reader")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="reader-long")
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._closed = False

    async def run(self, call: Callable[[], R], num_bytes: int) -> R:
        """Run `call`, for a request that was admitted; `num_bytes` is about how much it reads. Raises
        `EngineDeadError` once closed."""
        if self._closed:
            raise EngineDeadError("the engine was shut down")
        pool = self._long if num_bytes > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def run_unadmitted(self, call: Callable[[], R], num_bytes: int) -> R:
        """Run `call` for a caller that no queue counts. Raises `QueueFullError`, and as `run`."""
        if self._num_waiting >= self._max_waiting:
            raise QueueFullError(f"queue full: {self._max_waiting} texts wait to be read; try again later")
        self._num_waiting += 1
        try:
            return await self.run(call, num_bytes)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Begin nothing more; callers that wait are cancelled. Returns at once."""
        self._closed = True
        for pool in (self._short, self._long):
            pool.shutdown(wait=False)
