"""Conversations are rendered by the tokenizer's template, and exactly the assistant's tokens become targets."""

from __future__ import annotations

import pytest

from swiftkv_platform.distillation.chat import ChatRenderer
from swiftkv_platform.distillation.data_formats import Conversation, RowError
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

TALK: Conversation = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "user"},
    {"role": "user", "content": "Sum?"},
    {"role": "assistant", "content": "user"},
]


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
    assert renderer.render(TALK[:3]) == "### System:\nBe brief.\n### User:\nassistant\n### Assistant:\nuser\n"


def test_a_conversation_may_begin_with_the_assistant() -> None:
    assert assistant_parts(CHATML, [{"role": "assistant", "content": "Hi"}]) == [
        "<|im_start|>assistant\nHi<|im_end|>\n"
    ]


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
    renderer = ChatRenderer.for_tokenizer(byte_tokenizer(chat_template=DATED))
    assert renderer.render(TALK) == "26 Jul 2024 Be brief."
