"""Conversations as text, with the character spans that the assistant wrote. Knows chat templates, no tensor.

A tokenizer's own chat template is used where it has one and then owns every special token. Otherwise `PLAIN_TEMPLATE`
writes each message under a heading, and the caller frames the document with BOS and EOS like any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, cast

from swiftkv_platform.data.formats import Conversation, RowError
from swiftkv_platform.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% if tools %}### Tools:\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}### {{ message.role | capitalize }}:\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Template for tokenizers without a chat template."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TELLS_NONE = re.compile(r"\bis\s+(not\s+)?none\b", re.IGNORECASE)
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_TEMPLATE_DATE = datetime(2024, 7, 26)  # a day, nowhere
"""Templates print today's date, and data must not change overnight; this is the default of Llama 3's."""
_PLACEHOLDER = "\u241e\u2063\u241f"
"""Stands for what a message says; no text has it."""

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations for one tokenizer."""

    template: str | None
    """Chat template; None where the tokenizer has several of its own, and none of them is the default."""
    is_plain: bool
    """Whether the tokenizer has no template of its own."""
    special_tokens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
        special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        templates = tokenizer.chat_template
        if templates:
            template = templates.get("default") if isinstance(templates, dict) else templates
            undated = None if template is None else _undated(template)
            return cls(undated, is_plain=False, special_tokens=special_tokens)
        return cls(PLAIN_TEMPLATE, is_plain=True, special_tokens=special_tokens)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text. Raises `RowError`: the template refuses the messages; `ModelError`: the tokenizer
        has no default template."""
        return self._render(conversation)[0]

    def render_prompt(self, conversation: Conversation) -> str:
        """The conversation up to where the assistant's answer begins. Raises as `render`."""
        return self._render(conversation, add_generation_prompt=True)[0]

    def render_with_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The text, and the [begin, end) characters of each assistant turn, its closing marker included.

        Where the template marks them by `{% generation %}`, its marks count; otherwise the turns are found by rendering
        the conversation up to each of them. Raises `RowError`: the template refuses the messages, or a turn cannot be
        found in what it writes; `ModelError`: the tokenizer has no default template.
        """
        if self.template is not None and _MARKS_ASSISTANT.search(self.template):
            return self._render(conversation, with_spans=True)
        text = self.render(conversation)
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        spans = [self._find_turn(conversation, turn, text) for turn in turns]
        for (_, end), (begin, _), turn in zip(spans, spans[1:], turns, strict=False):
            if end > begin:
                raise _lost(turn)
        return text, spans

    def _find_turn(self, conversation: Conversation, turn: int, text: str) -> Span:
        """Characters of message `turn` in `text`, the rendering of the whole conversation."""
        begin = self._find_beginning(conversation, turn, text)
        closed = self.render(_part(conversation, turn + 1))
        if text.startswith(closed):
            return begin, len(closed)
        # Some templates write the last turn unlike earlier ones (Qwen3 adds an empty thinking block, and takes the
        # thoughts out of earlier turns), so no rendering of a part is a prefix of the whole. What closes a turn is then
        # read off one that says something else, and what follows it off a whole that says something else there.
        other = _saying_otherwise(conversation, turn)
        follows = _common_prefix_length(text[::-1], self.render(other)[::-1])
        closing = self.render(_part(other, turn + 1)).rpartition(_PLACEHOLDER)[2]
        content_end = len(text) - follows
        if content_end <= begin or not text.startswith(closing, content_end):
            raise _lost(turn)
        return begin, content_end + len(closing)

    def _find_beginning(self, conversation: Conversation, turn: int, text: str) -> int:
        """Return the place at which message `turn` begins, behind what a prompt for it ends with."""
        if turn:
            return _common_prefix_length(self.render_prompt(_part(conversation, turn)), text)
        return _common_prefix_length(self.render(_saying_otherwise(conversation, turn)), text)

    def _render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False, with_spans: bool = False
    ) -> tuple[str, list[Span]]:
        if self.template is None:
            raise ModelError(
                "the tokenizer has several chat templates, none of them named 'default', and data.sources holds "
                "conversations; use a tokenizer with a default one",
                field="model.name_or_path",
            )
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = conversation.messages
        if not _TELLS_NONE.search(self.template):  # it would print a call without words as "None"
            messages = [{**m, "content": ""} if m["content"] is None else m for m in messages]
        # declared as returning str; what it returns is a text and the marked spans for each conversation
        render = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
        try:
            texts, spans = render(
                conversations=[messages],
                tools=conversation.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=add_generation_prompt,
                date_string=f"{_TEMPLATE_DATE:%d %b %Y}",
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return texts[0], spans[0] if with_spans else []


def _undated(template: str) -> str:
    """The template with our date in the place of today's."""
    return _TODAY.sub(lambda call: json.dumps(_TEMPLATE_DATE.strftime(call[2])), template)


def _part(conversation: Conversation, num_messages: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:num_messages])


def _saying_otherwise(conversation: Conversation, turn: int) -> Conversation:
    """Return the conversation with words in message `turn` that are in no other, and nothing beside words."""
    messages = list(conversation.messages)
    messages[turn] = {"role": messages[turn]["role"], "content": _PLACEHOLDER}
    return replace(conversation, messages=messages)


def _lost(turn: int) -> RowError:
    return RowError(
        f"the chat template does not reproduce assistant message {turn}, so its tokens cannot be told from the others; "
        "use a template with {% generation %} marks, or data.train_on: all"
    )


def _common_prefix_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
