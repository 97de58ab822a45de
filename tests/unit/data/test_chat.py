"""Conversations are rendered by the tokenizer's template, and exactly the assistant's tokens become targets."""

from __future__ import annotations

import pytest

from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation, Message, RowError
from swiftkv_platform.errors import ModelError
from tests.fakes.tokenizers import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes the last turn unlike the others, as Qwen3's does."""
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}"
    "{% if loop.last or m.role == 'user' %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}"
)
"""Leaves out every assistant turn but the last."""
DATED = "{{ date_string if date_string is defined else strftime_now('%c') }} {{ messages[0].content }}"

TALK = Conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "Sum?"},
        {"role": "assistant", "content": "user"},
    ]
)


def assistant_parts(template: str | None, messages: Conversation = TALK) -> list[str]:
    text, spans = ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=template)).render_with_spans(messages)
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["user<|im_end|>\n"] * 2),
        (MARKED, ["user;"] * 2),
        (THINKING, ["user<|im_end|>\n", "<think>\n\n</think>\n\nuser<|im_end|>\n"]),
        (None, ["user\n"] * 2),
    ],
    ids=["prefixes", "marked", "last-turn-differs", "plain"],
)
def test_an_assistant_turn_is_its_content_and_what_closes_it(template: str | None, expected: list[str]) -> None:
    assert assistant_parts(template) == expected


def test_spans_do_not_change_the_text() -> None:
    for template in (CHATML, MARKED, THINKING, None):
        renderer = ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=template))
        assert renderer.render(TALK) == renderer.render_with_spans(TALK)[0]


def test_without_a_template_messages_stand_under_headings() -> None:
    renderer = ChatRenderer.for_tokenizer(byte_tokenizer())
    assert renderer.is_plain
    assert (
        renderer.render(Conversation(TALK.messages[:3]))
        == "### System:\nBe brief.\n### User:\nassistant\n### Assistant:\nuser\n"
    )


FORGETS_THOUGHTS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ (m.content or '').split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content or '' }}{% endif %}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].name }}</call>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes the thoughts out of every turn but the last, as Qwen3's does, and brings a system prompt of its own."""
THOUGHT = {"role": "assistant", "content": "<think>two and two</think> 4"}
SAID_AT_LAST = f"{THOUGHT['content']}<|im_end|>\n"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]}
ASK = {"role": "user", "content": "Sum?"}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (FORGETS_THOUGHTS, [ASK, THOUGHT, ASK, THOUGHT], ["4<|im_end|>\n", SAID_AT_LAST]),
        (
            FORGETS_THOUGHTS,
            [ASK, CALL, {"role": "tool", "content": "4"}, THOUGHT],
            ["<call>add</call><|im_end|>\n", SAID_AT_LAST],
        ),
        (
            THINKING,
            [ASK, CALL | {"content": "."}, ASK, THOUGHT],
            [".<|im_end|>\n", f"<think>\n\n</think>\n\n{SAID_AT_LAST}"],
        ),
        (CHATML, [{"role": "assistant", "content": "Hi"}], ["Hi<|im_end|>\n"]),
        (FORGETS_THOUGHTS, [{"role": "assistant", "content": "You"}, ASK, THOUGHT], ["You<|im_end|>\n", SAID_AT_LAST]),
        (None, [ASK, CALL], ['[{"name": "add", "arguments": {}}]\n']),
    ],
    ids=["thoughts", "call", "last-turn-differs", "begins", "begins-after-a-system-prompt", "plain-call"],
)  # fmt: skip
def test_a_turn_is_found_whatever_the_template_makes_of_it(
    template: str | None, messages: list[Message], expected: list[str]
) -> None:
    assert assistant_parts(template, Conversation(messages)) == expected


def test_only_a_template_that_asks_for_it_sees_that_a_call_has_no_words() -> None:
    call = Conversation([ASK, CALL])
    asks = "{% for m in messages %}{% if m.content is none %}<call>{% endif %}{{ m.content }}|{% endfor %}"
    plain = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    rendered = [ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=t)).render(call) for t in (asks, plain)]
    assert rendered == ["Sum?|<call>None|", "Sum?||"]


def test_a_template_reads_the_functions_that_may_be_called() -> None:
    tools = [{"name": "add"}]
    with_tools = "{{ tools[0].name }}: {{ messages[0].content }}"
    renderer = ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=with_tools))
    assert renderer.render(Conversation([ASK], tools)) == "add: Sum?"
    plain = ChatRenderer.for_tokenizer(byte_tokenizer())
    assert plain.render(Conversation([ASK], tools)) == '### Tools:\n[{"name": "add"}]\n### User:\nSum?\n'


def test_templates_of_which_none_is_the_default_are_refused_for_conversations_alone() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"tools": CHATML, "rag": CHATML}
    renderer = ChatRenderer.for_tokenizer(tokenizer)
    with pytest.raises(ModelError, match="none of them named 'default'"):
        renderer.render(TALK)
    tokenizer.chat_template["default"] = CHATML
    assert ChatRenderer.for_tokenizer(tokenizer).render(TALK).startswith("<|im_start|>system")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ALTERNATING, "refuses the conversation: roles must alternate"),
        (FORGETFUL, "does not reproduce assistant message 2"),
    ],
)
def test_what_a_template_cannot_do_is_said(template: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        assistant_parts(template)


def test_a_template_that_prints_the_date_prints_the_same_one_every_day() -> None:
    for template in (DATED, "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"):
        renderer = ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=template))
        assert renderer.render(TALK) == "26 Jul 2024 Be brief."
