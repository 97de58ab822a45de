"""Conversations as text, with the character spans that the assistant wrote. Knows chat templates, no tensor.

A tokenizer's own chat template is used where it has one and then owns every special token. Otherwise `PLAIN_TEMPLATE`
writes each message under a heading, and the caller frames the document with BOS and EOS like any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from swiftkv_platform.distillation.data_formats import Conversation, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN_TEMPLATE = (
    "{% for message in messages %}### {{ message.role | capitalize }}:\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""For tokenizers without a chat template."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_DATE = "26 Jul 2024"
"""Llama 3 templates print today's date unless told one, and data must not change overnight; this is their default."""

Span = tuple[int, int]


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations for one tokenizer."""

    template: str
    is_plain: bool
    """Whether the tokenizer has no template of its own."""
    special_tokens: dict[str, str] = field(default_factory=dict)

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> ChatRenderer:
        special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        if tokenizer.chat_template:
            return cls(tokenizer.get_chat_template(), is_plain=False, special_tokens=special_tokens)
        return cls(PLAIN_TEMPLATE, is_plain=True, special_tokens=special_tokens)

    def render(self, messages: Conversation) -> str:
        """The conversation as text.

        Raises:
            RowError: the template refuses the messages.
        """
        return self._render(messages)[0]

    def render_prompt(self, messages: Conversation) -> str:
        """The conversation up to where the assistant's answer begins.

        Raises:
            RowError: the template refuses the messages.
        """
        return self._render(messages, add_generation_prompt=True)[0]

    def render_with_spans(self, messages: Conversation) -> tuple[str, list[Span]]:
        """The text, and the [begin, end) characters of each assistant turn, its closing marker included.

        Where the template marks them by `{% generation %}`, its marks count; otherwise the turns are found by
        rendering the conversation up to each of them.

        Raises:
            RowError: the template refuses the messages, or a turn cannot be found in what it writes.
        """
        if _MARKS_ASSISTANT.search(self.template):
            return self._render(messages, with_spans=True)
        text = self.render(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._find_turn(messages, turn, text) for turn in turns]
        for (_, end), (begin, _), turn in zip(spans, spans[1:], turns, strict=False):
            if end > begin:
                raise _lost(turn)
        return text, spans

    def _find_turn(self, messages: Conversation, turn: int, text: str) -> Span:
        """Characters of message `turn` in `text`, the rendering of all messages."""
        opening = self._render(messages[:turn], add_generation_prompt=True)[0] if turn else ""
        begin = _common_prefix_length(opening, text)
        closed = self.render(messages[: turn + 1])
        if text.startswith(closed):
            return begin, len(closed)
        # Some templates write the last turn unlike earlier ones (Qwen3 adds an empty thinking block), so no rendering
        # of a part is a prefix of the whole. The turn then ends with its content and what closes it when it is last.
        content = messages[turn]["content"].strip()
        ending = closed[closed.rfind(content) :]
        found = text.find(ending, begin)
        if content not in closed or found < 0:
            raise _lost(turn)
        return begin, found + len(ending)

    def _render(
        self, messages: Conversation, *, add_generation_prompt: bool = False, with_spans: bool = False
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        # declared as returning str; what it returns is a text and the marked spans for each conversation
        render = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
        try:
            texts, spans = render(
                conversations=[messages],
                chat_template=self.template,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=add_generation_prompt,
                date_string=_TEMPLATE_DATE,
                **self.special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return texts[0], spans[0] if with_spans else []


def _lost(turn: int) -> RowError:
    return RowError(
        f"the chat template does not reproduce assistant message {turn}, so its tokens cannot be told from the others; "
        "a template with {% generation %} marks, or data.train_on: all, would do"
    )


def _common_prefix_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
