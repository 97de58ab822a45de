"""Schemas of `POST /generate`, and the conversion of outputs to them. Knows no stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, Field, model_validator

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.serve.nested import MAX_NAME_LENGTH, unknown_keys
from swiftkv_platform.serve.sampling import PromptField, SamplingFields, Whole, check_generates
from swiftkv_platform.specs.base import MAX_MESSAGES, MAX_STREAM_INTERVAL_S

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput


class Message(FrozenModel, strict=True):
    """A turn of a conversation."""

    role: Annotated[str, Field(min_length=1)]
    content: str
    name: str | None = None


class GenerateRequest(SamplingFields):
    """Body of `POST /generate`."""

    prompt: PromptField | None = None
    """Text or token ids, one prompt or several; or give `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A conversation, laid out by the model's chat template."""
    max_tokens: Whole = SamplingParams.max_tokens
    """0, with `prompt_logprobs`, scores the prompt and generates nothing."""
    logprobs: Whole | None = None
    """Log-probabilities of each generated token and of this number of the most probable ones."""
    prompt_logprobs: Whole | None = None
    """The same for the prompt's tokens, which then all go through every layer."""
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Unique among the caller's running requests."""
    stream: bool = False
    """Answer with server-sent events of what is new, `[DONE]` last."""
    stream_interval_s: Annotated[float, Field(ge=0.0, le=MAX_STREAM_INTERVAL_S)] | None = None
    """Seconds for which tokens may be collected into one event, 0: an event a token; null: as the deployment's engine
    says."""

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if unknown := next(unknown_keys(self.response_format, "response_format."), None):
            raise ValueError(f"{unknown[:MAX_NAME_LENGTH]} is not a field of /generate; leave it out")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        if self.prompt_logprobs is None:
            check_generates(self.max_tokens, "prompt_logprobs")
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


class Choice(BaseModel):
    index: int
    """Samples within prompts: prompt x n + sample."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop`, `length`, or null while more is to come."""
    logprobs: list[dict[int, float]] | None = None
    """Log-probabilities by token id, for each of `token_ids`."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Log-probabilities by token id, for each token of the prompt; in the choice's last event."""
    num_exited_tokens: int = 0
    """Number of `token_ids` that did not go through all layers."""
    num_accepted_tokens: int = 0
    """Number of `token_ids` that were drafted, and verified by all layers."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_layers_skipped_tokens: int
    """Prompt tokens that did not go through the layers that compute no KV of their own."""
    early_exit_tokens: int
    """Generated tokens that did not go through all layers."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        """Sums over the choices; a prompt counts once for all its samples."""
        prompts = [output for output in outputs if output.index == 0]
        return cls(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in prompts),
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=sum(output.num_cached_tokens for output in prompts),
            prefill_layers_skipped_tokens=sum(output.num_prefill_layers_skipped_tokens for output in prompts),
            early_exit_tokens=sum(output.num_exited_tokens for output in outputs),
        )


class Timings(BaseModel):
    """Milliseconds, of the first choice; `total_ms` until the last one was done."""

    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    """Milliseconds per output token after the first; null for an answer of one token."""
    total_ms: float

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        metrics = outputs[0].metrics
        return cls(
            queue_ms=_milliseconds(metrics.queue_time),
            ttft_ms=_milliseconds(metrics.ttft),
            tpot_ms=_milliseconds(metrics.tpot),
            total_ms=1000.0 * max(output.metrics.total for output in outputs),
        )


class GenerateResponse(BaseModel):
    """The answer; in a stream, one event of it, whose text and token ids are those that are new."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    """Absent from all events of a stream but the last."""
    timings: Timings | None = None
    """Absent from all events of a stream but the last."""


def to_choice(index: int, output: RequestOutput, since: RequestOutput | None = None) -> Choice:
    """A choice, or what it adds to the output before it."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    old_exits, old_accepted = (since.num_exited_tokens, since.num_accepted_tokens) if since else (0, 0)
    details: dict[str, Any] = {}
    if output.logprobs is not None:
        details["logprobs"] = [dict(entry) for entry in output.logprobs[old_tokens:]]
    if output.prompt_logprobs is not None and output.finished:
        details["prompt_logprobs"] = [entry if entry is None else dict(entry) for entry in output.prompt_logprobs]
    return Choice(
        index=index,
        text=output.text[old_text:],
        token_ids=list(output.token_ids[old_tokens:]),
        finish_reason=output.finish_reason,
        num_exited_tokens=output.num_exited_tokens - old_exits,
        num_accepted_tokens=output.num_accepted_tokens - old_accepted,
        **details,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
