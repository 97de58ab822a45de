"""The bodies of OpenAI's completion routes, as far as this server answers them. Other keys are for `fields.py`.

Field names and meanings: https://platform.openai.com/docs/api-reference; extensions as in vLLM's server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.nested import Nested, unknown_keys, without_nulls
from swiftkv_platform.serve.openai.fields import ANY, Route, Treatment, fields_of, names_without_effect
from swiftkv_platform.serve.openai.messages import ChatMessage
from swiftkv_platform.serve.sampling import PromptField, SamplingFields, Whole, check_generates
from swiftkv_platform.serve.tools.calling import ToolFields
from swiftkv_platform.specs.base import MAX_MESSAGES


class StreamOptions(Nested):
    """Options of a stream."""

    include_usage: bool = False
    """Send a last event that has usage and no choices."""
    continuous_usage_stats: bool = False
    """Have the usage so far in every event, as in vLLM."""


def _described(route: Route) -> Callable[[dict[str, Any]], None]:
    """Change of a body's schema: it shows the fields without effect, and no others beside the body's own."""

    def extend(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        for field in fields_of(route).values():
            if field.treatment is Treatment.WITHOUT_EFFECT and "." not in field.name:
                schema["properties"][field.name] = {"description": "Accepted without effect."}

    return extend


class OpenAIFields(SamplingFields, extra="allow"):
    """Fields that both completion routes take. `null` means the default, as with OpenAI's clients."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Whole | None = None
    """Log-probabilities of the prompt's tokens and of this number of the most probable ones, in vLLM's shape."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)

    @model_validator(mode="after")
    def _whole_with_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not in a stream; give stream: false")
        return self

    def without_effect(self, route: Route, ignored: Collection[str], unread: Collection[str] = ()) -> tuple[str, ...]:
        """Names of the fields that have no effect; `ignored`: those that the operator sets to be, `unread`: those
        that the model has no use for. Raises `InvalidInputError`: a field that would change the answer, or an unknown
        one."""
        nested = [*unknown_keys(self), *unread, *(self._unknown_constraints() if ANY in ignored else ())]
        return names_without_effect(route, self.model_extra or {}, nested, self.n, ignored)

    def _unknown_constraints(self) -> Iterator[str]:
        """Take the unknown keys, which else are refused since they would change the answer, out of
        `structured_outputs`, and name them."""
        asked = self.structured_outputs or {}
        for key in asked.keys() - StructuredOutputs.keys():
            del asked[key]
            yield f"structured_outputs.{key}"


class CompletionRequest(OpenAIFields, json_schema_extra=_described("completions")):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: Whole = SamplingParams.max_tokens
    """0, with `echo`, scores the prompt and generates nothing."""
    logprobs: Whole | None = None
    echo: bool = False
    """Begin the answer with the prompt; with logprobs also the prompt's."""

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        if not self.echo and self.prompt_logprobs is None:
            check_generates(self.max_tokens, "echo")
        echoed = self.logprobs if self.echo else None
        if None not in (echoed, self.prompt_logprobs) and echoed != self.prompt_logprobs:
            raise InvalidInputError(
                f"prompt_logprobs is {self.prompt_logprobs}; with echo it must be logprobs, {self.logprobs}",
                field="prompt_logprobs",
                value=self.prompt_logprobs,
            )
        scored = self.prompt_logprobs if echoed is None else echoed
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=scored)


class ChatRequest(ToolFields, OpenAIFields, json_schema_extra=_described("chat/completions")):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    """Default: what the context leaves."""
    logprobs: bool = False
    top_logprobs: Whole = 0
    add_generation_prompt: bool = True
    """Let the assistant begin a turn of its own behind the messages."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    continue_final_message: bool = False
    """Let the answer go on where the last message ends; `add_generation_prompt` is then false."""

    @model_validator(mode="after")
    def _one_way_to_begin(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def sampling_params(self, room: int) -> SamplingParams:
        """`room`: tokens that the context leaves for the answer. Raises `InvalidInputError`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs: true", field="top_logprobs", value=self.top_logprobs)
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        max_tokens = limits[0] if limits else room
        check_generates(max_tokens, "echo on /v1/completions")
        return self.params(
            max_tokens=max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
