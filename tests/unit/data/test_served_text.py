"""A student is trained on the text that it is served: each answer follows, token for token, the prompt that the chat
routes render for the same messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.data.formats import FORMATS, find_row_reader
from swiftkv_platform.serve.chat import render_chat
from swiftkv_platform.serve.openai.schemas import ChatMessage
from swiftkv_platform.serve.tools.calling import Tool
from tests.support.fakes.tokenizers import byte_tokenizer

LLAMA = (
    "{{ bos_token }}{% if tools is not none %}<|h|>ipython<|e|>{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|h|>system\n{{ system }}<|e|>{% if tools %}{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}"
    "{% endif %}{% for m in messages %}{% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}"
    "<|h|>{{ m['role'] }}\n{{ m['content'] | trim }}<|e|>{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|h|>assistant\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|e|>'
    "{% else %}<|h|>ipython\n{{ m.content | tojson }}<|e|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|s|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<tools>"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}</tools><|e|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not (loop.first and tools)) or "
    "(m.role == 'assistant' and not m.tool_calls) %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n"
    "{% elif m.role == 'assistant' %}<|s|>assistant{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}"
    '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|e|>\n{% elif m.role == 'tool' %}<|s|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|e|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n"
    "{% endif %}{{ m.content }}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if not call.id is defined or call.id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
)
"""A template with the tools only before the last question, and the system prompt inside that question."""
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'user' %}<User>{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}<Assistant>{% for call in m['tool_calls'] %}<call>"
    "{{ call['type'] + '<sep>' + call['function']['name'] + '\n' + call['function']['arguments'] + '</call>' }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% if m['role'] == 'assistant' and m['content'] is not none %}<Assistant>"
    "{{ m['content'] + eos_token }}{% endif %}{% if m['role'] == 'tool' %}<out>{{ m['content'] }}</out>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}"
)
"""A template that has calls only in turns without text, and joins their arguments to other text."""
THINKING = DEEPSEEK.replace(
    "{% if add_generation_prompt %}<Assistant>", "{% if add_generation_prompt %}<Assistant><think>\n"
)
"""A template whose generation prompt begins a thought, which it leaves out of earlier answers."""
PHI = (
    "{% for m in messages %}{% if m.role == 'system' and tools %}<|system|>{{ m.content }}<|tool|>{{ tools | tojson }}"
    "<|/tool|><|end|>{% elif m.tool_calls %}<|assistant|><|tool_call|>{{ m.tool_calls | map(attribute='function')"
    " | list | tojson }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"
)
SMOL = {
    "default": "{% for m in messages %}<|s|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
    "tool_use": "<|s|>tools\n{{ tools | tojson }}<|e|>\n{% for m in messages %}<|s|>{{ m.role }}\n{% generation %}"
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments }})"
    "{% endfor %}<|e|>{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
}
"""Two templates; the one for tools marks the assistant's turns and writes arguments as they are given."""
TEMPLATES = {
    "llama": LLAMA,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "thinking": THINKING,
    "phi": PHI,
    "smol": SMOL,
}

TOOL = {"function": {"parameters": {"type": "object"}, "description": "Adds.", "name": "add"}, "type": "function"}
SENT = [
    {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "2 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "7, I think.", "weight": 0},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "It is 6."},
]
OTHER_WAYS: list[dict[str, Any]] = [
    {"messages": SENT, "tools": [TOOL]},
    {
        "messages": [
            *SENT[:2],
            {"role": "assistant", "function_call": {"name": "add", "arguments": {"a": 2, "b": "é"}}, "id": None},
            {"role": "function", "name": None, "content": "4"},
            *SENT[4:],
        ],
        "functions": [{"name": "add", "parameters": {"type": "object"}, "description": "Adds."}],
    },
    {
        "conversations": [
            {"from": "developer", "value": "Be brief."},
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": "é"}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "It is 4."},
            {"from": "human", "value": "And 3 + 3?"},
            {"from": "gpt", "value": "7, I think.", "weight": 0},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "It is 6."},
        ],
        "tools": json.dumps([TOOL["function"]]),
    },
]
"""The same conversation in three conventions."""
COUNTED = [2, 4, 8]


def served(tokenizer: Any, turn: int) -> list[int]:
    """Tokens of the prompt that the chat routes render for the request that message `turn` answers."""
    fields = [{key: value for key, value in message.items() if key != "weight"} for message in SENT[:turn]]
    messages = [ChatMessage.model_validate(message).to_template_format() for message in fields]
    return render_chat(tokenizer, messages, tools=[Tool.model_validate(TOOL).model_dump(exclude_none=True)])


@pytest.mark.parametrize("row", OTHER_WAYS, ids=["openai", "function_call", "sharegpt"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_before_each_answer_stands_what_is_served(family: str, row: dict[str, Any]) -> None:
    template: Any = TEMPLATES[family]
    tokenizer = byte_tokenizer(chat_template=template)
    content = find_row_reader("auto", tuple(row), origin="rows", source_field="data", formats=FORMATS)(row)
    for train_on in ("assistant", "all"):
        encoder = DocumentEncoder(tokenizer, max_length=4096, train_on=train_on)
        [document] = encoder.encode([encoder.render(content)])
        for turn in COUNTED:
            prompt = served(tokenizer, turn)
            assert any(
                tokens[: len(prompt)].tolist() == prompt and counts[len(prompt) - 1]
                for tokens, counts in document.samples
            ), (train_on, turn)
        said = ["".join(tokenizer.decode(t[1:][c[:-1]]) for t, c in document.samples)]
        assert "7, I think." not in said[0]
        if train_on == "assistant":
            for words in ("It is 4.", "It is 6.", "add"):
                assert said[0].count(words) == 1, (words, said)
            assert "2 + 2" not in said[0]
