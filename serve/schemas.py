"""What `POST /generate` takes and answers, and how one becomes the engine's terms and the other comes from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from swiftkv_platform.engine import SamplingParams

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput


def _text_or_token_ids(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise ValueError("must be text or a list of token ids")


def _string_or_strings(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("must be a string or a list of strings")


class GenerateRequest(BaseModel):
    """Body of `POST /generate`. Unknown keys are refused; ranges are the engine's to check."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    prompt: Annotated[str | list[int], BeforeValidator(_text_or_token_ids)]
    """Text, or token ids."""
    max_tokens: int = SamplingParams.max_tokens
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    seed: int | None = SamplingParams.seed
    stop: Annotated[list[str], BeforeValidator(_string_or_strings)] = []
    """Strings that end the answer and are not part of it."""
    ignore_eos: bool = SamplingParams.ignore_eos
    stream: bool = False
    """Answer with server-sent events: one a step with what is new, `[DONE]` last."""

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


class Choice(BaseModel):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop`, `length`, or null while more is to come."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_layers_skipped_tokens: int
    """Prompt tokens that did not go through the layers that compute no KV of their own."""
    early_exit_tokens: int
    """Generated tokens that did not go through all layers."""


class Timings(BaseModel):
    """Milliseconds."""

    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    """Null for an answer of one token."""
    total_ms: float


class GenerateResponse(BaseModel):
    """The answer; in a stream, one event of it, whose text and token ids are those that are new."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    """Absent from all events of a stream but the last."""
    timings: Timings | None = None
    """Absent from all events of a stream but the last."""


def to_response(output: RequestOutput, model: str, *, since: RequestOutput | None = None) -> GenerateResponse:
    """The response for an output, or for what it adds to the one before it."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    choice = Choice(
        index=0,
        text=output.text[old_text:],
        token_ids=list(output.token_ids[old_tokens:]),
        finish_reason=output.finish_reason,
    )
    if not output.finished:
        return GenerateResponse(id=output.request_id, model=model, choices=[choice])
    return GenerateResponse(
        id=output.request_id, model=model, choices=[choice], usage=_usage(output), timings=_timings(output)
    )


def _usage(output: RequestOutput) -> Usage:
    return Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(output.token_ids),
        cached_tokens=output.num_cached_tokens,
        prefill_layers_skipped_tokens=output.num_prefill_layers_skipped_tokens,
        early_exit_tokens=0,
    )


def _timings(output: RequestOutput) -> Timings:
    metrics = output.metrics
    return Timings(
        queue_ms=_milliseconds(metrics.queue_time),
        ttft_ms=_milliseconds(metrics.ttft),
        tpot_ms=_milliseconds(metrics.tpot),
        total_ms=metrics.total * 1000.0,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
