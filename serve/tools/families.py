"""Model families by their format of tool calls: detection by chat template, parsers, layouts, and grammars of
completions with calls, in llguidance's dialect of Lark, which both engines compile."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.serve.tools.parser import Parsing, ToolCallParser, read_arguments, read_call, read_calls
from swiftkv_platform.specs.structured_outputs import WHITESPACE, normalize_schema

NAME, ARGUMENTS = "\x00name\x00", "\x00arguments\x00"
_ID_CHARACTERS = string.ascii_letters + string.digits
Schema = Mapping[str, Any]


class HermesParser(ToolCallParser):
    """Parser of Hermes 2 and 3, Qwen2.5 and Qwen3: an object, or a list of objects (SmolLM2), between tags."""

    marker = "<tool_call>"

    def _read_calls(self) -> Parsing[bool]:
        yield from self._text.skip_space()
        is_list = (yield from self._text.peek()) == "["
        found = yield from (read_calls if is_list else read_call)(self._text, self)
        if found:
            yield from self._skip_closing("</tool_call>")
        return found


class MistralParser(ToolCallParser):
    """Parser of Mistral: a list of objects after the marker, or since tokenizer v11 `name[ARGS]{...}` after each
    marker."""

    marker = "[TOOL_CALLS]"

    def _read_calls(self) -> Parsing[bool]:
        text = self._text
        yield from text.skip_space()
        first = yield from text.peek()
        if first in ("[", "{"):
            return (yield from (read_calls if first == "[" else read_call)(text, self))
        start = text.position
        while (character := (yield from text.peek())) and character not in "[{" and not character.isspace():
            text.position += 1
        name = text.read_since(start)
        if not self.is_tool(name):
            return False
        if (yield from text.skip("[CALL_ID]")):
            while (yield from text.peek()).isalnum():
                text.position += 1
        yield from text.skip("[ARGS]")
        yield from text.skip_space()
        return (yield from read_arguments(text, self, name))


class Llama3Parser(ToolCallParser):
    """Parser of Llama 3.1 and later: objects separated by `;`, at the beginning of the completion or after the tag."""

    marker = "<|python_tag|>"

    def _read_opening(self) -> Parsing[None]:
        yield from self._text.skip_space()
        if not (yield from self._read_calls()):
            self._text.position = 0

    def _read_calls(self) -> Parsing[bool]:
        text, found = self._text, False
        yield from text.skip_space()
        while True:
            start = text.position
            yield from text.skip_space()
            if found:
                yield from text.skip(";")
                yield from text.skip_space()
            if not (yield from read_call(text, self)):
                text.position = start
                return found
            found = True


def _make_mistral_id() -> str:
    """Return a random id of 9 characters, the only length in Mistral's templates."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


@dataclass(frozen=True)
class CallLayout:
    """Text around and between tool calls in constrained completions."""

    call: str
    """A call with the placeholders `NAME` and `ARGUMENTS`."""
    begin: str = ""
    """Text before the first call."""
    between: str = "\n"
    end: str = ""
    marker: str | None = None
    """Text that begins calls, and that other text must not contain; None: calls begin with a brace at the beginning of
    the completion."""
    tag: str = ""
    """Without a marker: text before calls that distinguishes calls from a JSON completion."""


@dataclass(frozen=True)
class CallFormat:
    """Format of calls of a family of models."""

    parser: type[ToolCallParser]
    layout: CallLayout
    tokens: tuple[str, ...]
    """Markers that may be special tokens in the family's tokenizers."""
    make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


_CALL_OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_TAGS = ("<tool_call>", "</tool_call>")
_MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

FAMILIES: Mapping[str, CallFormat] = {
    "hermes": CallFormat(
        HermesParser, CallLayout(f"<tool_call>\n{_CALL_OBJECT}\n</tool_call>", marker="<tool_call>"), tokens=_TAGS
    ),
    "smollm2": CallFormat(
        HermesParser,
        CallLayout(_CALL_OBJECT, begin="<tool_call>[", between=", ", end="]</tool_call>", marker="<tool_call>"),
        tokens=_TAGS,
    ),
    "llama3": CallFormat(
        Llama3Parser,
        CallLayout(_CALL_OBJECT.replace('"arguments"', '"parameters"'), between="; ", tag="<|python_tag|>"),
        tokens=("<|python_tag|>",),
    ),
    "mistral": CallFormat(
        MistralParser,
        CallLayout(_CALL_OBJECT, begin="[TOOL_CALLS] [", between=", ", end="]", marker="[TOOL_CALLS]"),
        tokens=_MISTRAL_TOKENS,
        make_id=_make_mistral_id,
    ),
    "mistral_v11": CallFormat(
        MistralParser,
        CallLayout(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", between="", marker="[TOOL_CALLS]"),
        tokens=_MISTRAL_TOKENS,
        make_id=_make_mistral_id,
    ),
}
"""Families by name, as in a deployment's `tool_call_parser`."""


def detect_family(template: str) -> str | None:
    """Return the family of a chat template's tool calls; None if unknown."""
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML between the tags
        return "smollm2" if "<tool_call>[" in template else "hermes"
    is_llama = "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    return "llama3" if is_llama else None


@dataclass(frozen=True)
class CallGrammar:
    """Makes grammars of completions with tool calls in a family's layout."""

    layout: CallLayout
    schemas: Mapping[str, Schema]
    """Schemas of arguments by name of the callable tools."""
    special: Mapping[str, int]
    """Ids of the layout's markers that are special tokens, by text."""
    parallel: bool = True
    """Whether a completion may have several calls."""

    def make_calls_only(self) -> str:
        return self._add_call_rules("start: calls")

    def make_calls_or_json(self, schema: Schema) -> str:
        """Return the grammar of either calls or JSON with a schema."""
        # Without a marker both begin with a brace, and the lexer cannot backtrack.
        tag = self._to_rule_text(self.layout.tag) if self.layout.marker is None else ""
        return self._add_call_rules(f"start: {tag} calls | answer\nanswer: %json {_dump_schema(schema)}")

    def make_text_with_calls(self) -> str:
        """Return the grammar of text with calls, in which text never contains the marker; without `parallel` at most
        one call, after the text."""
        marker = self.layout.marker
        if marker is None:
            return self._add_call_rules("start: calls | TEXT\n" + r"TEXT: /\s*([^\s{](.|\n)*)?/")
        text = r"TEXT: /(.|\n)*/"
        if marker in self.special:
            start = "(TEXT calls)* TEXT" if self.parallel else "TEXT calls?"
            return self._add_call_rules(f"start: {start}\n{text}")
        start = "(lead calls)* rest" if self.parallel else "lead calls | rest"
        lead = f"lead[lazy]: TEXT {json.dumps(marker)}\nrest: TEXT"
        return self._add_call_rules(f"start: {start}\n{lead}\n{text}", read_marker=marker)

    def _add_call_rules(self, start: str, read_marker: str = "") -> str:
        """Return the grammar with a rule `start`. `read_marker`: the marker, if `start` reads it before `calls`."""
        begin, call = self.layout.begin, self.layout.call
        can_repeat = self.parallel and not (read_marker and not begin)  # each call has its own marker
        begin = begin.removeprefix(read_marker) if begin else begin
        call = call if begin or not read_marker else call.removeprefix(read_marker)
        more = f" ({self._to_rule_text(self.layout.between)} call)*" if can_repeat else ""
        rules = [start, f"calls: {self._to_rule_text(begin)} call{more} {self._to_rule_text(self.layout.end)}"]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self.schemas))))
        for number, (name, schema) in enumerate(self.schemas.items()):
            before, after = call.replace(NAME, name).split(ARGUMENTS)
            rules.append(f"call_{number}: {self._to_rule_text(before)} arguments_{number} {self._to_rule_text(after)}")
            rules.append(f"arguments_{number}: %json {_dump_schema(schema)}")
        return "%llguidance {}\n" + "\n".join(rules) + "\n"

    def map_lines_to_tools(self, grammar: str) -> dict[int, str]:
        """Return the tool by line number, from 1, for the rules of arguments in a grammar of these calls."""
        numbers = {line.partition(":")[0]: number for number, line in enumerate(grammar.splitlines(), start=1)}
        return {numbers[f"arguments_{number}"]: name for number, name in enumerate(self.schemas)}

    def _to_rule_text(self, text: str) -> str:
        """Return a text as special tokens and strings of a grammar rule."""
        tokens = "|".join(map(re.escape, self.special))
        parts = re.split(f"({tokens})", text) if tokens else [text]
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part) for part in parts if part
        )


def _dump_schema(schema: Schema) -> str:
    options = {"whitespace_pattern": WHITESPACE, **schema.get("x-guidance", {})}
    return json.dumps({**normalize_schema(schema), "x-guidance": options}, allow_nan=False)
