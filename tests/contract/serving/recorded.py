"""Requests of chat pages, editors and agents, taken from their public sources, with shorter texts and answers.

Sources: open-webui/open-webui (`routers/openai.py`, `routers/tasks.py`, `utils/middleware.py`, `utils/payload.py`),
zed-industries/zed (`crates/open_ai`, `crates/anthropic`, `crates/edit_prediction`), continuedev/continue (`core/llm`,
`core/autocomplete/templating`, `packages/openai-adapters`), cline/cline (`src/api/providers`), the gateway protocol of
code.claude.com and anthropics/claude-code#39589, and webai-at-home/webai-at-home#214 (Codex).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swiftkv_platform.serve.openai.fields import Route


@dataclass(frozen=True)
class Recorded:
    """A request that a program sends."""

    program: str
    route: Route
    body: dict[str, Any]
    named: tuple[str, ...] = ()
    """Exactly the fields that the answer's header must name."""
    headers: dict[str, str] = field(default_factory=dict)
    query: str = ""

    def __str__(self) -> str:
        return self.program


def _function(name: str, **properties: Any) -> dict[str, Any]:
    """Return a function as schema generators write it: with annotations, and a dialect."""
    parameters = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


_READ = _function(
    "read_file", path={"type": "string", "format": "uri-reference", "description": "Path.", "default": ""}
)
_EDIT = _function(
    "edit",
    edits={"type": "array", "items": {"type": "object", "propertyNames": {"type": "string"}}},
    offset={"anyOf": [{"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}, {"type": "null"}]},
)
_TOOLS = [{"type": "function", "function": one} for one in (_READ, _EDIT)]
_FLAT_TOOLS = [{"type": "function", **one, "strict": False} for one in (_READ, _EDIT)]
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_SYSTEM = {"role": "system", "content": "You edit code."}
_ASKED = {"role": "user", "content": "What is in a.py?"}
_CALL = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
_CACHED = {"cache_control": {"type": "ephemeral"}}

# Open WebUI's tasks next to a chat: titles, tags, follow-up questions, and completions of typed text.
_TASKS = {"task": "title_generation", "task_body": {"messages": [_ASKED]}, "chat_id": "c", "features": {"web": False}}
_OPEN_WEBUI = [
    Recorded(
        "Open WebUI, a chat",
        "chat/completions",
        {
            "messages": [_SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Hi", **_CACHED}]}],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "seed": 0,
            "stop": ["</s>"],
            "logit_bias": {"33": -100},
            "max_tokens": 9,
            "reasoning_effort": "medium",
            **_USAGE,
        },
        ("reasoning_effort", "messages.content.cache_control"),
    ),
    Recorded(
        "Open WebUI, thinking as an object",
        "chat/completions",
        {"messages": [_ASKED], "reasoning": {"effort": "medium"}, "max_tokens": 4, **_USAGE},
        ("reasoning",),
    ),
    Recorded(
        "Open WebUI, a title",
        "chat/completions",
        {
            "messages": [{"role": "user", "content": 'Answer as {"title": "..."}.'}],
            "stream": False,
            "max_completion_tokens": 9,
            "metadata": _TASKS,
        },
        ("metadata",),
    ),
    Recorded(
        "Open WebUI, of a pipeline's user",
        "chat/completions",
        {"messages": [_ASKED], "max_tokens": 4, "user": {"name": "ann", "id": "u", "email": "a@b", "role": "user"}},
        ("user",),
    ),
    Recorded(
        "Open WebUI, after its tools ran",
        "chat/completions",
        {
            "messages": [
                _ASKED,
                {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **_CALL}], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "x = 1", "files": []},
            ],
            "tools": _TOOLS,
            "max_tokens": 9,
            **_USAGE,
        },
        ("messages.tool_calls.index", "messages.files"),
    ),
]

_QWEN_STOPS = [
    "endoftext",
    "fim_prefix",
    "fim_middle",
    "fim_suffix",
    "fim_pad",
    "repo_name",
    "file_sep",
    "im_start",
    "im_end",
]
_MIDDLE = {
    "prompt": "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\n    return y\n<|fim_middle|>",
    "stop": [*(f"<|{name}|>" for name in _QWEN_STOPS), "/src/", "#- coding: utf-8", "```", "\ndef", "\nclass"],
}
_EDITORS = [
    Recorded(
        "Continue, a completion in the middle",
        "completions",
        {**_MIDDLE, "max_tokens": 9, "temperature": 0.01, "top_p": None, "frequency_penalty": None, "stream": True},
    ),
    Recorded("Zed, an edit that is predicted", "completions", {**_MIDDLE, "max_tokens": 9, "temperature": None}),
    Recorded(
        "Continue, a chat",
        "chat/completions",
        {
            "messages": [_SYSTEM, {"role": "user", "content": " "}, {"role": "assistant", "content": " "}, _ASKED],
            "max_tokens": 9,
            "tools": _TOOLS,
            "parallel_tool_calls": False,
            "prediction": {"type": "content", "content": "x = 1"},
            **_USAGE,
        },
        ("prediction",),
    ),
    Recorded(
        "Zed, a thread",
        "chat/completions",
        {
            "messages": [
                _SYSTEM,
                _ASKED,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c1"},
                {"role": "assistant", "content": [], "tool_calls": [_CALL], "reasoning_content": "hm"},
                {"role": "tool", "content": "x", "tool_call_id": "c1"},
            ],
            "max_completion_tokens": 9,
            "temperature": 1.0,
            "tools": _TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "thread",
            "reasoning_effort": "high",
            **_USAGE,
        },
        ("prompt_cache_key", "reasoning_effort"),
    ),
    Recorded(
        "Cline, a task",
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "You edit code.", **_CACHED}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "temperature": 0,
            "max_tokens": 9,
            "thinking": {"type": "disabled"},
            "tools": _TOOLS,
            "tool_choice": "auto",
            **_USAGE,
        },
        ("thinking", "messages.content.cache_control"),
    ),
]

_BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"
_ANTHROPICS_TOOLS = [
    {
        "name": one["name"],
        "description": one["description"],
        "input_schema": one["parameters"],
        "eager_input_streaming": True,
    }
    for one in (_READ, _EDIT)
]
_USE = {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "a.py"}}
_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "x = 1", "is_error": False, **_CACHED}
_BRIEF = {"type": "text", "text": "You edit code.", **_CACHED}
_ANTHROPICS = [
    Recorded(
        "Claude Code, a turn",
        "messages",
        {
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2"}, _BRIEF],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is in a.py?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "EmwK"},
                        _USE,
                    ],
                },
                {"role": "user", "content": [_RESULT, {"type": "text", "text": "<system-reminder>"}]},
                {"role": "system", "content": "The file has changed."},
            ],
            "tools": [*_ANTHROPICS_TOOLS[:1], {**_ANTHROPICS_TOOLS[1], **_CACHED}],
            "metadata": {"user_id": "user_1_account__session_2"},
            "max_tokens": 9,
            "temperature": 1,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        },
        (
            "metadata",
            "thinking",
            "context_management",
            "messages.content.signature",
            "messages.content.data",
            "messages.content.is_error",
            "messages.content.cache_control",
            "system.cache_control",
            "tools.eager_input_streaming",
            "tools.cache_control",
            "output_config.effort",
        ),
        {"anthropic-version": "2023-06-01", "anthropic-beta": _BETAS, "x-app": "cli"},
        "?beta=true",
    ),
    Recorded(
        "Claude Code, whether it may ask",
        "messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "u"}},
        ("metadata",),
    ),
    Recorded(
        "Zed, a thread in Anthropic's form",
        "messages",
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is in a.py?", **_CACHED}]},
                {"role": "assistant", "content": [_USE]},
                {"role": "user", "content": [{**_RESULT, "content": [{"type": "text", "text": "x = 1"}]}]},
            ],
            "tools": _ANTHROPICS_TOOLS,
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 4096},
            "system": "You edit code.",
            "stop_sequences": [],
            "temperature": 1.0,
            "top_k": None,
            "stream": True,
        },
        (
            "thinking",
            "messages.content.cache_control",
            "messages.content.is_error",
            "tools.eager_input_streaming",
        ),
    ),
]

CODEX = Recorded(
    "Codex, a turn",
    "responses",
    {
        "instructions": "You edit code.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a.py?"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "read_file", "arguments": '{"path": "a.py"}', "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "x = 1"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And b.py?"}]},
        ],
        "tools": _FLAT_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a",
        "client_metadata": {"x-codex-installation-id": "1"},
        "max_output_tokens": 9,  # Codex sends none, which means the rest of the context
    },
    ("reasoning", "store", "include", "prompt_cache_key", "client_metadata", "input.summary"),
)
REQUESTS = [*_OPEN_WEBUI, *_EDITORS, *_ANTHROPICS, CODEX]
