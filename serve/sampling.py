"""The fields by which any route says how tokens are chosen, and what the engine is told of them. Knows no route."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, model_validator

from swiftkv_platform.engine import EarlyExit, SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError, lone_surrogate
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.serve.nested import Nested, without_nulls
from swiftkv_platform.specs.base import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_PRIORITY, MAX_PROMPTS


def encodable(value: Any) -> Any:
    """The value, unless text in it has lone surrogates: JSON may escape them, no tokenizer takes them."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (place := lone_surrogate(text)) is not None:
            raise ValueError(f"is no text: a lone surrogate at character {place}")
    return value


def _whole(value: Any) -> Any:
    """A whole number also where a client writes it as 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


def _string_or_strings(value: Any) -> Any:
    if value is None:
        return []
    if isinstance(value, str):
        return [encodable(value)]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return encodable(value)
    raise ValueError("must be a string or a list of strings")


def _biases_by_token(value: Any) -> Any:
    """JSON's keys are strings."""
    if value is None:
        return {}
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; a request accepts {MAX_LOGIT_BIAS}")
    if isinstance(value, dict) and all(isinstance(key, int) or str(key).isdecimal() for key in value):
        return {int(key): bias for key, bias in value.items()}
    raise ValueError("must be an object of numbers by token id")


class JSONSchemaFormat(Nested):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    """A name without effect."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    """A description without effect."""
    strict: bool | None = None
    """The answer follows the schema either way."""


class ResponseFormat(Nested):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type json_schema, and only there")
        return self

    def structured_outputs(self) -> StructuredOutputs | None:
        """Constraint for the engine; None for text. Raises `InvalidInputError`."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.schema_, source="response_format.json_schema.schema")
        return StructuredOutputs(json_object=True, source="response_format") if self.type == "json_object" else None


class SamplingFields(FrozenModel, strict=True):
    """Ranges are the engine's to check; unknown keys are refused."""

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
    """Answers to each prompt."""
    seed: Whole | None = SamplingParams.seed
    stop: Annotated[list[str], BeforeValidator(_string_or_strings)] = []
    """Strings that end the answer and are not part of it."""
    include_stop_str_in_output: bool = SamplingParams.include_stop_str_in_output
    """Leave the stop string, or the text of the stop token, at the end of the answer."""
    stop_token_ids: Annotated[list[Whole], FailFast()] = []
    allowed_token_ids: Annotated[list[Whole], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    """Tokens that the answer consists of."""
    skip_special_tokens: bool = SamplingParams.skip_special_tokens
    """Leave special tokens out of the answer's text."""
    ignore_eos: bool = SamplingParams.ignore_eos
    min_tokens: Whole = SamplingParams.min_tokens
    """Tokens before which no end of sequence, stop token or stop string ends the answer."""
    truncate_prompt_tokens: Whole | None = SamplingParams.truncate_prompt_tokens
    """Keep this number of tokens of a longer prompt, the last; -1: as many as the context has beside the answer."""
    priority: Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower goes first."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds from arrival, waiting included, after which the answer is given up: 504."""
    early_exit: str | dict[str, Any] | None = None
    """`off`, `threshold`, `lossless`, or an object with `mode`, `threshold` and `num_draft_tokens`."""
    num_lookup_tokens: Whole = SamplingParams.num_lookup_tokens
    """Most tokens to draft at a time from what prompt and answer so far repeat, or a constraint leaves no choice about;
    the answer is the same."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema that the answer follows."""
    structured_outputs: Annotated[dict[str, Any], BeforeValidator(without_nulls)] | None = None
    """Constraint on the answer's text, as in vLLM: one of `json` (a schema), `json_object`, `regex`, `choice` and
    `grammar`; for JSON also `disable_any_whitespace`."""

    def params(self, **others: Any) -> SamplingParams:
        """Sampling parameters for the engine, with the fields that routes name in their own ways. Raises
        `InvalidInputError`: a value out of range."""
        same = set(SamplingFields.model_fields) & {field.name for field in fields(SamplingParams)}
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        given |= {"early_exit": EarlyExit.parse(self.early_exit), "structured_outputs": self.constraint()}
        return SamplingParams(**given, **others)

    def constraint(self) -> StructuredOutputs | None:
        """The constraint on the answer's text. Raises `InvalidInputError`."""
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


def check_generates(max_tokens: int, otherwise: str) -> None:
    """Raises `InvalidInputError` for an answer of no tokens; `otherwise` names the field with which it would have any
    content."""
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


# In place of pydantic's own check of the union, which writes down an error for each token id that is no string.
PromptField = Annotated[TokenPrompts, PlainValidator(_one_or_several, json_schema_input_type=TokenPrompts)]


def prompts_of(value: TokenPrompts) -> list[str | list[int]]:
    """The prompts as a list. Raises `InvalidInputError` for too many."""
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    prompts: list[Any] = list(value) if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidInputError(
            f"prompt has {len(prompts)} entries; a request accepts {MAX_PROMPTS}", field="prompt", value=len(prompts)
        )
    return prompts
