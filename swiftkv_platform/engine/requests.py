"""Validation and tokenization of requests, and their conversion to sequences.

There are three steps, so that a long text does not delay other requests: `validate` returns at once and does not
tokenize, `tokenize` runs in `TokenizerThreads`, and `make_sequences` in the engine's thread. Each rule is checked in
one of them. A tokenizer releases Python's global lock, so the model and the event loop run on meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer, StopString, Vocabulary
from swiftkv_platform.engine.fairness import FairLimit, FairThreadPool
from swiftkv_platform.engine.grammars import Constraint
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.engine.sequence import Sequence
from swiftkv_platform.errors import ContextLengthError, EngineDeadError, InvalidInputError
from swiftkv_platform.model.tokenizers import get_max_bytes_per_token, get_special_ids
from swiftkv_platform.specs.base import MAX_BYTES_PER_TOKEN, MAX_PROMPT_LOGPROBS, MAX_SEED
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.sampling import SamplingParams
from swiftkv_platform.web.limiters import Sender

ResultT = TypeVar("ResultT")
NUM_SHORT_TEXT_THREADS = 2
MAX_SHORT_TEXT_BYTES = 1 << 16
"""Max bytes of a short text. Longer texts share one thread, because a tokenizer takes much memory for each."""
Prompt = str | abc.Sequence[int]


@dataclass(frozen=True)
class TokenizedRequest:
    """A valid, tokenized request with its prepared stop strings."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    stop_strings: tuple[StopString, ...]
    skipped_stop_texts: Mapping[int, str]
    """Texts of special tokens that occur in stop strings, by token id."""


class InputProcessor:
    """Validates and tokenizes requests, and makes their sequences, one per sample (`n`)."""

    def __init__(
        self,
        model: ModelDescription,
        config: EngineConfig,
        *,
        num_slots: int,
        adapter: str | None = None,
        adapter_digest: str = "",
        arrivals: abc.Iterator[int] | None = None,
    ) -> None:
        """Make the processor of a model, or of an adapter of an engine's model. `arrivals`: numbers of all requests of
        the engine."""
        self._adapter, self._adapter_digest = adapter, adapter_digest
        self.arrivals = itertools.count(1) if arrivals is None else arrivals
        self._tokenizer = model.tokenizer
        self._eos_token_ids = model.eos_token_ids
        self._max_model_len = model.context_length
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._num_token_ids = model.num_token_ids
        self._has_exit_head = model.has_exit_head
        self._deep_tail = model.deep_tail
        self._num_slots = num_slots
        self.vocabulary = Vocabulary(model.tokenizer)
        self._random = random.Random(config.seed)  # noqa: S311  # sampling, not secrets
        bytes_per_token, self._silent = MAX_BYTES_PER_TOKEN, frozenset[int]()
        if self._tokenizer is not None:
            # The first call resets the truncation and padding of the tokenizer's file. Later calls do not change the
            # tokenizer, so they are thread-safe.
            self._tokenizer("")
            bytes_per_token = min(get_max_bytes_per_token(self._tokenizer) or bytes_per_token, bytes_per_token)
            self._silent = get_special_ids(self._tokenizer)
        self.max_prompt_bytes = config.max_prompt_bytes or self._max_model_len * bytes_per_token

    def validate(self, prompts: abc.Iterable[Prompt], params: SamplingParams) -> None:
        """Check a request as far as possible without tokenizing. Raises `InvalidInputError`: an empty or too long
        prompt, or parameters that this model cannot serve."""
        self._check_params(params)
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_text(prompt)
            if not prompt:
                raise _make_empty_prompt_error(prompt)
            if not isinstance(prompt, str):
                self._check_length(self._count_kept_tokens(len(prompt), params))

    def check_text(self, *texts: str, field: str = "prompt") -> None:
        """Raise `InvalidInputError` if texts are together too long to be tokenized, or there is no tokenizer."""
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
                max_tokens=self._max_model_len,
            )

    def tokenize(self, prompt: Prompt, params: SamplingParams) -> TokenizedRequest:
        """Tokenize a request that `validate` has accepted. Blocks while tokenizing; any thread may call it. Raises
        `InvalidInputError`: a too long prompt, a token id outside the vocabulary, log-probabilities of too many tokens,
        or more tokens than the KV cache holds."""
        token_ids = tuple(self._encode_prompt(prompt, params))
        self._check_kv_cache_size(len(token_ids), params)
        self._check_logprobs(len(token_ids), params)
        return TokenizedRequest(
            token_ids, params, tuple(map(StopString, params.stop)), self._find_skipped_stop_texts(params)
        )

    def make_sequences(
        self,
        request_id: str,
        request: TokenizedRequest,
        *,
        priority: int = 0,
        sender: Sender = Sender(),  # noqa: B008  # immutable
        constraint: Constraint | None = None,
    ) -> list[Sequence]:
        """Make the sequences of a request. `constraint`: used by the first sample; the other samples get copies."""
        params = request.params
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        arrival = next(self.arrivals)
        others = [
            None if constraint is None else constraint.copy(constraint.name, constraint.cpu_time)
            for _ in range(params.n - 1)
        ]
        return [
            Sequence(
                request_id,
                request.token_ids,
                params,
                seed=_derive_sample_seed(seed, index),
                stop_token_ids=eos | self._filter_known_tokens(params.stop_token_ids),
                max_model_len=self._max_model_len,
                excluded_token_ids=self._get_excluded_token_ids(params),
                detokenizer=self._make_detokenizer(request),
                arrival=arrival,
                index=index,
                priority=priority,
                sender=sender,
                constraint=own,
                deep_tail=self._deep_tail,
                adapter=self._adapter,
                adapter_digest=self._adapter_digest,
            )
            for index, own in enumerate([constraint, *others])
        ]

    def _check_kv_cache_size(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        num_output_tokens = min(params.max_tokens, self._max_model_len - num_prompt_tokens)
        # The KV of the last generated token is never read.
        needed = num_prompt_tokens + max(num_output_tokens - 1, 0)
        if needed > self._num_slots:
            raise ContextLengthError(
                f"the request needs KV cache for {needed} tokens ({num_prompt_tokens} of the prompt, up to "
                f"{num_output_tokens} of the output); the whole cache holds {self._num_slots}: shorten one of them, or "
                "raise kv_cache_bytes",
                field="prompt",
                value=num_prompt_tokens,
                max_tokens=self._num_slots + 1,
            )

    def _check_logprobs(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        wanted = 0 if params.prompt_logprobs is None else (params.prompt_logprobs + 1) * num_prompt_tokens
        if wanted > MAX_PROMPT_LOGPROBS:
            raise InvalidInputError.for_field(
                "prompt_logprobs",
                params.prompt_logprobs,
                f"; the max is {MAX_PROMPT_LOGPROBS // num_prompt_tokens - 1} for {num_prompt_tokens} prompt tokens",
            )

    def _check_params(self, params: SamplingParams) -> None:
        if not self._has_exit_head:
            params.require_no_early_exit(
                ", but this model has no exit head; use 'off', or a model that was converted with early_exit=True"
            )
        if params.structured_outputs is not None:
            params.structured_outputs.check_schema_supported()
        allowed, excluded = params.allowed_token_ids, self._get_excluded_token_ids(params)
        self._check_token_ids("logit_bias", params.logit_bias, self._vocab_size)
        self._check_token_ids("allowed_token_ids", allowed or (), self._num_token_ids)
        if len(excluded) >= self._num_token_ids if allowed is None else excluded.issuperset(allowed):
            raise InvalidInputError.for_field(
                "min_tokens",
                params.min_tokens,
                ", and stop_token_ids leave no allowed token of the vocabulary; give fewer stop tokens",
            )
        if self._tokenizer is None and params.stop:
            raise InvalidInputError(
                "stop needs a tokenizer, which this model's directory lacks; give stop_token_ids",
                field="stop",
                value=list(params.stop),
            )

    def _get_excluded_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens banned from the first `min_tokens` tokens: stop tokens, and end-of-sequence tokens even
        with `ignore_eos`."""
        if not params.min_tokens:
            return frozenset()
        return self._filter_known_tokens(self._eos_token_ids | frozenset(params.stop_token_ids))

    def _filter_known_tokens(self, token_ids: abc.Iterable[int]) -> frozenset[int]:
        return frozenset(token for token in token_ids if token < self._num_token_ids)

    def decode(self, token_ids: abc.Sequence[int], *, skip_special_tokens: bool = False) -> str:
        assert self._tokenizer is not None, "`validate` refuses text without a tokenizer"
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def make_prompt_detokenizer(self) -> IncrementalDetokenizer | None:
        """Make a detokenizer that shows special tokens and records offsets; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(self.decode, get_text=self.vocabulary.get_text)

    def _make_detokenizer(self, request: TokenizedRequest) -> IncrementalDetokenizer | None:
        params = request.params
        skip = params.skip_special_tokens
        if self._tokenizer is None:
            return None
        return IncrementalDetokenizer(
            partial(self.decode, skip_special_tokens=skip),
            request.stop_strings,
            self._silent if skip else frozenset(),
            min_tokens=params.min_tokens,
            include_stop_string=params.include_stop_str_in_output,
            skipped_stop_texts=request.skipped_stop_texts if skip else {},
            get_text=None if params.logprobs is None else self.vocabulary.get_text,
        )

    def _find_skipped_stop_texts(self, params: SamplingParams) -> dict[int, str]:
        if not params.stop:
            return {}
        texts = {token_id: self.vocabulary.get_text(token_id) for token_id in self._silent}
        return {
            token_id: text for token_id, text in texts.items() if text and any(text in stop for stop in params.stop)
        }

    def _count_kept_tokens(self, num_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens of a prompt `truncate_prompt_tokens` keeps."""
        wanted = params.truncate_prompt_tokens
        if wanted is None:
            return num_tokens
        return min(num_tokens, max(self._max_model_len - max(params.max_tokens, 1), 1) if wanted < 0 else wanted)

    def _encode_prompt(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Tokenize a prompt, keep its last tokens (`truncate_prompt_tokens`), and check them."""
        token_ids = self._tokenize_text(prompt) if isinstance(prompt, str) else list(prompt)
        token_ids = token_ids[len(token_ids) - self._count_kept_tokens(len(token_ids), params) :]
        if isinstance(prompt, str):  # `validate` has checked the number of token ids
            if not token_ids:
                raise _make_empty_prompt_error(prompt)
            self._check_length(len(token_ids))
        self._check_token_ids("prompt", token_ids, self._vocab_size)
        return token_ids

    def _check_token_ids(self, field: str, token_ids: abc.Iterable[int], limit: int) -> None:
        for token_id in token_ids:
            is_number = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not (is_number and 0 <= token_id < limit):
                raise InvalidInputError(
                    f"{field} has the token id {token_id!r}; this model's vocabulary accepts 0..{limit - 1}",
                    field=field,
                    value=token_id,
                )

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"prompt has {num_tokens} tokens; the context of {self._max_model_len} tokens holds prompts of "
                f"1..{self._max_model_len - 1} tokens, plus their output",
                field="prompt",
                value=num_tokens,
                max_tokens=self._max_model_len,
            )

    def _tokenize_text(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "`validate` refuses text without a tokenizer"
        token_ids: list[int] = self._tokenizer(text, return_attention_mask=False)["input_ids"]
        return token_ids


def _make_empty_prompt_error(prompt: Prompt) -> InvalidInputError:
    return InvalidInputError("prompt is empty; give at least one token", field="prompt", value=prompt)


def check_request_id(request_id: str, used: abc.Container[str]) -> None:
    if request_id in used:
        raise InvalidInputError(
            f"request_id {request_id!r} is in use; give each running request its own id",
            field="request_id",
            value=request_id,
        )


def _derive_sample_seed(seed: int, index: int) -> int:
    """Return the seed of a sample. The first sample uses the request's seed."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") & MAX_SEED


class TokenizerThreads:
    """Threads for tokenization and detokenization. A long text delays only other long texts.

    Args:
        max_waiting: max number of a sender's running and waiting calls without an admitted request, as in
            `find_exceeded_share`. More are refused at once.
    """

    def __init__(self, max_waiting: int) -> None:
        self._short = FairThreadPool(NUM_SHORT_TEXT_THREADS, "reader")
        self._long = FairThreadPool(1, "reader-long")
        self._waiting = FairLimit(max_waiting, "texts", "wait to be tokenized")

    async def run(self, call: Callable[[], ResultT], num_bytes: int, sender: Sender) -> ResultT:
        """Run `call` for an admitted request. `num_bytes`: approximate size of its text. Raises `EngineDeadError`: the
        threads were closed."""
        return await (self._long if num_bytes > MAX_SHORT_TEXT_BYTES else self._short).run(sender, call)

    async def run_unadmitted(self, call: Callable[[], ResultT], num_bytes: int, sender: Sender) -> ResultT:
        """Run `call` without an admitted request. Raises `QueueFullError`, and as `run`."""
        with self._waiting.limit_call(sender):
            return await self.run(call, num_bytes, sender)

    def close(self) -> None:
        """Refuse new calls, without waiting for running ones."""
        for threads in (self._short, self._long):
            threads.close(EngineDeadError("the engine was shut down"))
