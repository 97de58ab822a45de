"""Request bodies of OpenAI's completion routes with their served fields, and parts that other routes share. All other
fields are in `fields.py`.

Field names and meanings: https://platform.openai.com/docs/api-reference; extensions as in vLLM's server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from sys import getsizeof
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from swiftkv_platform.data.messages import parse_call_arguments
from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.serve.openai.fields import (
    ANY_UNKNOWN_FIELD,
    FieldTreatment,
    Route,
    find_ignored_fields,
    get_fields,
    get_served_field_names,
)
from swiftkv_platform.serve.schemas import (
    FORMAT_FIELDS,
    MAX_NAME_LENGTH,
    BodyPart,
    PromptField,
    SamplingFields,
    TextPart,
    TypedPart,
    WholeNumber,
    find_unknown_keys,
    remove_nulls,
    require_max_tokens,
)
from swiftkv_platform.serve.tools.calling import MAX_TOOLS, ToolFields
from swiftkv_platform.specs.base import MAX_MESSAGES

CLIENT_METADATA_LINE = r"(?<![a-z0-9-])(x-[a-z0-9-]{1,64}+):(?:[ \t]*+[\w.-]++=[^\s;\"\\]*+(?:;|(?=[\s\"\\]|$)))++"
"""Pattern of a line such as `x-anthropic-billing-header: cc_version=2.1; cch=7f3a1;` at the beginning of instructions,
also of its JSON text. Clients write it for their provider's accounting, with other values in each request."""
_CLIENT_LINE = re.compile(rf"\s*+{CLIENT_METADATA_LINE}[ \t]*+(?:\r?\n|$)", re.IGNORECASE)
_MESSAGE_BYTES = 4096
"""Approximate size in memory of a message without its texts."""
_LEGACY_CALL_ID = "call_0"
"""Id of a call in the legacy field `function_call`, which has none."""


class Part(TextPart):
    """A part of a message's content."""

    required_keys = {"text": ("text",), "input_text": ("text",), "output_text": ("text",), "refusal": ("refusal",)}
    refusal: str = ""

    @property
    def text_content(self) -> str:
        return self.refusal if self.type == "refusal" else self.text


def _to_parts(content: Any) -> Any:
    """Return content as a list of parts."""
    if isinstance(content, list):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if content is None or isinstance(content, str):
        return None if content is None else _to_parts([content])
    raise ValueError("must be text, or a list of parts of type 'text'")


def index_parts_by_path(path: str, parts: Sequence[TextPart] | None) -> dict[str, TextPart]:
    """Return parts by their path in the body. `path`: of the list."""
    return {f"{path}.{number}": part for number, part in enumerate(parts or ())}


Content = Annotated[list[Part] | None, BeforeValidator(_to_parts, json_schema_input_type=str | list[Part | str] | None)]


def _to_json_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


CallArguments = Annotated[str, BeforeValidator(_to_json_text, json_schema_input_type=dict[str, Any] | str)]
"""Arguments of an earlier call on any route, as an object or JSON text; "" for a call without arguments."""


class FunctionCall(BodyPart):
    name: Annotated[str, Field(min_length=1)]
    arguments: CallArguments = ""

    def to_openai_format(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments}


class ToolCall(TypedPart):
    """A tool call of an earlier message. Its `index` in a stream has no effect."""

    required_keys = {"function": ("function",)}
    default_type = "function"
    id: Annotated[str, Field(min_length=1)]
    type: str = default_type
    function: FunctionCall

    @classmethod
    def replace_unsupported(cls, call: Mapping[str, Any], validate: Callable[[dict[str, Any]], Self]) -> Self:
        """Return a function's call for a call of another tool, whose fields are below its type."""
        fields = call.get(call["type"])
        fields = {"name": call["type"], **fields} if isinstance(fields, dict) else {"name": call["type"]}
        function = {"name": fields.pop("name"), "arguments": fields}
        return validate({"id": call.get("id"), "type": "function", "function": function})


_RESULT_ROLES = ("tool", "function")
"""Roles of messages with a tool's result; `function` is the legacy one."""


class ChatMessage(BodyPart):
    """A message. Accepts the keys of a response's message, so that it can be sent back unchanged. Keys that the
    template does not get have no effect."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `developer`, `user`, `assistant`, `tool`, or another role of the template."""
    content: Content = None
    """Text or parts of type text; may be null in an assistant's message with tool calls, and in a tool's message."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    """Tool calls of an assistant's message."""
    function_call: FunctionCall | None = None
    """Tool call of an assistant's message, as a legacy field."""
    tool_call_id: str | None = None
    """Id of the call whose result a tool's message has."""
    reasoning_content: str | None = None
    """Reasoning of an assistant's message, for templates that use it."""
    reasoning: Any = None
    """Other name of `reasoning_content`; without effect unless it is text."""
    refusal: str | None = None
    """Text of an assistant's message without content."""

    @model_validator(mode="before")
    @classmethod
    def _add_audio(cls, message: Any) -> Any:
        """Make the audio of a message without text its content."""
        if not isinstance(message, dict) or message.get("content") is not None:
            return message
        others = {**message}
        audio = others.pop("audio", None)
        return {**others, "content": [{**audio, "type": "audio"}]} if isinstance(audio, dict) else message

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls of the message, from `tool_calls` or `function_call`."""
        if not self.tool_calls and self.function_call is not None:
            return [ToolCall(id=_LEGACY_CALL_ID, function=self.function_call)]
        return self.tool_calls or []

    @property
    def text_content(self) -> str | None:
        if self.content is None:
            return "" if self.role in _RESULT_ROLES else self.refusal  # a tool may return null
        texts = [part.text_content for part in self.content]
        return "".join(text[self._find_client_lines(text)[1] :] for text in texts)

    @property
    def client_lines(self) -> list[str]:
        """Names of the lines that identify the client to its provider. The template does not get them, since their
        values change with each request, which then could not share the prefix of the previous one."""
        return [name for part in self.content or () for name in self._find_client_lines(part.text_content)[0]]

    def _find_client_lines(self, text: str) -> tuple[list[str], int]:
        """Return the names of the lines that identify the client, and the number of their characters. Other roles than
        those of instructions have none."""
        names, end = list[str](), 0
        while self.role in ("system", "developer") and (line := _CLIENT_LINE.match(text, end)):
            names.append(line[1])
            end = line.end()
        return names, end

    @property
    def reasoning_text(self) -> str | None:
        """Reasoning of the message, from `reasoning_content` or `reasoning`."""
        alternative = self.reasoning if isinstance(self.reasoning, str) else None
        return alternative if self.reasoning_content is None else self.reasoning_content

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs tool_call_id, the id of the call whose result it is")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"role is {self.role!r}; tool_call_id is only for role 'tool'")
        if self.role != "assistant" and self.calls:
            raise ValueError(f"role is {self.role!r}; tool_calls are only for role 'assistant'")
        if self.text_content is None and self.reasoning_text is None and not self.calls:
            raise ValueError("content is missing; it may be null only with tool_calls")
        return self

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        texts = [part.text_content for part in self.content or ()]
        texts += [call.function.arguments for call in self.calls]
        return _MESSAGE_BYTES + sum(map(getsizeof, [*texts, self.reasoning_text or ""]))

    def to_openai_format(self) -> dict[str, Any]:
        """Return the message as the template gets it, in OpenAI's format: call arguments are JSON text."""
        fields: dict[str, Any] = {"role": self.role, "content": self.text_content}
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_text}
        fields |= {name: value for name, value in others.items() if value is not None}
        if self.calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.to_openai_format()} for call in self.calls
            ]
        return fields

    def to_template_format(self) -> dict[str, Any]:
        """Return the message in the format of templates, with valid call arguments as objects."""
        fields = self.to_openai_format()
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = parse_call_arguments(call["function"]["arguments"])
        return fields


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_usage: bool = False
    """Send a last event with the usage and without choices."""
    continuous_usage_stats: bool = False
    """Send the token usage up to each event, as in vLLM."""


def make_route_schema_filter(route: Route) -> Callable[[dict[str, Any]], None]:
    """Return a `json_schema_extra` that limits a body's schema to the route's accepted fields."""

    def limit_to_route(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        served = get_served_field_names(route)
        schema["properties"] = {name: value for name, value in schema["properties"].items() if name in served}
        for field in get_fields(route).values():
            if field.treatment is FieldTreatment.WITHOUT_EFFECT and "." not in field.name:
                schema["properties"][field.name] = {"description": "Accepted without effect."}

    return limit_to_route


class OpenAIFields(SamplingFields, extra="allow"):
    """Fields of all routes below `/v1`. `null` is the default, as in OpenAI's API."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: WholeNumber | None = None
    """Return log-probabilities of the prompt's tokens and of this many most probable ones, in vLLM's format."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return remove_nulls(body)

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available in a stream; use stream: false")
        return self

    @property
    def allows_capture(self) -> bool:
        """False if the caller has refused with `store` that the request is captured: any value but true refuses."""
        return (self.model_extra or {}).get("store", True) is True

    @property
    def end_user(self) -> str | None:
        """End user, as the caller named him: by `user`, `safety_identifier`, or Anthropic's `metadata.user_id`."""
        extra = self.model_extra or {}
        metadata = extra.get("metadata")
        names = [extra.get("user"), extra.get("safety_identifier")]
        names += [metadata.get("user_id")] if isinstance(metadata, dict) else []
        return next((str(name) for name in names if type(name) in (str, int) and name != ""), None)

    @property
    def renamed_params(self) -> Mapping[str, str]:
        """Fields that set the engine's parameters of other names, by these."""
        return {}

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Make errors of the engine's parameters in the context name the fields that set them."""
        try:
            yield
        except SwiftKVError as error:
            names = self.renamed_params
            error.rename_fields(lambda word: names.get(word, word))
            raise

    def find_ignored_fields(
        self, route: Route, ignored: Collection[str], unused: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Return the names of the fields that have no effect. `ignored`: fields that the deployment ignores. `unused`:
        further names. Raises `InvalidInputError` for an unknown or unsupported field."""
        self._check_new_message()
        unknown = [*find_unknown_keys(self)]
        if ANY_UNKNOWN_FIELD not in ignored and (
            refused := next((key for key in unknown if key.startswith(FORMAT_FIELDS)), None)
        ):
            shown = refused[:MAX_NAME_LENGTH]
            raise InvalidInputError(f"{shown} is not a field of /v1/{route}; leave it out", field=shown)
        nested = [*unknown, *unused, *(self._drop_unknown_constraints() if ANY_UNKNOWN_FIELD in ignored else ())]
        others = {
            name: getattr(self, name)
            for name in self.list_given_fields(type(self))
            if name not in get_served_field_names(route)
        }
        return find_ignored_fields(route, {**(self.model_extra or {}), **others}, nested, self.n, ignored)

    def list_messages(self) -> Iterable[tuple[str, Mapping[str, TextPart]]]:
        """Return the role of each message of a conversation, and its parts by their path in the body."""
        return ()

    def _check_new_message(self) -> None:
        """Raise `InvalidInputError` for a part without text in the instructions or the user's new message. In earlier
        messages, and next to results of tools, the client cannot avoid such parts. `TextPart` replaces them."""
        # 1. leave out last messages of the assistant, which begin the answer
        messages = [*self.list_messages()]
        while messages and messages[-1][0] == "assistant":
            messages.pop()
        # 2. find the instructions, and the user's last message, unless it was answered or came with results of tools
        instructions: dict[str, TextPart] = {}
        new: Mapping[str, TextPart] = {}
        follows_results = False
        for role, parts in messages:
            if role in ("assistant", "tool", "function"):
                new, follows_results = {}, role != "assistant"
            elif role == "user":
                new = {} if follows_results else parts
            else:
                instructions |= parts
        # 3. check their parts
        for path, part in {**instructions, **new}.items():
            if not part.is_text_only:
                why = "; the model accepts only text: send text, or remove this part"
                raise InvalidInputError.for_field(f"{path}.type", part.type, why)

    def list_given_fields(self, kind: type[OpenAIFields]) -> list[str]:
        """Return the names of the body's set fields that `kind` has too."""
        return [name for name in kind.model_fields if name in self.model_fields_set]

    def _drop_unknown_constraints(self) -> Iterator[str]:
        """Remove unknown keys, which validation refuses, from `structured_outputs`. Yields their names."""
        constraint = self.structured_outputs or {}
        for key in constraint.keys() - StructuredOutputs.keys():
            del constraint[key]
            yield f"structured_outputs.{key}"


class CompletionRequest(OpenAIFields, json_schema_extra=make_route_schema_filter("completions")):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: WholeNumber = SamplingParams.max_tokens
    """0, with `echo`, scores the prompt and generates nothing."""
    logprobs: WholeNumber | None = None
    echo: bool = False
    """Begin the text with the prompt, and `logprobs` with those of the prompt."""

    @property
    def renamed_params(self) -> Mapping[str, str]:
        return {"prompt_logprobs": "logprobs"} if self.echo and self.prompt_logprobs is None else {}

    def make_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises `InvalidInputError` for a value out of range."""
        if not self.echo and self.prompt_logprobs is None:
            require_max_tokens(self.max_tokens, "echo")
        echo_logprobs = self.logprobs if self.echo else None
        if None not in (echo_logprobs, self.prompt_logprobs) and echo_logprobs != self.prompt_logprobs:
            why = f"; with echo, it must be equal to logprobs ({self.logprobs})"
            raise InvalidInputError.for_field("prompt_logprobs", self.prompt_logprobs, why)
        prompt_logprobs = self.prompt_logprobs if echo_logprobs is None else echo_logprobs
        return self._make_params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class ChatRequest(ToolFields, OpenAIFields, json_schema_extra=make_route_schema_filter("chat/completions")):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation. Parts without text, such as images, are refused in instructions and in the user's new message;
    in other messages, a placeholder such as `[image_url omitted]` replaces them."""
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    """Default: the rest of the context."""
    logprobs: bool = False
    top_logprobs: WholeNumber = 0
    add_generation_prompt: bool = True
    """Begin a new message of the assistant."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    continue_final_message: bool = False
    """Continue the last message; needs `add_generation_prompt: false`."""

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def list_messages(self) -> Iterator[tuple[str, Mapping[str, TextPart]]]:
        for number, message in enumerate(self.messages):
            yield message.role, index_parts_by_path(f"messages.{number}.content", message.content)

    @property
    def renamed_params(self) -> Mapping[str, str]:
        names = {"logprobs": "top_logprobs"} if self.top_logprobs else {}
        return names if self.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}

    def make_sampling_params(self, num_free_tokens: int) -> SamplingParams:
        """Return the sampling parameters. `num_free_tokens`: context left by the prompt. Raises
        `InvalidInputError`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs: true", field="top_logprobs", value=self.top_logprobs)
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        max_tokens = limits[0] if limits else num_free_tokens
        require_max_tokens(max_tokens, "echo on /v1/completions")
        return self._make_params(
            max_tokens=max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
