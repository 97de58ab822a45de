"""Fields by which a chat request names tools. Field names and meanings are OpenAI's; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from swiftkv_platform.frozen import FrozenModel

MAX_TOOLS = 128
"""Most tools of a request."""
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(FrozenModel, strict=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; null: there are none."""
    strict: bool | None = None
    """Arguments follow the schema also where the model chooses whether to call."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Schema that says at least that arguments are an object."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(FrozenModel, strict=True):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(FrozenModel, strict=True):
    name: ToolName


class NamedTool(FrozenModel, strict=True):
    type: Literal["function"]
    function: NamedFunction


class ToolFields(FrozenModel, strict=True):
    """Tools of a chat request."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`auto`, the default with tools: the model chooses; `none`: the model does not see them; `required`: it calls one
    or more; a function by name: it calls that one."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
