"""Tools of a chat request, and the constraint and parser for the tool calls of its completions. Knows no route.

Names and meanings of fields are OpenAI's. Unknown keys have no effect, and the template does not get them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.serve.chat import get_chat_template
from swiftkv_platform.serve.schemas import BodyPart, TypedPart
from swiftkv_platform.serve.tools.families import FAMILIES, CallFormat, CallGrammar, detect_family
from swiftkv_platform.serve.tools.parser import ToolCallParser
from swiftkv_platform.specs.structured_outputs import check_schema_supported

MAX_TOOLS = 1024
"""Max tools of a request on any route."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


@dataclass(frozen=True)
class ToolLimits:
    """Limits of an API."""

    max_tools: int
    max_name_length: int
    """In characters."""


OPENAI_LIMITS = ToolLimits(max_tools=128, max_name_length=64)
ANTHROPIC_LIMITS = ToolLimits(max_tools=MAX_TOOLS, max_name_length=128)
"""Anthropic documents no number of tools; Claude Code with some MCP servers sends more than 200."""


class FunctionTool(BodyPart):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, of type object; null: no arguments."""
    strict: bool | None = None
    """Whether arguments follow the schema even if calls are optional."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema of the arguments, with at least the type object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(TypedPart):
    """A function. Tools of other types, which are run by a provider's servers or called without JSON, are skipped."""

    required_keys = {"function": ("function",)}
    function: FunctionTool

    def to_template_format(self) -> dict[str, Any]:
        fields = {name: getattr(self.function, name) for name in FunctionTool.model_fields}
        return {"type": self.type, "function": {name: value for name, value in fields.items() if value is not None}}


SKIPPED_TOOL: dict[str, Any] = {"type": "skipped"}
"""A skipped tool of another route in the chat request, in which the other tools keep their numbers."""


class NamedFunction(BodyPart):
    name: ToolName


class NamedTool(BodyPart):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BodyPart):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(BodyPart):
    """Restriction to some of the tools: the model gets all, and may call only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def get_choice_kind(value: Any) -> Any:
    """Return the kind of a tool choice, so that errors name only fields of that kind."""
    if isinstance(value, str):
        return "word" if value in ("none", "auto", "required") else None
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


CHOICE_KINDS = Discriminator(
    get_choice_kind,
    custom_error_type="tool_choice",
    custom_error_message="must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolChoice, Tag("allowed_tools")],
    CHOICE_KINDS,
]


class ToolFields(FrozenBaseModel, strict=True):
    """Tools of a chat request."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto` (default): calls are optional; `none`: the model does not get the tools; `required`: at least one call; a
    named function: one call of it; `allowed_tools`: `auto` or `required` with these tools only."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per completion."""

    @property
    def numbered_functions(self) -> list[tuple[int, Tool]]:
        """Tools that are not skipped, with their numbers in `tools`."""
        return [(number, tool) for number, tool in enumerate(self.tools or ()) if tool.replaced_type is None]


_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolCallRules:
    """Rules for the tool calls of a request's completions."""

    family: CallFormat
    tools: list[dict[str, Any]]
    """Tools in the format of templates."""
    names: frozenset[str]
    special: Mapping[str, int]
    """Ids of the family's markers that are special tokens, by text; if any, the completion's text includes special
    tokens."""
    constraint: StructuredOutputs | None

    def apply_to_params(self, params: SamplingParams) -> SamplingParams:
        """Return the request's parameters with the constraint, and with special tokens if calls need them."""
        skip = params.skip_special_tokens and not self.special
        constraint = self.constraint or params.structured_outputs
        return replace(params, structured_outputs=constraint, skip_special_tokens=skip)

    def make_parser(self) -> ToolCallParser:
        return self.family.parser(self.names)


def make_tool_call_rules(
    fields: ToolFields,
    tokenizer: Any,
    limits: ToolLimits,
    parser: str | None = None,
    text_constraint: StructuredOutputs | None = None,
) -> ToolCallRules | None:
    """Return the rules for a request's tools; None without callable tools.

    Args:
        limits: of the route's API.
        parser: the deployment's `tool_call_parser`.
        text_constraint: the request's own constraint on the completion's text.

    Raises:
        InvalidInputError: tools beyond a limit, a tool choice that names a missing tool, an invalid schema, or a chat
            template without tools or of an unknown family.
    """
    # 1. check tools and tool choice
    functions, choice = _collect_functions(fields, limits), fields.tool_choice
    if not functions or choice == "none":
        return None
    # 2. find the family by the chat template, and its markers among the special tokens
    tools = [tool.to_template_format() for _, tool in fields.numbered_functions]
    family = _find_family(tokenizer, tools, parser)
    # Imports torch, which Serve's controller does not need.
    from swiftkv_platform.model.tokenizers import get_special_ids

    ids = get_special_ids(tokenizer)
    ids_by_marker = {token: tokenizer.convert_tokens_to_ids(token) for token in family.tokens}
    special = {token: token_id for token, token_id in ids_by_marker.items() if token_id in ids}
    # 3. constrain the completion
    constraint = _make_constraint(fields, functions, CallGrammar(family.layout, {}, special), text_constraint)
    return ToolCallRules(family, tools, frozenset(_list_callable_names(choice, functions)), special, constraint)


def _collect_functions(fields: ToolFields, limits: ToolLimits) -> dict[str, FunctionTool]:
    """Check the functions and the tool choice, and return the functions by name."""
    if (num_tools := len(fields.tools or ())) > limits.max_tools:
        message = f"tools has {num_tools} entries; send at most {limits.max_tools}"
        raise InvalidInputError(message, field="tools", value=num_tools)
    functions: dict[str, FunctionTool] = {}
    for number, tool in fields.numbered_functions:
        function, path = tool.function, f"tools.{number}.function"
        if len(function.name) > limits.max_name_length:
            why = f", which has {len(function.name)} characters; use at most {limits.max_name_length}"
            raise InvalidInputError.for_field(f"{path}.name", function.name, why)
        if function.name in functions:
            why = ", which is also the name of another tool; names must differ"
            raise InvalidInputError.for_field(f"{path}.name", function.name, why)
        # Check depth and length even of a schema that is not compiled, since the template writes it out.
        StructuredOutputs(json=function.arguments_schema, source=f"{path}.parameters")
        if (kind := function.arguments_schema["type"]) != "object":
            raise InvalidInputError.for_field(f"{path}.parameters.type", kind, "; arguments are an 'object'")
        functions[function.name] = function
    choice = fields.tool_choice
    missing = [name for name in _list_callable_names(choice, functions) if name not in functions]
    if missing or (choice == "required" and not functions):
        requested = missing[0] if missing else choice
        present = ", ".join(functions) or "none"
        why = f"; the functions in tools are {present}: name one of them, or leave tool_choice out"
        raise InvalidInputError.for_field("tool_choice", requested, why)
    return functions


def _list_callable_names(choice: Any, functions: Mapping[str, FunctionTool]) -> list[str]:
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedToolChoice):
        return [*dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools)]
    return [*functions]


def _make_constraint(
    fields: ToolFields,
    functions: Mapping[str, FunctionTool],
    calls: CallGrammar,
    text_constraint: StructuredOutputs | None,
) -> StructuredOutputs | None:
    """Return the constraint on the completion; None if the completion may be any text."""
    # 1. decide what must be constrained: calls, the number of calls, arguments, other text
    choice, allowed = fields.tool_choice, _list_callable_names(fields.tool_choice, functions)
    subset = choice.allowed_tools if isinstance(choice, AllowedToolChoice) else None
    is_required = (
        choice == "required" or isinstance(choice, NamedTool) or (subset is not None and subset.mode == "required")
    )
    is_single = fields.parallel_tool_calls is False or isinstance(choice, NamedTool)
    strict_names = {name for name in allowed if is_required or functions[name].strict}
    if not (is_required or strict_names or text_constraint or is_single or subset):
        return None
    # 2. select the schema of each tool's arguments
    schemas = {name: functions[name].arguments_schema if name in strict_names else _ANY_OBJECT for name in allowed}
    numbers = {tool.function.name: number for number, tool in fields.numbered_functions}
    names = {name: f"tools.{number}.function.parameters" for name, number in numbers.items()}
    for name in strict_names:
        check_schema_supported(schemas[name], names[name])
    # 3. make the grammar, and map its lines to tools for error messages
    calls = replace(calls, schemas=schemas, parallel=not is_single)
    make_optional = (
        calls.make_text_with_calls
        if text_constraint is None or is_required
        else partial(calls.make_calls_or_json, _read_schema(text_constraint))
    )
    grammar = calls.make_calls_only() if is_required else make_optional()
    parts = {line: (names[name], schemas[name]) for line, name in calls.map_lines_to_tools(grammar).items()}
    return StructuredOutputs(grammar=grammar, source="tools", parts=parts)


def _read_schema(text_constraint: StructuredOutputs) -> dict[str, Any]:
    """Return the JSON schema of a completion without calls, from the request's own constraint."""
    if text_constraint.kind not in ("json", "json_object"):
        raise InvalidInputError(
            f"{text_constraint.name} constrains the whole completion; with tools use JSON, or tool_choice: none",
            field=text_constraint.name,
            value=text_constraint.text,
        )
    text_constraint.check_schema_supported()
    schema: dict[str, Any] = json.loads(text_constraint.text)
    is_compact = text_constraint.disable_any_whitespace
    return {**schema, "x-guidance": {"whitespace_flexible": False}} if is_compact else schema


def _find_family(tokenizer: Any, tools: list[dict[str, Any]], parser: str | None) -> CallFormat:
    template = get_chat_template(tokenizer, tools)
    if template is not None and "tools" not in template:
        raise InvalidInputError(
            "the model's chat template does not support tools; leave tools out, or set the deployment's chat_template",
            field="tools",
        )
    name = parser or detect_family(template or "")
    if name is None:
        raise InvalidInputError(
            "the model's chat template has an unknown format of tool calls; set the deployment's tool_call_parser: "
            f"{', '.join(FAMILIES)}",
            field="tools",
        )
    return FAMILIES[name]
