"""A teacher behind an OpenAI completions API (`data.sources[].complete.endpoint`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai

from swiftkv_platform.errors import GenerationError, InvalidInputError
from swiftkv_platform.specs.data import CompletionSpec

if TYPE_CHECKING:
    from openai.types import Completion

    from swiftkv_platform.engine import SamplingParams

API_KEY_VARIABLE = "TEACHER_API_KEY"
_CONCURRENT_REQUESTS = 32
_MAX_RETRIES = 10
"""Retries of a request that fails or is refused for load, about a minute in total; then the attempt fails, and the next
one goes on with the first shard that is missing."""
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class ServedAnswer:
    token_ids: list[int]
    """Tokens of the answer, with EOS if the teacher generated it."""
    text: str


class ServedTeacher:
    """The teacher behind `settings.endpoint`, with the engine's `generate`.

    Prompts are sent as token ids, so the served model must have the teacher's tokenizer. The server's token ids are
    used if it returns them (`return_token_ids`, as vLLM does), else its text is tokenized.

    Args:
        field: path of `settings` in the spec, for errors.
        tokenizer: the teacher's.
    """

    def __init__(self, settings: CompletionSpec, field: str, tokenizer: Any) -> None:
        assert settings.endpoint is not None, "the spec requires `model` with `endpoint`"
        self._settings, self._field, self._tokenizer = settings, field, tokenizer
        self._client = openai.OpenAI(
            base_url=settings.endpoint,
            api_key=os.environ.get(API_KEY_VARIABLE) or "none",
            max_retries=_MAX_RETRIES,
            timeout=_TIMEOUT_S,
            # The operator allows origins, and a redirect may lead to another one.
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )
        self._returns_token_ids = True
        self._num_prompt_tokens = self._num_completion_tokens = 0

    def generate(self, prompts: Sequence[list[int]], parameters: Sequence[SamplingParams]) -> list[ServedAnswer]:
        """Return the answers in order.

        Raises:
            InvalidInputError: the server refuses the key, the model or a request.
            GenerationError: the server cannot be reached, or fails after all retries.
        """
        with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
            waiting = [pool.submit(self._send_prompt, *request) for request in zip(prompts, parameters, strict=True)]
            try:
                completions = [each.result() for each in waiting]
            finally:
                pool.shutdown(cancel_futures=True)
        return [self._read_answer(*each) for each in zip(completions, parameters, strict=True)]

    def describe_usage(self) -> str:
        """Describe what the server has counted so far, which it may charge for."""
        return (
            f"{self._settings.endpoint} counted {self._num_prompt_tokens} prompt tokens and "
            f"{self._num_completion_tokens} completion tokens of {self._settings.model}"
        )

    def _send_prompt(self, prompt: list[int], parameters: SamplingParams) -> Completion:
        """Send a request, in a thread of its own."""
        asks_token_ids = self._returns_token_ids
        try:
            return self._client.completions.create(
                model=self._settings.model or "",
                prompt=prompt,
                max_tokens=parameters.max_tokens,
                temperature=parameters.temperature,
                top_p=parameters.top_p,
                seed=parameters.seed,
                extra_body={"return_token_ids": True} if asks_token_ids else None,
            )
        except openai.BadRequestError as error:
            if not asks_token_ids or "return_token_ids" not in error.message:
                raise self._explain_error(error) from error
            self._returns_token_ids = False
            return self._send_prompt(prompt, parameters)
        except openai.OpenAIError as error:
            raise self._explain_error(error) from error

    def _read_answer(self, completion: Completion, parameters: SamplingParams) -> ServedAnswer:
        if completion.usage is not None:
            self._num_prompt_tokens += completion.usage.prompt_tokens
            self._num_completion_tokens += completion.usage.completion_tokens
        choice = completion.choices[0]
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is None:
            token_ids = self._tokenizer(choice.text, add_special_tokens=False)["input_ids"][: parameters.max_tokens]
            if choice.finish_reason == "stop":
                token_ids.append(self._tokenizer.eos_token_id)
        return ServedAnswer(token_ids, choice.text)

    def _explain_error(self, error: openai.OpenAIError) -> InvalidInputError | GenerationError:
        endpoint, model, field = self._settings.endpoint, self._settings.model, f"{self._field}.endpoint"
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            why = f", which rejects the key; set {API_KEY_VARIABLE} in the workers' environment"
            return InvalidInputError.for_field(field, endpoint, why)
        if isinstance(error, openai.NotFoundError):
            why = f", which {endpoint} does not serve: {error.message}"
            return InvalidInputError.for_field(f"{self._field}.model", model, why)
        is_refused = isinstance(error, openai.APIStatusError) and error.status_code < 500 and error.status_code != 429
        if is_refused:
            return InvalidInputError.for_field(field, endpoint, f", which refuses a request: {error}")
        message = f"{field} is {endpoint!r}, which failed after {_MAX_RETRIES} retries: {error}"
        return GenerationError(message, field=field, value=endpoint)
