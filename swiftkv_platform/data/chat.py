"""Conversations as text, with the character spans that the assistant wrote. Training, evaluation and served requests
lay out their conversations here, so that a student is served what it was trained on. Knows chat templates, no tensor.

A tokenizer's own chat template is used where it has one and then owns every special token. Otherwise `PLAIN_TEMPLATE`
writes each message under a heading, and the caller frames the document with BOS and EOS like any text.
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
from swiftkv_platform.data.messages import Message, RowError, template_messages, template_tools
from swiftkv_platform.errors import ModelError

PLAIN_TEMPLATE = (
    "{% if tools %}### Tools:\n{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}### {{ message.role | capitalize }}:\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}{% if message.tool_calls %}"
    "{{ message.tool_calls | map(attribute='function') | list | tojson }}{% endif %}{{ '\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
"""Template for tokenizers without a chat template."""

_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TELLS_NO_CONTENT = re.compile(r"""\bcontent['"\])]*\s+is\s+(not\s+)?none\b""", re.IGNORECASE)
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_TEMPLATE_DATE = datetime(2024, 7, 26)  # a day, nowhere
"""Templates print today's date, and data must not change overnight; this is the default of Llama 3's."""
_PLACEHOLDER = "\u241e\u2063\u241f"
"""Stands for what a message says; no text has it."""

_REFUSALS = (TypeError, ValueError, KeyError, RecursionError)
"""Errors of a template that a conversation does not fit, beside jinja2's own."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Passage:
    """A text to train on, which a template has written."""

    text: str
    spans: list[Span] | None
    """[begin, end) characters that the loss counts; None: all."""


def chat_template(tokenizer: Any, tools: object = None) -> str | None:
    """The template that lays out a conversation, which with tools may be another one; None where there is none. Raises
    `ModelError`: a tokenizer with several templates, none of which is the default."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        template: str = tokenizer.get_chat_template(tools=tools or None)
    except ValueError as error:
        raise ModelError(
            "the tokenizer has several chat templates, none of them named 'default', and there are conversations; "
            f"use a tokenizer with a default one ({error})",
            field="model.name_or_path",
        ) from error
    return template


@dataclass(frozen=True)
class ChatRenderer:
    """Renders conversations for one tokenizer."""

    tokenizer: Any
    tells_today: bool = False
    """Whether a template that prints the date is told today's: where a model is served. Data has one date for ever."""

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, *, tells_today: bool = False) -> ChatRenderer:
        return cls(tokenizer, tells_today)

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer has no template of its own."""
        return not getattr(self.tokenizer, "chat_template", None)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text. Raises `RowError`: the template refuses the messages; `ModelError`: the tokenizer
        has no default template."""
        layout = self._layout(conversation)
        return layout.write(layout.fitted(conversation.messages))

    def render_prompt(
        self,
        conversation: Conversation,
        *,
        asks: bool = True,
        goes_on: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The conversation up to where the assistant's answer begins, or where its last message goes on (`goes_on`, and
        not `asks`). `variables`: of the template, beside those that are always there. Raises as `render`."""
        layout = replace(self._layout(conversation), requested=variables)
        return layout.write(layout.fitted(conversation.messages), asks=asks, goes_on=goes_on)

    def passages(self, conversation: Conversation, train_on: Literal["assistant", "all"]) -> list[Passage]:
        """Texts to train on; what stands in them before each answer that counts is what `render_prompt` writes before
        it.

        That is one text, the whole conversation, unless the template writes earlier turns in another way once others
        follow (some give the tools before the last question alone): then an answer has a text of its own, which ends
        with it. Turns of `weight` 0 are not counted. Where the template marks what counts by `{% generation %}`, that
        is counted of a turn; otherwise the turn, its closing marker included. Raises as `render`; `RowError` also for
        calls that the template leaves out.
        """
        layout = self._layout(conversation)
        messages = layout.fitted(conversation.messages)
        layout.check_calls(messages)
        counted = [
            turn
            for turn, (message, given) in enumerate(zip(messages, conversation.messages, strict=True))
            if message["role"] == "assistant" and given.get("weight") != 0
        ]
        turns = _Turns(layout, messages)
        return turns.everything(counted) if train_on == "all" else turns.answers(counted)

    def _layout(self, conversation: Conversation) -> _Layout:
        template = chat_template(self.tokenizer, conversation.tools) or PLAIN_TEMPLATE
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        told = {} if self.tells_today else {"date_string": f"{_TEMPLATE_DATE:%d %b %Y}"}
        template = template if self.tells_today else _undated(template)
        tools = None if conversation.tools is None else template_tools(conversation.tools)
        return _Layout(template, tools, special_tokens | told)


@dataclass(frozen=True)
class _Layout:
    """A template with everything it reads but the messages."""

    template: str
    tools: list[dict[str, Any]] | None
    variables: dict[str, str]
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Variables that a request sets."""

    @property
    def marks(self) -> bool:
        """Whether it marks what the assistant writes."""
        return _MARKS_ASSISTANT.search(self.template) is not None

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages in words that the template knows: most have no developer, join content to other text unseen, and
        write arguments as JSON themselves."""
        fitted = template_messages(messages)
        as_text = any("tool_calls" in message for message in fitted) and _takes_text(
            self.template, tuple(self.variables.items())
        )
        for message in fitted:
            message.pop("weight", None)
            if message["role"] == "developer" and "developer" not in self.template:
                message["role"] = "system"
            if message["content"] is None and not _TELLS_NO_CONTENT.search(self.template):
                message["content"] = ""
            for call in message.get("tool_calls", ()) if as_text else ():
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return fitted

    def check_calls(self, messages: list[Message]) -> None:
        """Refuse to train on calls that the template leaves out. Raises `RowError`."""
        calling = [message for message in messages if message.get("tool_calls")]
        if calling and "tool_calls" not in self.template:
            silent = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
            if self.write(messages) == self.write(silent):
                raise RowError(
                    "the tokenizer's chat template has no place for tool_calls; use a tokenizer whose template has one"
                )

    def write(self, messages: Sequence[Message], *, asks: bool = False, goes_on: bool = False) -> str:
        """The text of fitted messages. Raises `RowError`."""
        return self._write(messages, asks=asks, goes_on=goes_on)[0]

    def write_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of fitted messages, and the spans that the template marks as the assistant's. Raises `RowError`."""
        return self._write(messages, with_spans=self.marks)

    def _write(
        self,
        messages: Sequence[Message],
        *,
        asks: bool = False,
        goes_on: bool = False,
        with_spans: bool = False,
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        # declared as returning str; what it returns is a text and the marked spans for each conversation
        render = cast("Callable[..., tuple[list[str], list[list[Span]]]]", render_jinja_template)
        try:
            texts, spans = render(
                conversations=[list(messages)],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=with_spans,
                add_generation_prompt=asks,
                continue_final_message=goes_on,
                **self.variables,
                **{name: value for name, value in self.requested.items() if name not in self.variables},
            )
        except (jinja2.TemplateError, *_REFUSALS) as error:
            raise RowError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return texts[0], spans[0] if with_spans else []


@lru_cache(maxsize=64)
def _takes_text(template: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes arguments of calls as they come, as DeepSeek's does, which then have to be JSON; others
    make JSON of objects."""
    function = {"name": "look", "arguments": {"at": "it"}}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": "look"},
    ]
    if not _TELLS_NO_CONTENT.search(template):
        messages[1]["content"] = ""
    try:
        return str(function["arguments"]) in _Layout(template, None, dict(variables)).write(messages)
    except RowError as error:
        return isinstance(error.__cause__, TypeError)


def _undated(template: str) -> str:
    """The template with our date in the place of today's."""
    return _TODAY.sub(lambda call: json.dumps(_TEMPLATE_DATE.strftime(call[2])), template)


class _Turns:
    """The assistant's turns of one conversation, in the texts that a template writes of it and of its beginnings."""

    def __init__(self, layout: _Layout, messages: list[Message]) -> None:
        self._layout = layout
        self._messages = messages
        self._turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._prompts: dict[int, str] = {}

    def answers(self, turns: Sequence[int]) -> list[Passage]:
        """The whole conversation with those of `turns` that it asks for as `_prompt` does, and `apart` for others."""
        text, marks = self._layout.write_marked(self._messages)
        found = self._found(turns, text, marks, len(self._messages))
        spans = _in_order(found)
        return [Passage(text, spans)] * bool(spans) + self.apart([turn for turn in turns if turn not in found])

    def everything(self, turns: Sequence[int]) -> list[Passage]:
        """The whole conversation, all of which counts but the assistant's turns that are not in `turns`, and `apart`
        for those of `turns` that it asks for in another way."""
        text = self._layout.write(self._messages)
        left_out = [self._hole(turn, text) for turn in self._turns if turn not in turns]
        try:
            others = [turn for turn in turns if self._begin(turn, text) is None]
        except RowError:  # no question for the template, which is one to train on
            others = []
        return [Passage(text, _outside(left_out, len(text)) if left_out else None), *self.apart(others)]

    def apart(self, turns: Sequence[int]) -> list[Passage]:
        """Texts that end with an answer and show each of `turns` once."""
        left, passages = list(turns), list[Passage]()
        while left:
            text, found = self._ending_with(left)
            passages.append(Passage(text, _in_order(found)))
            left = [turn for turn in left if turn not in found]
        return passages

    def _ending_with(self, turns: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """A text whose end is the last of `turns`, and those of them that it shows."""
        last = turns[-1]
        text, marks = self._layout.write_marked(self._messages[: last + 1])
        found = self._found(turns, text, marks, last + 1)
        if last in found:
            return text, found
        # The template asks by words that it leaves out of what was answered, such as the beginning of a thought.
        begin, prompt = self._first_word(last, text, last + 1), self._prompt(last)
        text, moved = prompt + text[begin:], len(prompt) - begin
        shown = [(first + moved, end + moved) for first, end in marks] if self._layout.marks else [(0, len(text))]
        return text, {last: _within(shown, len(prompt), len(text))}

    def _found(self, turns: Sequence[int], text: str, marks: list[Span], end: int) -> dict[int, list[Span]]:
        """Counted characters of those of `turns` that `text`, of the messages up to `end`, asks for by `_prompt`."""
        begins = {turn: begin for turn in self._turns if turn < end and (begin := self._begin(turn, text)) is not None}
        found = dict[int, list[Span]]()
        for turn in (turn for turn in turns if turn in begins):
            begin = begins[turn]
            following = min((other for other in begins.values() if other > begin), default=len(text))
            closed = self._end(turn, text, begin, end)
            if self._layout.marks:
                found[turn] = _within(marks, begin, following if closed is None else closed)
            elif closed is not None and closed <= following:
                found[turn] = [(begin, closed)]
        return found

    def _prompt(self, turn: int) -> str:
        """The text that asks for message `turn`."""
        if turn not in self._prompts:
            self._prompts[turn] = self._layout.write(self._messages[:turn], asks=True)
        return self._prompts[turn]

    def _begin(self, turn: int, text: str) -> int | None:
        """The place in `text` behind what asks for message `turn`; None where it asks in another way."""
        if not turn:  # no one asks
            return self._first_word(turn, self._layout.write(self._messages[:1]), 1)
        prompt = self._prompt(turn)
        return len(prompt) if text.startswith(prompt) else None

    def _end(self, turn: int, text: str, begin: int, end: int) -> int | None:
        """The place in `text` behind message `turn` and what closes it; None where it is not found."""
        closed = self._layout.write(self._messages[: turn + 1])
        if text.startswith(closed):
            return len(closed)
        # Some templates write the last turn unlike earlier ones (Qwen3 adds an empty thinking block, and takes the
        # thoughts out of earlier turns), so no rendering of a part is a prefix of the whole. What closes a turn is then
        # read off one that says something else, and what follows it off a whole that says something else there.
        closing = self._layout.write(self._otherwise(turn, turn + 1)).rpartition(_PLACEHOLDER)[2]
        content_end = len(text) - self._follows(turn, text, end)
        ends = self._layout.variables.get("eos_token", "")  # which some (Phi's) write behind the last turn alone
        for each in (closing, closing.removesuffix(ends)):
            if content_end > begin and text.startswith(each, content_end):
                return content_end + len(each)
        return None

    def _hole(self, turn: int, text: str) -> Span:
        """Characters of message `turn` in the whole conversation, its closing marker included where it is found."""
        whole, begin = len(self._messages), self._begin(turn, text)
        end = None if begin is None else self._end(turn, text, begin, whole)
        if begin is not None and end is not None:
            return begin, end
        begin = self._first_word(turn, text, whole)
        return begin, max(len(text) - self._follows(turn, text, whole), begin)

    def _first_word(self, turn: int, text: str, end: int) -> int:
        """The place at which `text`, of the messages up to `end`, says what message `turn` says."""
        return _common_prefix_length(text, self._layout.write(self._otherwise(turn, end)))

    def _follows(self, turn: int, text: str, end: int) -> int:
        """Characters of `text` behind what message `turn` says."""
        return _common_prefix_length(text[::-1], self._layout.write(self._otherwise(turn, end))[::-1])

    def _otherwise(self, turn: int, end: int) -> list[Message]:
        """The messages up to `end` with words in message `turn` that are in no other, and nothing beside words."""
        other = {"role": self._messages[turn]["role"], "content": _PLACEHOLDER}
        return [*self._messages[:turn], other, *self._messages[turn + 1 : end]]


def _in_order(found: Mapping[int, list[Span]]) -> list[Span]:
    return [span for turn in sorted(found) for span in found[turn]]


def _within(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """The parts of `spans` in [begin, end)."""
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]


def _outside(spans: Sequence[Span], length: int) -> list[Span]:
    """The parts of [0, length) outside `spans`, which are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _common_prefix_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
