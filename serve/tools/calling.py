"""Tools of a chat request, and the engine constraint and answer parser made from them. Knows no route.

Names and meanings of fields are OpenAI's; unknown keys have no effect and are not passed to the template.
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
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.serve.chat import chat_template
from swiftkv_platform.serve.schemas import Nested
from swiftkv_platform.serve.tools.families import FAMILIES, CallFormat, CallGrammar, family_of
from swiftkv_platform.serve.tools.parser import ToolCallParser
from swiftkv_platform.specs.structured_outputs import check_supported

MAX_TOOLS = 128
"""Most tools of a request."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(Nested):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, of type object; null: no arguments."""
    strict: bool | None = None
    """Whether arguments follow the schema even if the model chooses whether to call."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Schema of the arguments, with at least the type object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(Nested):
    type: Literal["function"]
    function: FunctionTool

    def for_template(self) -> dict[str, Any]:
        known = {name: getattr(self.function, name) for name in FunctionTool.model_fields}
        return {"type": self.type, "function": {name: value for name, value in known.items() if value is not None}}


class NamedFunction(Nested):
    name: ToolName


class NamedTool(Nested):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Nested):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Nested):
    """Restriction to some of the tools: the model sees all, and may call only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: Any) -> Any:
    """Return the kind of a tool choice, so that errors name only the fields of that kind."""
    if isinstance(value, str):
        return "word" if value in ("none", "auto", "required") else None
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


CHOICE_KINDS = Discriminator(
    choice_kind,
    custom_error_type="tool_choice",
    custom_error_message="must be 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'",
)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolChoice, Tag("allowed_tools")],
    CHOICE_KINDS,
]


class ToolFields(FrozenModel, strict=True):
    """Tools of a chat request."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the answer may call."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default with tools: the model chooses; `none`: the model does not see the tools; `required`: it calls
    at least one; a named function: it calls that one; `allowed_tools`: `auto` or `required`, among these only."""
    parallel_tool_calls: bool | None = None
    """False: at most one call per answer."""


_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolCalling:
    """Rules for tool calls in one request's answers."""

    family: CallFormat
    tools: list[dict[str, Any]]
    """Tools, as templates take them."""
    names: frozenset[str]
    special: Mapping[str, int]
    """Markers of the family that are special tokens, by text; the answer's text must then include special tokens."""
    constraint: StructuredOutputs | None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return the request's parameters with the constraint and special tokens that calls need."""
        shown = params.skip_special_tokens and not self.special
        constraint = self.constraint or params.structured_outputs
        return replace(params, structured_outputs=constraint, skip_special_tokens=shown)

    def parser(self) -> ToolCallParser:
        return self.family.parser(self.names)


def tool_calling(
    fields: ToolFields, tokenizer: Any, parser: str | None = None, asked: StructuredOutputs | None = None
) -> ToolCalling | None:
    """Return the rules for a request's tools; None if none may be called.

    Args:
        parser: the deployment's `tool_call_parser`.
        asked: the request's own constraint on its text.

    Raises:
        InvalidInputError: a choice that names a missing tool, a schema that is not valid, or a model whose template has
            no place for tools or belongs to no known family.
    """
    functions, choice = _functions(fields), fields.tool_choice
    if not functions or choice == "none":
        return None
    tools = [tool.for_template() for tool in fields.tools or ()]
    family = _family(tokenizer, tools, parser)
    from swiftkv_platform.model.tokenizers import (
        get_special_ids,  # imports torch, which Serve's controller does not need
    )

    ids = get_special_ids(tokenizer)
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in family.tokens}
    special = {token: token_id for token, token_id in found.items() if token_id in ids}
    constraint = _constraint(fields, functions, CallGrammar(family.layout, {}, special), asked)
    return ToolCalling(family, tools, frozenset(_callable(choice, functions)), special, constraint)


def _functions(fields: ToolFields) -> dict[str, FunctionTool]:
    """Return the functions by name, after checking each of them and the tool choice."""
    functions: dict[str, FunctionTool] = {}
    for number, tool in enumerate(fields.tools or ()):
        function, where = tool.function, f"tools.{number}.function"
        if function.name in functions:
            why = ", which is also the name of another tool; names must differ"
            raise InvalidInputError.for_field(f"{where}.name", function.name, why)
        # Limit depth and length as for compiled schemas even if it is not compiled, since the template writes it out.
        StructuredOutputs(json=function.schema_of_arguments, source=f"{where}.parameters")
        if (kind := function.schema_of_arguments["type"]) != "object":
            raise InvalidInputError.for_field(f"{where}.parameters.type", kind, "; arguments are an 'object'")
        functions[function.name] = function
    choice = fields.tool_choice
    missing = [name for name in _callable(choice, functions) if name not in functions]
    if missing or (choice == "required" and not functions):
        wanted = missing[0] if missing else choice
        present = ", ".join(functions) or "none"
        why = f", and tools has {present}; name one of them, or leave tool_choice out"
        raise InvalidInputError.for_field("tool_choice", wanted, why)
    return functions


def _callable(choice: Any, functions: Mapping[str, FunctionTool]) -> list[str]:
    """Return the names of the functions that may be called."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedToolChoice):
        return [*dict.fromkeys(tool.function.name for tool in choice.allowed_tools.tools)]
    return [*functions]


def _constraint(
    fields: ToolFields, functions: Mapping[str, FunctionTool], calls: CallGrammar, asked: StructuredOutputs | None
) -> StructuredOutputs | None:
    """Return the grammar that constrains the answer; None if the model may write anything."""
    choice, allowed = fields.tool_choice, _callable(fields.tool_choice, functions)
    part = choice.allowed_tools if isinstance(choice, AllowedToolChoice) else None
    must = choice == "required" or isinstance(choice, NamedTool) or (part is not None and part.mode == "required")
    is_single = fields.parallel_tool_calls is False or isinstance(choice, NamedTool)
    followed = {name for name in allowed if must or functions[name].strict}
    if not (must or followed or asked or is_single or part):
        return None
    schemas = {name: functions[name].schema_of_arguments if name in followed else _ANY_OBJECT for name in allowed}
    names = {name: f"tools.{number}.function.parameters" for number, name in enumerate(functions)}
    for name in followed:
        check_supported(schemas[name], names[name])
    calls = replace(calls, schemas=schemas, parallel=not is_single)
    instead = calls.or_text if asked is None or must else partial(calls.or_answer, _schema(asked))
    grammar = calls.required() if must else instead()
    parts = {line: (names[name], schemas[name]) for line, name in calls.lines(grammar).items()}
    return StructuredOutputs(grammar=grammar, source="tools", parts=parts)


def _schema(asked: StructuredOutputs) -> dict[str, Any]:
    """Return the JSON schema for an answer without calls, from the request's own constraint."""
    if asked.kind not in ("json", "json_object"):
        raise InvalidInputError(
            f"{asked.name} constrains the whole answer, which tool calls would violate; use JSON, or tool_choice: none",
            field=asked.name,
            value=asked.text,
        )
    asked.check_supported()
    schema: dict[str, Any] = json.loads(asked.text)
    return {**schema, "x-guidance": {"whitespace_flexible": False}} if asked.disable_any_whitespace else schema


def _family(tokenizer: Any, tools: list[dict[str, Any]], parser: str | None) -> CallFormat:
    template = chat_template(tokenizer, tools)
    if template is not None and "tools" not in template:
        raise InvalidInputError(
            "tools are given, but the model's chat template does not support them; set a deployment's chat_template",
            field="tools",
        )
    name = parser or family_of(template or "")
    if name is None:
        raise InvalidInputError(
            "tools are given, but the model's tool-call format is not known from its chat template; set a deployment's "
            f"tool_call_parser: {', '.join(FAMILIES)}",
            field="tools",
        )
    return FAMILIES[name]
