"""Conversations are rendered by the tokenizer's template, and exactly the assistant's tokens become targets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swiftkv_platform.data.chat import ChatRenderer, RenderedText
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.messages import Message, RowError, normalize_messages
from swiftkv_platform.errors import ModelError
from tests.support.fakes.tokenizers import byte_tokenizer

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
"""A template that renders the last turn differently, like Qwen3's."""
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}"
"""A template that leaves out every assistant turn but the last."""
DATED = "{{ date_string if date_string is defined else strftime_now('%c') }} {{ messages[0].content }}"

FORGETS_THOUGHTS = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ (m.content or '').split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content or '' }}{% endif %}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops the thoughts of every turn but the last, like Qwen3's, and adds a system prompt."""
THOUGHT = {"role": "assistant", "content": "<think>two and two</think> 4"}
SAID_AT_LAST = f"{THOUGHT['content']}<|im_end|>\n"
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": CALLS}
SAID, TOLD = {"role": "assistant", "content": "."}, {"role": "tool", "content": "4"}
ASK = {"role": "user", "content": "Sum?"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "user"},
    ASK,
    {"role": "assistant", "content": "user"},
]


def counted(rendered: RenderedText) -> list[str]:
    assert rendered.loss_spans is not None
    return [rendered.text[begin:end] for begin, end in rendered.loss_spans]


def renderer(template: Any = None) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(chat_template=template))


def render_text(template: Any, conversation: Conversation) -> str:
    return renderer(template).render_prompt(conversation, add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, TALK, ["user<|im_end|>\n"] * 2),
        (MARKED, TALK, ["user;"] * 2),
        (THINKING, TALK, ["user<|im_end|>\n", "<think>\n\n</think>\n\nuser<|im_end|>\n"]),
        (None, TALK, ["user\n"] * 2),
        (FORGETS_THOUGHTS, [ASK, THOUGHT, ASK, THOUGHT], ["4<|im_end|>\n", SAID_AT_LAST]),
        (FORGETS_THOUGHTS, [ASK, CALL, TOLD, THOUGHT], ["<call>add</call><|im_end|>\n", SAID_AT_LAST]),
        (THINKING, [ASK, SAID, ASK, THOUGHT], [".<|im_end|>\n", f"<think>\n\n</think>\n\n{SAID_AT_LAST}"]),
        (CHATML, [{"role": "assistant", "content": "Hi"}], ["Hi<|im_end|>\n"]),
        (FORGETS_THOUGHTS, [{"role": "assistant", "content": "You"}, ASK, THOUGHT], ["You<|im_end|>\n", SAID_AT_LAST]),
        (None, [ASK, CALL], ['[{"name": "add", "arguments": {}}]\n']),
    ],
)
def test_an_assistant_turn_is_its_content_and_what_closes_it_whatever_the_template_makes_of_it(
    template: str | None, messages: list[Message], expected: list[str]
) -> None:
    [rendered] = renderer(template).render_for_training(Conversation(messages), "assistant")
    assert counted(rendered) == expected
    assert render_text(template, Conversation(messages)) == rendered.text


def test_without_a_template_messages_stand_under_headings() -> None:
    assert not renderer().has_chat_template
    headed = "### System:\nBe brief.\n### User:\nassistant\n### Assistant:\nuser\n"
    assert render_text(None, Conversation(TALK[:3])) == headed


def test_only_a_template_that_asks_for_it_sees_that_a_call_has_no_words() -> None:
    call = Conversation([ASK, CALL])
    asks = "{% for m in messages %}{% if m['content'] is not none %}{{ m.content }}"
    asks += "{% else %}<{{ m.tool_calls | length }}>{% endif %}|{% endfor %}"
    plain = "{% if tools is none %}-{% endif %}{% for m in messages %}{{ m.content }}"
    plain += "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|{% endfor %}"
    called = json.dumps(normalize_messages([CALL])[0]["tool_calls"])
    assert render_text(asks, call) == "Sum?|<1>|"
    assert render_text(plain, call) == f"-Sum?|{called}|"


def test_a_template_reads_the_functions_that_may_be_called() -> None:
    asked = Conversation([ASK], [{"name": "add"}])
    assert render_text("{{ tools[0].function.name }}: {{ messages[0].content }}", asked) == "add: Sum?"
    assert (
        render_text(None, asked) == '### Tools:\n[{"type": "function", "function": {"name": "add"}}]\n### User:\nSum?\n'
    )


def test_templates_of_which_none_is_the_default_are_refused_for_conversations_alone() -> None:
    without = renderer({"tools": CHATML, "rag": CHATML})
    with pytest.raises(ModelError, match="none is named 'default'"):
        without.render_prompt(Conversation(TALK))
    assert render_text({"tools": "", "default": CHATML}, Conversation(TALK)).startswith("<|im_start|>system")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (ALTERNATING, TALK, "refuses the conversation: roles must alternate"),
        (CHATML, [ASK, CALL, TOLD], "leaves out tool_calls"),
        *(
            (
                template,
                [ASK, {**SAID, key: "two and two"}],
                rf"leaves out {key}; move it into `content` in the model's format",
            )
            for key in ("reasoning_content", "reasoning", "thinking")
            for template in (CHATML, None, "{% set enable_thinking, reasoning_contents = 1, 2 %}" + CHATML)
        ),
    ],
)
def test_what_a_template_cannot_do_is_said(template: str, messages: list[Message], message: str) -> None:
    with pytest.raises(RowError, match=message):
        renderer(template).render_for_training(Conversation(messages), "assistant")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


@pytest.mark.parametrize("content", ["", None, " \n"])
@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, FORGETS_THOUGHTS, NO_SYSTEM, None])
def test_an_empty_system_message_fails_with_no_template(template: str | None, content: str | None) -> None:
    talk = Conversation([{"role": "system", "content": content}, ASK, SAID])
    for train_on in ("assistant", "all"):
        [rendered] = renderer(template).render_for_training(talk, train_on)
        assert "Sum?" in rendered.text
        assert train_on == "all" or "".join(counted(rendered)).strip().startswith((".", "<think>"))
    prompt = renderer(template).render_prompt(Conversation(talk.messages[:2]))
    assert ("system" in prompt.lower()) == (template is not NO_SYSTEM)
    with pytest.raises(RowError, match="no system role"):
        renderer(NO_SYSTEM).render_prompt(Conversation(TALK))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (MARKED, None),
        (MARKED.replace("{{ m.content }};{% endgeneration %}", "{{ m.content }}{% endgeneration %};"), ";"),
        (MARKED.replace("{{ m.content }};{% endgeneration %}", "{{ m.content }}{%- endgeneration -%}\n ; "), ";"),
        (CHATML, None),
        (None, None),
        (ALTERNATING.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"), None),
    ],
)
def test_the_end_that_a_template_leaves_out_of_the_answer_is_found(template: str | None, end: str | None) -> None:
    assert renderer(template).find_excluded_end_marker() == end


def test_reasoning_is_accepted_where_the_template_renders_it_or_it_is_empty() -> None:
    reasons = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    talk = [ASK, {**SAID, "reasoning_content": "two and two"}]
    assert counted(renderer(reasons).render_for_training(Conversation(talk), "assistant")[0])[0].startswith("two and")
    assert renderer(CHATML).render_for_training(Conversation([ASK, {**SAID, "reasoning_content": ""}]), "assistant")
    assert renderer(CHATML).render_prompt(Conversation(talk)), "requests are answered without it"


def test_an_answer_that_the_whole_conversation_leaves_out_has_a_text_of_its_own() -> None:
    whole, first = renderer(FORGETFUL).render_for_training(Conversation(TALK), "assistant")
    assert (whole.text, counted(whole)) == ("assistant\nSum?\nuser\n", ["user\n"])
    assert (first.text, counted(first)) == ("assistant\nuser\n", ["user\n"])


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, None])
def test_a_turn_without_weight_counts_nowhere(template: str | None) -> None:
    talk = [*TALK[:2], {"role": "assistant", "content": "wrong", "weight": 0}, *TALK[3:]]
    [assistant] = renderer(template).render_for_training(Conversation(talk), "assistant")
    [everything] = renderer(template).render_for_training(Conversation(talk), "all")
    assert [said.rpartition("user")[1] for said in counted(assistant)] == ["user"]
    assert "wrong" in everything.text
    assert "wrong" not in "".join(counted(everything))
    assert "".join(counted(everything)).count("Sum?") == 1
    [whole] = renderer(template).render_for_training(Conversation(TALK), "all")
    assert whole.loss_spans is None


def test_a_template_that_prints_the_date_prints_the_same_one_every_day() -> None:
    for template in (DATED, "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"):
        assert render_text(template, Conversation(TALK)) == "26 Jul 2024 Be brief."
