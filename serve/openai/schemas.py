"""The bodies of OpenAI's completion routes, as far as this server answers them. Unknown keys are refused.

Field names and meanings: https://platform.openai.com/docs/api-reference; extensions as in vLLM's server.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serve.openai.messages import ChatMessage
from serve.sampling import PromptField, SamplingFields
from serve.tools.schemas import ToolFields
from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs.limits import MAX_MESSAGES


class StreamOptions(FrozenModel, strict=True, use_attribute_docstrings=False):
    include_usage: bool = False
    """Send a last event that has usage and no choices."""
    include_obfuscation: bool = False
    """Accepted, and without effect."""


class OpenAIFields(SamplingFields):
    """Fields that both completion routes take."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Accepted, and without effect."""
    priority: int = 0
    """Lower goes first."""
    # null means the default with OpenAI's clients.
    temperature: float | None = None  # type: ignore[assignment]
    top_p: float | None = None  # type: ignore[assignment]
    n: int | None = None  # type: ignore[assignment]
    presence_penalty: float | None = None  # type: ignore[assignment]
    frequency_penalty: float | None = None  # type: ignore[assignment]

    def sampling(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        nullable = ("temperature", "top_p", "n", "presence_penalty", "frequency_penalty")
        given = {name: getattr(self, name) for name in nullable if getattr(self, name) is not None}
        defaults = {name: getattr(SamplingParams, name) for name in nullable}
        fields = self.model_copy(update={**defaults, **given})
        return SamplingFields.params(fields, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


class CompletionRequest(OpenAIFields):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: int | None = None
    """Default 16."""
    logprobs: int | None = None
    echo: bool = False
    """Begin the answer with the prompt; with logprobs also the prompt's."""
    best_of: int | None = None
    suffix: None = None

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        if self.best_of not in (None, self.n or 1):
            raise InvalidInputError(
                f"best_of is {self.best_of}; only the value of n ({self.n or 1}) is served",
                field="best_of",
                value=self.best_of,
            )
        echoed = self.logprobs if self.echo else None
        return self.sampling(
            SamplingParams.max_tokens if self.max_tokens is None else self.max_tokens, self.logprobs, echoed
        )


class ChatRequest(ToolFields, OpenAIFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Default: what the context leaves."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def sampling_params(self, room: int) -> SamplingParams:
        """`room`: tokens that the context leaves for the answer. Raises `InvalidInputError`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs: true", field="top_logprobs", value=self.top_logprobs)
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return self.sampling(limits[0] if limits else room, (self.top_logprobs or 0) if self.logprobs else None)
