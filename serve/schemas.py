"""Request and response bodies of `POST /generate`, and the sampling fields that all routes share. Knows no stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from sys import getsizeof
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)

from swiftkv_platform.contract.traffic import MAX_USER_CHARS
from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs.base import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_PROMPTS,
    MAX_STREAM_INTERVAL_S,
    find_lone_surrogate,
)
from swiftkv_platform.web.problems import drop_long_value

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput

MAX_NAME_LENGTH = 64
"""Max characters of a field's name that a response repeats; no field has a longer name."""
_TEXT_KEYS = ("text", "refusal", "transcript", "stdout", "stderr", "content", "output")
"""Keys below which a part of another type may have text."""
_NAME_KEYS = ("tool_name", "name", "title", "filename")
"""Keys of which a placeholder repeats the first."""
_TEXT_SOURCES = ("document", "search_result")
"""Types of parts that are accepted even in a new message if they have only text."""


def remove_nulls(part: Any) -> Any:
    return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


class BodyPart(FrozenBaseModel, strict=True, extra="allow"):
    """Part of a body. `null` is the same as a missing key; unknown keys have no effect (see `find_unknown_keys`)."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, part: Any) -> Any:
        return remove_nulls(part)


class TypedPart(BodyPart):
    """Part of a body with a type. A part of a type that is not served is replaced (see `replace_unsupported`)."""

    required_keys: ClassVar[Mapping[str, Sequence[str]]]
    """Required keys by served type."""
    default_type: ClassVar[str] = ""
    type: str
    _original: Mapping[str, Any] | None = PrivateAttr(None)

    @property
    def replaced_type(self) -> str | None:
        """Type that is not served, of a part that was replaced."""
        return None if self._original is None else str(self._original["type"])

    @model_validator(mode="wrap")
    @classmethod
    def _check_type(cls, part: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Check type and required keys before the fields, since other types have other keys."""
        if not isinstance(part, dict):
            return handler(part)
        kind = part.get("type") or cls.default_type
        if not isinstance(kind, str) or not kind:
            raise ValueError(f"type is {drop_long_value(kind)!r}; accepted here: {', '.join(cls.required_keys)}")
        if kind not in cls.required_keys:
            replacement = cls.replace_unsupported(part, handler)
            replacement._original = part
            return replacement
        if missing := next((name for name in cls.required_keys[kind] if part.get(name) is None), None):
            raise ValueError(f"{missing} is missing; type {kind!r} needs {', '.join(cls.required_keys[kind])}")
        return handler(part)

    @classmethod
    def replace_unsupported(cls, part: Mapping[str, Any], validate: Callable[[dict[str, Any]], Self]) -> Self:  # noqa: ARG003
        """Return the replacement of a part whose type is not served: by default a part with the type only."""
        return cls.model_construct(type=part["type"])  # type: ignore[return-value]  # by pydantic's plugin


class TextPart(TypedPart):
    """A text part of a message. A part of another type, such as an image, is replaced by its text or a placeholder."""

    required_keys: ClassVar[Mapping[str, Sequence[str]]] = {"text": ("text",)}
    text: str = ""

    @property
    def text_content(self) -> str:
        return self.text

    @property
    def is_text_only(self) -> bool:
        """Whether the part has nothing but text."""
        if self._original is None:
            return True
        return self._original["type"] in _TEXT_SOURCES and all(is_text for is_text, _ in _find_texts(self._original))

    @classmethod
    def replace_unsupported(cls, part: Mapping[str, Any], validate: Callable[[dict[str, Any]], Self]) -> Self:
        return validate({"type": part["type"], "text": f"\n{describe_part(part)}\n"})  # a message joins its parts


def describe_part(part: Mapping[str, Any]) -> str:
    """Return the text of a part of any type, with placeholders for what has none."""
    return "\n".join(text for _, text in _find_texts(part))


def _find_texts(part: Any) -> Iterator[tuple[bool, str]]:
    """Yield (True, text) or (False, placeholder) for a part of any type, or for each of the parts in it."""
    if isinstance(part, str):
        yield True, part
    elif isinstance(part, list):
        for item in part:
            yield from _find_texts(item)
    elif isinstance(part, dict):
        source = part.get("source")
        inner = source if isinstance(source, dict) and source.get("type") in ("text", "content") else part
        texts = [inner[key] for key in _TEXT_KEYS if isinstance(inner.get(key), str | list | dict)]
        for text in texts if inner is part else [inner.get("data"), *texts]:
            yield from _find_texts(text)
        if not texts and inner is part:
            names = [part["type"]] if isinstance(part.get("type"), str) else ["part"]
            names += [part[key] for key in _NAME_KEYS if isinstance(part.get(key), str)]
            yield False, f"[{' '.join(names[:2])} omitted]"


def find_unknown_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield dotted paths of unknown keys and replaced parts below `value`, without list indices: `messages.parsed`,
    `messages.content.image`."""
    if isinstance(value, TypedPart) and value.replaced_type is not None:
        yield path + value.replaced_type
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from find_unknown_keys(getattr(value, name), f"{path}{name}.")
        if path:
            yield from (path + key for key in value.model_extra or ())
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):  # a prompt has many numbers
        for item in value:
            yield from find_unknown_keys(item, path)


def validate_encodable(value: Any) -> Any:
    """Return the value. Raises `ValueError` for text with a lone surrogate, which no tokenizer accepts."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (position := find_lone_surrogate(text)) is not None:
            raise ValueError(f"is not valid text: a lone surrogate at character {position}")
    return value


def _to_whole_number(value: Any) -> Any:
    """Convert a whole float to int, since some clients write 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_to_whole_number)]
# Bounds come before the validator: after it, pydantic writes them to the OpenAPI document under other names.
PositiveNumber = Annotated[int, Field(ge=1), BeforeValidator(_to_whole_number)]


def _to_string_list(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [validate_encodable(value)]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return validate_encodable(value)
    raise ValueError("must be a string or a list of strings")


def _parse_logit_bias(value: Any) -> Any:
    """Convert the keys of `logit_bias` to integers, since JSON keys are strings."""
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; a request accepts at most {MAX_LOGIT_BIAS}")
    if isinstance(value, dict) and all(isinstance(key, int) or str(key).isdecimal() for key in value):
        return {int(key): bias for key, bias in value.items()}
    raise ValueError("must be an object of numbers by token id")


class JSONSchemaFormat(BodyPart):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Name; has no effect."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    """Description; has no effect."""
    strict: bool | None = None
    """Has no effect: the completion always follows the schema."""


class ResponseFormat(BodyPart):
    """Format of the completion, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Schema of a `json_object`, as in llama.cpp's server; of a `json_schema` instead of that in `json_schema`."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise ValueError("json_schema is only for type json_schema, and without schema")
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("json_schema is required with type json_schema")
        if self.type == "text" and self.schema_ is not None:
            raise ValueError("schema is refused with type text; use json_schema")
        return self

    def make_constraint(self) -> StructuredOutputs | None:
        """Return the engine's constraint; None for text. Raises `InvalidInputError`."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_, source="response_format.json_schema.schema")
        if self.schema_ is not None:
            schema = restrict_to_object(self.schema_) if self.type == "json_object" else self.schema_
            return StructuredOutputs(json=schema, source="response_format.schema")
        return StructuredOutputs(json_object=True, source="response_format") if self.type == "json_object" else None


def restrict_to_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the objects that `schema` accepts. Raises `InvalidInputError` if its type has none."""
    given = schema.get("type", "object")
    if given != "object" and not (isinstance(given, list) and "object" in given):
        why = ", and type json_object needs an object; use type json_schema"
        raise InvalidInputError.for_field("response_format.schema.type", drop_long_value(given), why)
    return {**schema, "type": "object"}


FORMAT_FIELDS = ("response_format.", "text.format.", "output_config.format.", "output_format.")
"""Paths below which unknown keys are refused, since they would change the completion."""


class SamplingFields(FrozenBaseModel, strict=True):
    """Sampling fields of a request. The engine checks ranges. Unknown keys are refused."""

    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: WholeNumber = SamplingParams.top_k
    """0 and -1 keep all tokens."""
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    logit_bias: Annotated[dict[int, float], BeforeValidator(_parse_logit_bias)] = {}
    """Added to logits, by token id."""
    n: WholeNumber = SamplingParams.n
    """Samples per prompt."""
    seed: WholeNumber | None = SamplingParams.seed
    stop: Annotated[list[str], BeforeValidator(_to_string_list)] = []
    """Strings that end the completion and are not part of it."""
    include_stop_str_in_output: bool = SamplingParams.include_stop_str_in_output
    """Keep the stop string, or the text of the stop token, at the end of the completion."""
    stop_token_ids: Annotated[list[WholeNumber], FailFast()] = []
    allowed_token_ids: Annotated[list[WholeNumber], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    """Only these tokens are generated, and end of sequence only if listed."""
    skip_special_tokens: bool = SamplingParams.skip_special_tokens
    """Leave special tokens out of the completion's text."""
    ignore_eos: bool = SamplingParams.ignore_eos
    min_tokens: WholeNumber = SamplingParams.min_tokens
    """Min tokens before an end of sequence, stop token or stop string may end the completion."""
    truncate_prompt_tokens: WholeNumber | None = SamplingParams.truncate_prompt_tokens
    """Max tokens of the prompt; a longer one is cut at its beginning. -1: the context minus `max_tokens`."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), BeforeValidator(_to_whole_number)] = 0
    """Lower values are scheduled first."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds from arrival to the end of the request; then it is aborted with 504."""
    early_exit: str | dict[str, Any] | None = None
    """`off`, `threshold`, `lossless`, or an object with `mode`, `threshold` and `num_draft_tokens`."""
    num_lookup_tokens: WholeNumber = SamplingParams.num_lookup_tokens
    """Max tokens to draft at a time, from repetitions in prompt and completion, or where a constraint allows one token.
    Does not change the completion."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with the schema of the completion."""
    structured_outputs: Annotated[dict[str, Any], BeforeValidator(remove_nulls)] | None = None
    """Constraint on the completion's text, as in vLLM: one of `json` (a schema), `json_object`, `regex`, `choice` and
    `grammar`; for JSON also `disable_any_whitespace`."""

    def _make_params(self, **others: Any) -> SamplingParams:
        """Return the engine's sampling parameters. `others`: parameters with other names or defaults in a route. Raises
        `InvalidInputError` for a value out of range."""
        given = {name: value for name in _SHARED_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**given, **others, "structured_outputs": self.make_constraint()})

    def make_constraint(self) -> StructuredOutputs | None:
        """Return the constraint on the completion's text, if any. Raises `InvalidInputError`."""
        by_format = None if self.response_format is None else self.response_format.make_constraint()
        if self.structured_outputs is None:
            return by_format
        if by_format is not None:
            raise InvalidInputError(
                "structured_outputs and response_format are both given; one of them is accepted",
                field="structured_outputs",
                value=self.structured_outputs,
            )
        return StructuredOutputs.parse(self.structured_outputs)


_SHARED_FIELDS = SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingParams)}
"""Fields with the same name in the engine's parameters; None means their default."""


def require_max_tokens(max_tokens: int, scoring_field: str) -> None:
    """Raise `InvalidInputError` if `max_tokens` is 0. `scoring_field`: the field with which 0 is accepted."""
    if max_tokens == 0:
        raise InvalidInputError(
            f"max_tokens is 0; it must be at least 1, or be sent with {scoring_field}",
            field="max_tokens",
            value=0,
        )


TokenPrompts = str | list[str] | list[int] | list[list[int]]
"""Text or token ids, one prompt or several."""


def _validate_prompts(value: Any) -> Any:
    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(token) is int for token in item)

    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return validate_encodable(value)
    if is_ids(value) or (isinstance(value, list) and all(map(is_ids, value))):
        return value
    raise ValueError("must be text, a list of token ids, or a list of either")


# Replaces pydantic's check of the union, which reports an error for each token id that is not a string.
PromptField = Annotated[TokenPrompts, PlainValidator(_validate_prompts, json_schema_input_type=TokenPrompts)]


def list_prompts(value: TokenPrompts) -> list[str | list[int]]:
    """Return the prompts as a list. Raises `InvalidInputError` if there are too many."""
    is_list = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    prompts: list[Any] = list(value) if is_list else [value]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidInputError(
            f"prompt has {len(prompts)} entries; a request accepts at most {MAX_PROMPTS}",
            field="prompt",
            value=len(prompts),
        )
    return prompts


class Message(FrozenBaseModel, strict=True):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1)]
    content: str
    name: str | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        return getsizeof(self) + getsizeof(self.content)

    def to_openai_format(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class GenerateRequest(SamplingFields):
    """Body of `POST /generate`."""

    model: str | None = None
    """A name of the served model or of an adapter; null: the served model."""
    prompt: PromptField | None = None
    """Text or token ids, one prompt or several. Send either `prompt` or `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """A conversation, rendered by the model's chat template."""
    max_tokens: WholeNumber = SamplingParams.max_tokens
    """0, with `prompt_logprobs`, scores the prompt and generates nothing."""
    logprobs: WholeNumber | None = None
    """Return log-probabilities of each generated token and of this many most probable ones."""
    prompt_logprobs: WholeNumber | None = None
    """Return log-probabilities of the prompt's tokens, which then run through all layers."""
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Unique among the caller's running requests."""
    user: Annotated[str, Field(min_length=1, max_length=MAX_USER_CHARS)] | None = None
    """End user in captured traffic."""
    store: bool = True
    """False: the request is not captured."""
    stream: bool = False
    """Respond with server-sent events of new tokens, and `[DONE]` last."""
    stream_interval_s: Annotated[float, Field(ge=0.0, le=MAX_STREAM_INTERVAL_S)] | None = None
    """Max seconds for collecting tokens into one event; 0: an event per token; null: the deployment's setting."""

    @model_validator(mode="after")
    def _check_prompt_or_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if unknown := next(find_unknown_keys(self.response_format, "response_format."), None):
            raise ValueError(f"{unknown[:MAX_NAME_LENGTH]} is not a field of /generate; leave it out")
        return self

    def make_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises `InvalidInputError` for a value out of range."""
        if self.prompt_logprobs is None:
            require_max_tokens(self.max_tokens, "prompt_logprobs")
        return self._make_params(
            max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs
        )


class Choice(BaseModel):
    index: int
    """Number of the choice: prompt * n + sample."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` or `length`; null for an unfinished choice."""
    logprobs: list[dict[int, float]] | None = None
    """Log-probabilities by token id, for each of `token_ids`."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Log-probabilities by token id, for each token of the prompt; in a stream, in the choice's last event."""
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
    def from_outputs(cls, outputs: Sequence[RequestOutput]) -> Self:
        """Sum the usage of all choices. A prompt counts once for all its samples."""
        # Reversed, so that a prompt's first sample counts: the first caches the prompt for later ones.
        prompts = {output.request_id: output for output in reversed(outputs)}.values()
        return cls(
            prompt_tokens=sum(len(output.prompt_token_ids) for output in prompts),
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=sum(output.num_cached_tokens for output in prompts),
            prefill_layers_skipped_tokens=sum(output.num_skipped_tokens for output in prompts),
            early_exit_tokens=sum(output.num_exited_tokens for output in outputs),
        )


class Timings(BaseModel):
    """Milliseconds of the first choice; `total_ms` of the choice that finished last."""

    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    """Milliseconds per output token after the first; null for a completion of one token."""
    total_ms: float

    @classmethod
    def from_outputs(cls, outputs: Sequence[RequestOutput]) -> Self:
        metrics = outputs[0].metrics
        return cls(
            queue_ms=_to_milliseconds(metrics.queue_time),
            ttft_ms=_to_milliseconds(metrics.ttft),
            tpot_ms=_to_milliseconds(metrics.tpot),
            total_ms=1000.0 * max(output.metrics.total for output in outputs),
        )


class GenerateResponse(BaseModel):
    """A response of `/generate`, or an event of a stream, which has only the new text and token ids."""

    id: str
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    """In a stream, only in the last event."""
    timings: Timings | None = None
    """In a stream, only in the last event."""


def make_choice(index: int, output: RequestOutput, previous: RequestOutput | None = None) -> Choice:
    """Return a choice; with a `previous` output only its additions."""
    old_text, old_tokens = (len(previous.text), len(previous.token_ids)) if previous else (0, 0)
    old_exits, old_accepted = (previous.num_exited_tokens, previous.num_accepted_tokens) if previous else (0, 0)
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


def _to_milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
