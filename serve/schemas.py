"""Request and response bodies of `POST /generate`, and the sampling fields that all routes share. Knows no stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, PlainValidator, model_validator

from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError, find_lone_surrogate
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs.base import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_STREAM_INTERVAL_S,
)
from swiftkv_platform.web.problems import value_if_short

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput

MAX_NAME_LENGTH = 64
"""Most characters of a field's name that an answer repeats; no field has a longer name."""


def remove_nulls(part: Any) -> Any:
    """Return an object without keys whose value is null; any other value unchanged."""
    return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


class Nested(FrozenModel, strict=True, extra="allow"):
    """Part of a body. `null` is the same as leaving a key out; unknown keys have no effect (see `unknown_keys`)."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        return remove_nulls(part)


def unknown_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield dotted paths of unknown keys below `value`, without list indices: `messages.parsed`."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from unknown_keys(getattr(value, name), f"{path}{name}.")
        if path:
            yield from (path + key for key in value.model_extra or ())
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):  # a prompt has many numbers
        for one in value:
            yield from unknown_keys(one, path)


def checked_kind(part: Mapping[str, Any], needs: Mapping[str, Sequence[str]], default: str | None = None) -> str:
    """Return the type of a part of a conversation. `needs`: required keys by type. Raises `ValueError` for an unknown
    type, and for a missing key."""
    kind = part.get("type") or default
    if not isinstance(kind, str) or kind not in needs:
        raise ValueError(f"type is {value_if_short(kind)!r}; accepted here: {', '.join(needs)}")
    if missing := next((name for name in needs[kind] if part.get(name) is None), None):
        raise ValueError(f"{missing} is missing; type {kind!r} needs {', '.join(needs[kind])}")
    return kind


def encodable(value: Any) -> Any:
    """Return the value. Raises `ValueError` if a text in it has a lone surrogate, which no tokenizer accepts."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (place := find_lone_surrogate(text)) is not None:
            raise ValueError(f"is not valid text: a lone surrogate at character {place}")
    return value


def _whole(value: Any) -> Any:
    """Convert whole floats to int, since some clients write 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# Bounds come before the validator: after it, pydantic would write them to the OpenAPI document under its own names.
Positive = Annotated[int, Field(ge=1), BeforeValidator(_whole)]


def _string_or_strings(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [encodable(value)]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return encodable(value)
    raise ValueError("must be a string or a list of strings")


def _biases_by_token(value: Any) -> Any:
    """Convert the keys of `logit_bias` to integers, since JSON keys are strings."""
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; a request accepts at most {MAX_LOGIT_BIAS}")
    if isinstance(value, dict) and all(isinstance(key, int) or str(key).isdecimal() for key in value):
        return {int(key): bias for key, bias in value.items()}
    raise ValueError("must be an object of numbers by token id")


class JSONSchemaFormat(Nested):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name; has no effect."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    """Description; has no effect."""
    strict: bool | None = None
    """Has no effect: the answer follows the schema in any case."""


class ResponseFormat(Nested):
    """Format of the answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with type json_schema, and refused with other types")
        return self

    def structured_outputs(self) -> StructuredOutputs | None:
        """Return the constraint for the engine; None for text. Raises `InvalidInputError`."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_, source="response_format.json_schema.schema")
        return StructuredOutputs(json_object=True, source="response_format") if self.type == "json_object" else None


class SamplingFields(FrozenModel, strict=True):
    """Sampling fields of a request. The engine checks ranges; unknown keys are refused."""

    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: Whole = SamplingParams.top_k
    """0 and -1 keep all tokens."""
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases_by_token)] = {}
    """Added to logits, by token id."""
    n: Whole = SamplingParams.n
    """Samples for each prompt."""
    seed: Whole | None = SamplingParams.seed
    stop: Annotated[list[str], BeforeValidator(_string_or_strings)] = []
    """Strings that end the answer and are not part of it."""
    include_stop_str_in_output: bool = SamplingParams.include_stop_str_in_output
    """Keep the stop string, or the text of the stop token, at the end of the answer."""
    stop_token_ids: Annotated[list[Whole], FailFast()] = []
    allowed_token_ids: Annotated[list[Whole], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    """The only tokens that the answer may contain."""
    skip_special_tokens: bool = SamplingParams.skip_special_tokens
    """Leave special tokens out of the answer's text."""
    ignore_eos: bool = SamplingParams.ignore_eos
    min_tokens: Whole = SamplingParams.min_tokens
    """Least tokens before an end of sequence, stop token or stop string may end the answer."""
    truncate_prompt_tokens: Whole | None = SamplingParams.truncate_prompt_tokens
    """Keep only the last tokens of a longer prompt, this many; -1: as many as the context leaves beside the answer."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(_whole)] = 0
    """Lower values are scheduled first."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds from arrival, including waiting, after which the request is aborted with 504."""
    early_exit: str | dict[str, Any] | None = None
    """`off`, `threshold`, `lossless`, or an object with `mode`, `threshold` and `num_draft_tokens`."""
    num_lookup_tokens: Whole = SamplingParams.num_lookup_tokens
    """Most tokens to draft at a time by looking up repetitions in prompt and answer, or where a constraint leaves no
    choice. Does not change the answer."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema that the answer follows."""
    structured_outputs: Annotated[dict[str, Any], BeforeValidator(remove_nulls)] | None = None
    """Constraint on the answer's text, as in vLLM: one of `json` (a schema), `json_object`, `regex`, `choice` and
    `grammar`; for JSON also `disable_any_whitespace`."""

    def params(self, **others: Any) -> SamplingParams:
        """Return the engine's sampling parameters. `others`: parameters that routes name differently. Raises
        `InvalidInputError` for a value out of range."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**given, **others, "structured_outputs": self.constraint()})

    def constraint(self) -> StructuredOutputs | None:
        """Return the constraint on the answer's text; None if there is none. Raises `InvalidInputError`."""
        asked = None if self.response_format is None else self.response_format.structured_outputs()
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise InvalidInputError(
                "structured_outputs and response_format are both given; one of them is accepted",
                field="structured_outputs",
                value=self.structured_outputs,
            )
        return StructuredOutputs.parse(self.structured_outputs)


_SAME = SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingParams)}
"""Fields with the same name in the engine's parameters; None means their default."""


def check_generates(max_tokens: int, otherwise: str) -> None:
    """Raise `InvalidInputError` if `max_tokens` is 0. `otherwise`: the field with which 0 is accepted, for the
    message."""
    if max_tokens == 0:
        raise InvalidInputError(
            f"max_tokens is 0; it must be a whole number of at least 1, or be given with {otherwise}",
            field="max_tokens",
            value=0,
        )


TokenPrompts = str | list[str] | list[int] | list[list[int]]
"""Text or token ids, one prompt or several."""


def _one_or_several(value: Any) -> Any:
    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(token) is int for token in item)

    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return encodable(value)
    if is_ids(value) or (isinstance(value, list) and all(map(is_ids, value))):
        return value
    raise ValueError("must be text, a list of token ids, or a list of either")


# Replaces pydantic's check of the union, which would report an error for each token id that is not a string.
PromptField = Annotated[TokenPrompts, PlainValidator(_one_or_several, json_schema_input_type=TokenPrompts)]


def prompts_of(value: TokenPrompts) -> list[str | list[int]]:
    """Return the prompts as a list. Raises `InvalidInputError` if there are too many."""
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    prompts: list[Any] = list(value) if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidInputError(
            f"prompt has {len(prompts)} entries; a request accepts at most {MAX_PROMPTS}",
            field="prompt",
            value=len(prompts),
        )
    return prompts


class Message(FrozenModel, strict=True):
    """A turn of a conversation."""

    role: Annotated[str, Field(min_length=1)]
    content: str
    name: str | None = None


class GenerateRequest(SamplingFields):
    """Body of `POST /generate`."""

    prompt: PromptField | None = None
    """Text or token ids, one prompt or several. Give either `prompt` or `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A conversation, rendered by the model's chat template."""
    max_tokens: Whole = SamplingParams.max_tokens
    """0, with `prompt_logprobs`, scores the prompt and generates nothing."""
    logprobs: Whole | None = None
    """Return log-probabilities of each generated token and of this many most probable ones."""
    prompt_logprobs: Whole | None = None
    """The same for the prompt's tokens; all of them then run through all layers."""
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Unique among the caller's running requests."""
    stream: bool = False
    """Answer with server-sent events that carry new tokens, `[DONE]` last."""
    stream_interval_s: Annotated[float, Field(ge=0.0, le=MAX_STREAM_INTERVAL_S)] | None = None
    """Seconds for which tokens may be collected into one event; 0: an event per token; null: the deployment's
    setting."""

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if unknown := next(unknown_keys(self.response_format, "response_format."), None):
            raise ValueError(f"{unknown[:MAX_NAME_LENGTH]} is not a field of /generate; leave it out")
        return self

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises `InvalidInputError` for a value out of range."""
        if self.prompt_logprobs is None:
            check_generates(self.max_tokens, "prompt_logprobs")
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)


class Choice(BaseModel):
    index: int
    """Number of the choice: prompt * n + sample."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` or `length`; null while the choice is unfinished."""
    logprobs: list[dict[int, float]] | None = None
    """Log-probabilities by token id, for each of `token_ids`."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Log-probabilities by token id, for each token of the prompt; in the choice's last event."""
    num_exited_tokens: int = 0
    """Number of `token_ids` that did not run through all layers (early exit)."""
    num_accepted_tokens: int = 0
    """Number of `token_ids` that were drafts accepted by all layers."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_layers_skipped_tokens: int
    """Prompt tokens that skipped the layers above layer l."""
    early_exit_tokens: int
    """Generated tokens that did not run through all layers."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        """Sum the usage over the choices, finished or not; a prompt counts once for all its samples."""
        # Reversed, so that a prompt's first sample counts: later ones may find the prompt cached by the first.
        prompts = {output.request_id: output for output in reversed(outputs)}.values()
        return cls(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in prompts),
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=sum(output.num_cached_tokens for output in prompts),
            prefill_layers_skipped_tokens=sum(output.num_skipped_tokens for output in prompts),
            early_exit_tokens=sum(output.num_exited_tokens for output in outputs),
        )


class Timings(BaseModel):
    """Milliseconds, of the first choice; `total_ms` of the choice that finished last."""

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
    """An answer of `/generate`, or one event of a stream, with only the new text and token ids."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    """In a stream, only in the last event."""
    timings: Timings | None = None
    """In a stream, only in the last event."""


def to_choice(index: int, output: RequestOutput, since: RequestOutput | None = None) -> Choice:
    """Return a choice, or with `since` what it adds to that earlier output."""
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
