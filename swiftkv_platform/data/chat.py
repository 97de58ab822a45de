"""Render conversations with chat templates, and find the character spans of assistant messages. Training, evaluation
and serving share this module, so that a student is served the layout it was trained on.

The tokenizer's chat template writes every special token. Without one, `PLAIN_TEMPLATE` writes each message under a
heading, and the caller adds BOS and EOS as for plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, cast

from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.messages import Message, RowError, normalize_messages, normalize_tools
from swiftkv_platform.errors import ModelError

PLAIN_TEMPLATE = (
    "{% if tools %}### Tools:\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}### {{ message.role | capitalize }}:\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}{% if message.tool_calls %}"
    "{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTENT_NONE_TEST = re.compile(r"""\bcontent['"\])]*\s+is\s+(not\s+)?none\b""", re.IGNORECASE)
_STRFTIME_NOW_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_TEMPLATE_DATE = datetime(2024, 7, 26)  # without a time zone
"""Fixed date that templates print instead of today's, so that data is the same every day; Llama 3's default."""
_CONTENT_PLACEHOLDER = "\u241e\u2063\u241f"
"""Replaces a message's content to find its offset in a rendered text; no real text contains it."""

_MOVE_REASONING = "move it into `content` in the model's format, e.g. <think>...</think>, or remove it"
_RENDERED_KEYS = {
    "tool_calls": "use a tokenizer whose template renders them",
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _MOVE_REASONING),
}
"""Keys of messages that a template has to render, with what to do otherwise."""

_TEMPLATE_ERRORS = (TypeError, ValueError, KeyError, RecursionError)
"""Errors, besides jinja2's own, that a template raises for an unsupported conversation."""

Span = tuple[int, int]


@dataclass(frozen=True)
class RenderedText:
    """A rendered text to train on."""

    text: str
    loss_spans: list[Span] | None
    """[begin, end) characters whose tokens are loss targets; None: all of the text."""


def find_chat_template(tokenizer: Any, tools: object = None) -> str | None:
    """Return the tokenizer's chat template (some have a separate one for `tools`); None if it has none. Raises
    `ModelError` if it has several templates and no default one."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template: str = tokenizer.get_chat_template(tools=tools or None)
    except ValueError as error:
        raise ModelError(
            "the tokenizer has several chat templates, but none is named 'default', which conversations require; "
            f"name one of them 'default' ({error})",
            field="model.name_or_path",
        ) from error
    return template


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations for one tokenizer."""

    tokenizer: Any
    use_current_date: bool = False
    """Whether templates print today's date, as in serving; training data has a fixed date."""

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def render_prompt(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation for generation.

        Args:
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: leave the last message open, so that generation continues it.
            variables: further variables of the template.

        Raises `RowError` if the template refuses the messages, and `ModelError` if the tokenizer has no default
        template."""
        template = replace(self._bind_template(conversation), request_variables=variables)
        return template.render(
            template.adapt_messages(template.select_messages(conversation.messages)),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def render_for_training(
        self, conversation: Conversation, train_on: Literal["assistant", "all"]
    ) -> list[RenderedText]:
        """Return texts to train on. Each target, an assistant message, follows exactly the prompt that `render_prompt`
        writes for it.

        Usually that is one text, the whole conversation. If the template renders a message differently once others
        follow (some write the tools before the last question only), that message gets a separate text that ends with
        it. Messages of `weight` 0 are no targets. If the template marks the assistant's text by `{% generation %}`, the
        target is the marked text; otherwise the whole message, including its closing marker. Raises as `render_prompt`,
        and `RowError` for tool calls and reasoning that the template leaves out.
        """
        # 1. bind the template, and adapt the messages to it
        template = self._bind_template(conversation)
        selected = template.select_messages(conversation.messages)
        messages = template.adapt_messages(selected)
        template.check_left_out_keys(messages)
        # 2. select the assistant messages whose weight is not 0
        targets = [
            turn
            for turn, (message, given) in enumerate(zip(messages, selected, strict=True))
            if message["role"] == "assistant" and given.get("weight") != 0
        ]
        # 3. render texts in which each target follows its prompt
        turns = _AssistantTurns(template, messages)
        return turns.render_all_targets(targets) if train_on == "all" else turns.render_assistant_targets(targets)

    def find_excluded_end_marker(self) -> str | None:
        """Return the end of an answer that the template's `{% generation %}` leaves out, such as `<|im_end|>`; None if
        it leaves out nothing, or the template has no such block."""
        template = self._bind_template(Conversation([]))
        if not template.has_generation_tags:
            return None
        talk = [{"role": role, "content": _CONTENT_PLACEHOLDER} for role in ("user", "assistant")]
        try:
            text, spans = template.render_with_spans(talk)
        except RowError:  # an unusual template, whose conversations are refused or accepted one by one
            return None
        return text[spans[-1][1] :].strip() or None if spans else None

    def _bind_template(self, conversation: Conversation) -> _BoundTemplate:
        template = find_chat_template(self.tokenizer, conversation.tools) or PLAIN_TEMPLATE
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        date = {} if self.use_current_date else {"date_string": f"{_TEMPLATE_DATE:%d %b %Y}"}
        template = template if self.use_current_date else _replace_current_date(template)
        tools = None if conversation.tools is None else normalize_tools(conversation.tools)
        return _BoundTemplate(template, tools, special_tokens | date)


@dataclass(frozen=True)
class _BoundTemplate:
    """A template with all of its variables except the messages."""

    template: str
    tools: list[dict[str, Any]] | None
    variables: dict[str, str]
    request_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables set by a request; they do not override `variables`."""

    @property
    def has_generation_tags(self) -> bool:
        return _GENERATION_TAG.search(self.template) is not None

    def select_messages(self, messages: list[Message]) -> list[Message]:
        """Return the messages without empty system messages, if the template refuses any system message."""
        empty = [m for m in messages if m["role"] in ("system", "developer") and not (m.get("content") or "").strip()]
        if empty and _refuses_system_messages(self.template, tuple(self.variables.items())):
            return [message for message in messages if message not in empty]
        return messages

    def adapt_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Adapt messages to the template: most know no `developer` role, concatenate `content` without a check for
        None, and convert call arguments to JSON themselves."""
        adapted = normalize_messages(messages)
        as_text = any("tool_calls" in message for message in adapted) and _requires_text_arguments(
            self.template, tuple(self.variables.items())
        )
        for message in adapted:
            message.pop("weight", None)
            if message["role"] == "developer" and "developer" not in self.template:
                message["role"] = "system"
            if message["content"] is None and not _CONTENT_NONE_TEST.search(self.template):
                message["content"] = ""
            for call in message.get("tool_calls", ()) if as_text else ():
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return adapted

    def check_left_out_keys(self, messages: list[Message]) -> None:
        """Raise `RowError` if there are tool calls or reasoning and the template leaves them out."""
        for key, cure in _RENDERED_KEYS.items():
            if re.search(rf"\b{key}\b", self.template) or not any(message.get(key) for message in messages):
                continue
            silent = [{name: value for name, value in m.items() if name != key} for m in messages]
            if self.render(messages) == self.render(silent):
                raise RowError(f"the tokenizer's chat template leaves out {key}; {cure}")

    def render(self, messages: Sequence[Message], **options: bool) -> str:
        """Render adapted messages with the options of `render_prompt`. Raises `RowError`."""
        return self._render(messages, **options)[0]

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render adapted messages. Returns (text, spans marked as the assistant's). Raises `RowError`."""
        return self._render(messages, with_spans=self.has_generation_tags)

    def _render(
        self, messages: Sequence[Message], *, with_spans: bool = False, **options: bool
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        # declared as returning str, but returns a text and the marked spans for each conversation
        render = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
        try:
            texts, spans = render(
                conversations=[list(messages)],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=with_spans,
                **options,
                **self.variables,
                **{name: value for name, value in self.request_variables.items() if name not in self.variables},
            )
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise RowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return texts[0], spans[0] if with_spans else []


@lru_cache(maxsize=64)
def _refuses_system_messages(template: str, variables: tuple[tuple[str, str], ...]) -> bool:
    bound = _BoundTemplate(template, None, dict(variables))
    talk: list[Message] = [{"role": role, "content": "a"} for role in ("system", "user")]
    try:
        bound.render(talk)
    except RowError:
        return True
    return False


@lru_cache(maxsize=64)
def _requires_text_arguments(template: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes call arguments unchanged, as DeepSeek's does, so that they must be JSON text; others
    convert objects to JSON."""
    function = {"name": "look", "arguments": {"at": "it"}}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": "look"},
    ]
    if not _CONTENT_NONE_TEST.search(template):
        messages[1]["content"] = ""
    try:
        return str(function["arguments"]) in _BoundTemplate(template, None, dict(variables)).render(messages)
    except RowError as error:
        return isinstance(error.__cause__, TypeError)


def _replace_current_date(template: str) -> str:
    """Return the template with calls for today's date replaced by `_TEMPLATE_DATE`."""
    return _STRFTIME_NOW_CALL.sub(lambda call: json.dumps(_TEMPLATE_DATE.strftime(call[2])), template)


class _AssistantTurns:
    """Finds the assistant's turns of one conversation in renderings of it and of its first messages."""

    def __init__(self, template: _BoundTemplate, messages: list[Message]) -> None:
        self._template = template
        self._messages = messages
        self._turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._prompts: dict[int, str] = {}

    def render_assistant_targets(self, turns: Sequence[int]) -> list[RenderedText]:
        """Return the whole conversation with the targets of those `turns` whose prompt it begins with, and separate
        texts for the other turns."""
        text, marked_spans = self._template.render_with_spans(self._messages)
        found = self._find_turns(turns, text, marked_spans, len(self._messages))
        spans = _flatten_spans(found)
        return [RenderedText(text, spans)] * bool(spans) + self.render_separately(
            [turn for turn in turns if turn not in found]
        )

    def render_all_targets(self, turns: Sequence[int]) -> list[RenderedText]:
        """Return the whole conversation with everything as target except assistant turns not in `turns`, and separate
        texts for those `turns` whose prompt it does not begin with."""
        text = self._template.render(self._messages)
        left_out = [self._find_turn_span(turn, text) for turn in self._turns if turn not in turns]
        try:
            others = [turn for turn in turns if self._find_begin(turn, text) is None]
        except RowError:  # the template refuses a beginning of the conversation, not the whole
            others = []
        return [
            RenderedText(text, _invert_spans(left_out, len(text)) if left_out else None),
            *self.render_separately(others),
        ]

    def render_separately(self, turns: Sequence[int]) -> list[RenderedText]:
        """Return texts that each end with an assistant turn; together they have each of `turns` as a target once."""
        left, rendered = list(turns), list[RenderedText]()
        while left:
            text, found = self._render_up_to_last(left)
            rendered.append(RenderedText(text, _flatten_spans(found)))
            left = [turn for turn in left if turn not in found]
        return rendered

    def _render_up_to_last(self, turns: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """Return (text that ends with the last of `turns`, target spans by turn in this text)."""
        last = turns[-1]
        text, marked_spans = self._template.render_with_spans(self._messages[: last + 1])
        found = self._find_turns(turns, text, marked_spans, last + 1)
        if last in found:
            return text, found
        # The generation prompt has text that the rendered answer lacks, such as the beginning of a thought.
        begin, prompt = self._find_content_begin(last, text, last + 1), self._render_prompt(last)
        text, moved = prompt + text[begin:], len(prompt) - begin
        shown = (
            [(first + moved, end + moved) for first, end in marked_spans]
            if self._template.has_generation_tags
            else [(0, len(text))]
        )
        return text, {last: _clip_spans(shown, len(prompt), len(text))}

    def _find_turns(self, turns: Sequence[int], text: str, marked_spans: list[Span], end: int) -> dict[int, list[Span]]:
        """Return the target spans by turn, for those `turns` whose prompt begins `text`, the rendered messages up to
        `end`."""
        begins = {
            turn: begin for turn in self._turns if turn < end and (begin := self._find_begin(turn, text)) is not None
        }
        found = dict[int, list[Span]]()
        for turn in (turn for turn in turns if turn in begins):
            begin = begins[turn]
            following = min((other for other in begins.values() if other > begin), default=len(text))
            closed = self._find_end(turn, text, begin, end)
            if self._template.has_generation_tags:
                found[turn] = _clip_spans(marked_spans, begin, following if closed is None else closed)
            elif closed is not None and closed <= following:
                found[turn] = [(begin, closed)]
        return found

    def _render_prompt(self, turn: int) -> str:
        if turn not in self._prompts:
            self._prompts[turn] = self._template.render(self._messages[:turn], add_generation_prompt=True)
        return self._prompts[turn]

    def _find_begin(self, turn: int, text: str) -> int | None:
        """Return the index in `text` at which message `turn` begins; None if `text` does not begin with its prompt."""
        if not turn:  # it has no prompt
            return self._find_content_begin(turn, self._template.render(self._messages[:1]), 1)
        prompt = self._render_prompt(turn)
        return len(prompt) if text.startswith(prompt) else None

    def _find_end(self, turn: int, text: str, begin: int, end: int) -> int | None:
        """Return the index in `text` after message `turn` and its closing marker; None if it is not found."""
        closed = self._template.render(self._messages[: turn + 1])
        if text.startswith(closed):
            return len(closed)
        # Some templates write the last turn unlike earlier ones (Qwen3 adds an empty thinking block, and removes the
        # thoughts of earlier turns), so that no rendering of a part is a prefix of the whole. The closing marker and
        # the text after the turn are then found by renderings with a placeholder as the turn's content.
        closing = self._template.render(self._replace_content(turn, turn + 1)).rpartition(_CONTENT_PLACEHOLDER)[2]
        content_end = len(text) - self._count_following_characters(turn, text, end)
        ends = self._template.variables.get("eos_token", "")  # some templates (Phi's) write it after the last turn only
        for each in (closing, closing.removesuffix(ends)):
            if content_end > begin and text.startswith(each, content_end):
                return content_end + len(each)
        return None

    def _find_turn_span(self, turn: int, text: str) -> Span:
        """Return the span of message `turn` in the whole conversation, with its closing marker if that is found."""
        whole, begin = len(self._messages), self._find_begin(turn, text)
        end = None if begin is None else self._find_end(turn, text, begin, whole)
        if begin is not None and end is not None:
            return begin, end
        begin = self._find_content_begin(turn, text, whole)
        return begin, max(len(text) - self._count_following_characters(turn, text, whole), begin)

    def _find_content_begin(self, turn: int, text: str, end: int) -> int:
        """Return the index in `text`, the rendered messages up to `end`, where the content of message `turn` begins."""
        return _count_common_prefix(text, self._template.render(self._replace_content(turn, end)))

    def _count_following_characters(self, turn: int, text: str, end: int) -> int:
        return _count_common_prefix(text[::-1], self._template.render(self._replace_content(turn, end))[::-1])

    def _replace_content(self, turn: int, end: int) -> list[Message]:
        """Return the messages up to `end` with message `turn` reduced to its role and the placeholder as content."""
        other = {"role": self._messages[turn]["role"], "content": _CONTENT_PLACEHOLDER}
        return [*self._messages[:turn], other, *self._messages[turn + 1 : end]]


def _flatten_spans(found: Mapping[int, list[Span]]) -> list[Span]:
    return [span for turn in sorted(found) for span in found[turn]]


def _clip_spans(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Return the parts of `spans` within [begin, end)."""
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]


def _invert_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """Return the parts of [0, length) outside `spans`, which are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _count_common_prefix(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
