"""Conversations as text, with the character spans that the assistant wrote. Training, evaluation and serving all render
conversations here, so that a student is served the layout it was trained on. Knows chat templates, no tensor.

If the tokenizer has a chat template, it is used and writes every special token. Otherwise `PLAIN_TEMPLATE` writes each
message under a heading, and the caller adds BOS and EOS as for any text.
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
"""Date given to templates that print today's, since data must not change overnight; the default of Llama 3's."""
_PLACEHOLDER = "\u241e\u2063\u241f"
"""Replaces the content of a message in order to find its place in a rendered text; no real text contains it."""

_REFUSALS = (TypeError, ValueError, KeyError, RecursionError)
"""Errors, apart from jinja2's own, that a template raises for a conversation that it does not accept."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Passage:
    """A rendered text to train on."""

    text: str
    spans: list[Span] | None
    """[begin, end) characters that the loss counts; None: all."""


def chat_template(tokenizer: Any, tools: object = None) -> str | None:
    """Return the tokenizer's chat template, which may be another one if there are `tools`; None if it has none. Raises
    `ModelError` if it has several templates and no default one."""
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
    """Whether templates print today's date, as in serving. Data always has the same date."""

    @property
    def is_plain(self) -> bool:
        """Whether the tokenizer has no template of its own."""
        return not getattr(self.tokenizer, "chat_template", None)

    def render_prompt(
        self,
        conversation: Conversation,
        *,
        asks: bool = True,
        goes_on: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the conversation up to where the assistant's answer begins; without `asks` only the conversation, with
        `goes_on` with its last message left open. `variables`: further variables of the template. Raises `RowError` if
        the template refuses the messages, and `ModelError` if the tokenizer has no default template."""
        layout = replace(self._layout(conversation), requested=variables)
        return layout.write(layout.fitted(conversation.messages), asks=asks, goes_on=goes_on)

    def passages(self, conversation: Conversation, train_on: Literal["assistant", "all"]) -> list[Passage]:
        """Return texts to train on, in which each counted answer follows exactly the text that `render_prompt` writes
        before it.

        Usually that is one text, the whole conversation. If the template renders earlier turns differently once others
        follow (some write the tools before the last question only), an answer gets a text of its own, which ends with
        it. Turns of `weight` 0 are not counted. If the template marks the assistant's text by `{% generation %}`, that
        is counted of a turn; otherwise the whole turn, including its closing marker. Raises as `render_prompt`, and
        `RowError` for calls that the template leaves out.
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
    """A template with all of its variables except the messages."""

    template: str
    tools: list[dict[str, Any]] | None
    variables: dict[str, str]
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Variables set by a request; they do not override `variables`."""

    @property
    def marks(self) -> bool:
        """Whether the template marks the assistant's text by `{% generation %}`."""
        return _MARKS_ASSISTANT.search(self.template) is not None

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Adapt messages to the template: most know no `developer` role, concatenate `content` without a check for
        None, and convert call arguments to JSON themselves."""
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
        """Raise `RowError` if there are tool calls and the template leaves them out."""
        calling = [message for message in messages if message.get("tool_calls")]
        if calling and "tool_calls" not in self.template:
            silent = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
            if self.write(messages) == self.write(silent):
                raise RowError(
                    "the tokenizer's chat template has no place for tool_calls; use a tokenizer whose template has one"
                )

    def write(self, messages: Sequence[Message], *, asks: bool = False, goes_on: bool = False) -> str:
        """Render fitted messages. Raises `RowError`."""
        return self._write(messages, asks=asks, goes_on=goes_on)[0]

    def write_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Render fitted messages. Returns the text and the spans marked as the assistant's. Raises `RowError`."""
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

        # declared as returning str, but returns a text and the marked spans for each conversation
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
    """Whether a template writes call arguments unchanged, as DeepSeek's does, so that they must be JSON text; others
    convert objects to JSON."""
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
    """Return the template with calls for today's date replaced by `_TEMPLATE_DATE`."""
    return _TODAY.sub(lambda call: json.dumps(_TEMPLATE_DATE.strftime(call[2])), template)


class _Turns:
    """Finds the assistant's turns of one conversation in renderings of it and of its first messages."""

    def __init__(self, layout: _Layout, messages: list[Message]) -> None:
        self._layout = layout
        self._messages = messages
        self._turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self._prompts: dict[int, str] = {}

    def answers(self, turns: Sequence[int]) -> list[Passage]:
        """Return the whole conversation, with those of `turns` counted whose `_prompt` it begins with, and passages
        from `apart` for the others."""
        text, marks = self._layout.write_marked(self._messages)
        found = self._found(turns, text, marks, len(self._messages))
        spans = _in_order(found)
        return [Passage(text, spans)] * bool(spans) + self.apart([turn for turn in turns if turn not in found])

    def everything(self, turns: Sequence[int]) -> list[Passage]:
        """Return the whole conversation, with everything counted except assistant turns not in `turns`, and passages
        from `apart` for those of `turns` whose `_prompt` it does not begin with."""
        text = self._layout.write(self._messages)
        left_out = [self._hole(turn, text) for turn in self._turns if turn not in turns]
        try:
            others = [turn for turn in turns if self._begin(turn, text) is None]
        except RowError:  # the template refuses a beginning of the conversation, not the whole
            others = []
        return [Passage(text, _outside(left_out, len(text)) if left_out else None), *self.apart(others)]

    def apart(self, turns: Sequence[int]) -> list[Passage]:
        """Return texts that each end with an answer, in which each of `turns` is counted once."""
        left, passages = list(turns), list[Passage]()
        while left:
            text, found = self._ending_with(left)
            passages.append(Passage(text, _in_order(found)))
            left = [turn for turn in left if turn not in found]
        return passages

    def _ending_with(self, turns: Sequence[int]) -> tuple[str, dict[int, list[Span]]]:
        """Return a text that ends with the last of `turns`, and the counted spans of those of `turns` found in it."""
        last = turns[-1]
        text, marks = self._layout.write_marked(self._messages[: last + 1])
        found = self._found(turns, text, marks, last + 1)
        if last in found:
            return text, found
        # The generation prompt has text that the rendered answer lacks, such as the beginning of a thought.
        begin, prompt = self._first_word(last, text, last + 1), self._prompt(last)
        text, moved = prompt + text[begin:], len(prompt) - begin
        shown = [(first + moved, end + moved) for first, end in marks] if self._layout.marks else [(0, len(text))]
        return text, {last: _within(shown, len(prompt), len(text))}

    def _found(self, turns: Sequence[int], text: str, marks: list[Span], end: int) -> dict[int, list[Span]]:
        """Return the counted spans, by turn, of those of `turns` whose `_prompt` begins `text`, the rendered messages
        up to `end`."""
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
        """Return the rendered messages before `turn`, with the generation prompt."""
        if turn not in self._prompts:
            self._prompts[turn] = self._layout.write(self._messages[:turn], asks=True)
        return self._prompts[turn]

    def _begin(self, turn: int, text: str) -> int | None:
        """Return the index in `text` at which message `turn` begins; None if `text` does not begin with its prompt."""
        if not turn:  # it has no prompt
            return self._first_word(turn, self._layout.write(self._messages[:1]), 1)
        prompt = self._prompt(turn)
        return len(prompt) if text.startswith(prompt) else None

    def _end(self, turn: int, text: str, begin: int, end: int) -> int | None:
        """Return the index in `text` after message `turn` and its closing marker; None if it is not found."""
        closed = self._layout.write(self._messages[: turn + 1])
        if text.startswith(closed):
            return len(closed)
        # Some templates write the last turn unlike earlier ones (Qwen3 adds an empty thinking block, and removes the
        # thoughts of earlier turns), so that no rendering of a part is a prefix of the whole. The closing marker and
        # the text after the turn are then found by renderings with a placeholder as the turn's content.
        closing = self._layout.write(self._otherwise(turn, turn + 1)).rpartition(_PLACEHOLDER)[2]
        content_end = len(text) - self._follows(turn, text, end)
        ends = self._layout.variables.get("eos_token", "")  # some templates (Phi's) write it after the last turn only
        for each in (closing, closing.removesuffix(ends)):
            if content_end > begin and text.startswith(each, content_end):
                return content_end + len(each)
        return None

    def _hole(self, turn: int, text: str) -> Span:
        """Return the span of message `turn` in the whole conversation, with its closing marker if that is found."""
        whole, begin = len(self._messages), self._begin(turn, text)
        end = None if begin is None else self._end(turn, text, begin, whole)
        if begin is not None and end is not None:
            return begin, end
        begin = self._first_word(turn, text, whole)
        return begin, max(len(text) - self._follows(turn, text, whole), begin)

    def _first_word(self, turn: int, text: str, end: int) -> int:
        """Return the index in `text`, the rendered messages up to `end`, where the content of message `turn` begins."""
        return _common_prefix_length(text, self._layout.write(self._otherwise(turn, end)))

    def _follows(self, turn: int, text: str, end: int) -> int:
        """Return the number of characters of `text` after the content of message `turn`."""
        return _common_prefix_length(text[::-1], self._layout.write(self._otherwise(turn, end))[::-1])

    def _otherwise(self, turn: int, end: int) -> list[Message]:
        """Return the messages up to `end` with message `turn` reduced to its role and the placeholder as content."""
        other = {"role": self._messages[turn]["role"], "content": _PLACEHOLDER}
        return [*self._messages[:turn], other, *self._messages[turn + 1 : end]]


def _in_order(found: Mapping[int, list[Span]]) -> list[Span]:
    return [span for turn in sorted(found) for span in found[turn]]


def _within(spans: Sequence[Span], begin: int, end: int) -> list[Span]:
    """Return the parts of `spans` within [begin, end)."""
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]


def _outside(spans: Sequence[Span], length: int) -> list[Span]:
    """Return the parts of [0, length) outside `spans`, which are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def _common_prefix_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
