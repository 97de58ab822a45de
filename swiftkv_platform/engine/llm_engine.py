"""The engine: requests in, tokens out, one step at a time. Not thread-safe; knows no HTTP and no event loop."""

from __future__ import annotations

import random
from collections import abc
from pathlib import Path
from typing import Any, Self

import torch
from ulid import ULID

from swiftkv_platform.engine.config import MAX_SEED, EngineConfig, SamplingParams
from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.engine.model_runner import ModelRunner
from swiftkv_platform.engine.sampler import sample
from swiftkv_platform.engine.scheduler import Scheduler
from swiftkv_platform.engine.sequence import RequestOutput, Sequence
from swiftkv_platform.errors import InvalidInputError

Prompt = str | abc.Sequence[int]
"""Text, or token ids."""


class LLMEngine:
    """Generates text with one model, dense or SwiftKV, for requests served in the order they came."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.max_model_len = loaded.context_length
        """Tokens of prompt and answer together."""
        self.vocab_size: int = loaded.model.config.get_text_config().vocab_size
        self.model_config = loaded.model.config
        self._tokenizer = loaded.tokenizer
        self._eos_token_ids = loaded.eos_token_ids
        self._runner = ModelRunner(loaded.model)
        self._scheduler = Scheduler()
        self._sequences: dict[str, Sequence] = {}
        self._random = random.Random(config.seed)  # noqa: S311  # sampling, not secrets

    @classmethod
    def from_pretrained(cls, path: str | Path, config: EngineConfig | None = None) -> Self:
        """Load a Hugging Face directory or hub id. Raises `ModelError`."""
        config = config or EngineConfig()
        return cls(load_model(path, config), config)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a request and return its id.

        Raises:
            InvalidInputError: an empty or too long prompt, a token id outside the vocabulary, an id in use.
        """
        params = params or SamplingParams()
        request_id = request_id or f"gen_{ULID()}"
        if request_id in self._sequences:
            raise InvalidInputError(
                f"request_id {request_id!r} is in use; give each running request its own",
                field="request_id",
                value=request_id,
            )
        sequence = self._new_sequence(request_id, self._encode(prompt), params)
        self._sequences[request_id] = sequence
        self._scheduler.add(sequence)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Give every scheduled sequence one more token; empty when no request is unfinished."""
        sequences = self._scheduler.schedule()
        for sequence, logits in zip(sequences, self._runner.run(sequences), strict=True):
            sequence.append(sample(logits, sequence.params, sequence.generator))
            if sequence.finish_reason is not None:
                self._forget(sequence)
        return [sequence.output() for sequence in sequences]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Take a request back and free what it holds; None if it is not unfinished."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish("abort")
        self._forget(sequence)
        return sequence.output()

    def generate(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, in their order; `params` is one for all or one for each.

        Raises:
            InvalidInputError: as `add_request`; then none of the prompts is answered.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise InvalidInputError("prompts is a single prompt; give a list of prompts", field="prompts")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, abc.Sequence) else params
        if len(each) != len(prompts):
            raise InvalidInputError(
                f"params has {len(each)} entries for {len(prompts)} prompts; give one for all or one for each",
                field="params",
                value=len(each),
            )
        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            for prompt, one in zip(prompts, each, strict=True):
                request_ids.append(self.add_request(prompt, one))
            while not outputs.keys() >= set(request_ids):
                outputs.update((output.request_id, output) for output in self.step() if output.finished)
        finally:
            for request_id in request_ids:
                self.abort(request_id)
        return [outputs[request_id] for request_id in request_ids]

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    @property
    def num_requests_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_requests_waiting(self) -> int:
        return self._scheduler.num_waiting

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._runner.release(sequence)
        del self._sequences[sequence.request_id]

    def _new_sequence(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Sequence:
        seed = self._random.randint(0, MAX_SEED) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return Sequence(
            request_id,
            prompt_token_ids,
            params,
            generator=torch.Generator(device=self._runner.device).manual_seed(seed),
            detokenizer=self._new_detokenizer(params),
            stop_token_ids=eos | frozenset(params.stop_token_ids),
            max_model_len=self.max_model_len,
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
        if len(token_ids) >= self.max_model_len:
            raise InvalidInputError(
                f"prompt has {len(token_ids)} tokens; the context of {self.max_model_len} tokens holds prompts of "
                f"1..{self.max_model_len - 1} tokens, and their answer",
                field="prompt",
                value=len(token_ids),
            )
        for token_id in token_ids:
            if not self._is_token_id(token_id):
                raise InvalidInputError(
                    f"prompt has the token id {token_id!r}; this model's vocabulary accepts 0..{self.vocab_size - 1}",
                    field="prompt",
                    value=token_id,
                )
        return token_ids

    def _is_token_id(self, token_id: Any) -> bool:
        return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < self.vocab_size

    def _tokenize(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidInputError(
                "prompt is text, but this model's directory has no tokenizer; give a list of token ids",
                field="prompt",
                value=f"{text[:32]}...",
            )
        token_ids: list[int] = self._tokenizer(text)["input_ids"]
        return token_ids
