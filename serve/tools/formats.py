"""Families' ways to write calls: a parser each."""

from __future__ import annotations

from swiftkv_platform.serve.tools.json_calls import Reading, read_arguments, read_call, read_calls
from swiftkv_platform.serve.tools.parser import ToolCallParser


class HermesParser(ToolCallParser):
    """Hermes 2 and 3, Qwen2.5 and Qwen3: an object, or a list of them (SmolLM2), between tags."""

    marker = "<tool_call>"

    def _read_calls(self) -> Reading[bool]:
        yield from self._text.skip_space()
        is_list = (yield from self._text.peek()) == "["
        found = yield from (read_calls if is_list else read_call)(self._text, self)
        if found:
            yield from self._skip_closing("</tool_call>")
        return found


class MistralParser(ToolCallParser):
    """Mistral: a list of objects behind the marker, or from its tokenizers v11 on `name[ARGS]{...}` behind each."""

    marker = "[TOOL_CALLS]"

    def _read_calls(self) -> Reading[bool]:
        text = self._text
        yield from text.skip_space()
        first = yield from text.peek()
        if first in ("[", "{"):
            return (yield from (read_calls if first == "[" else read_call)(text, self))
        start = text.at
        while (character := (yield from text.peek())) and character not in "[{" and not character.isspace():
            text.at += 1
        name = text.since(start)
        if not self.knows(name):
            return False
        if (yield from text.skip("[CALL_ID]")):
            while (yield from text.peek()).isalnum():
                text.at += 1
        yield from text.skip("[ARGS]")
        yield from text.skip_space()
        return (yield from read_arguments(text, self, name))


class Llama3Parser(ToolCallParser):
    """Llama 3.1 and later: objects at the beginning of the answer, or behind the tag, with `;` between them."""

    marker = "<|python_tag|>"

    def _read_opening(self) -> Reading[None]:
        yield from self._text.skip_space()
        if not (yield from self._read_calls()):
            self._text.at = 0

    def _read_calls(self) -> Reading[bool]:
        text, found = self._text, False
        yield from text.skip_space()
        while True:
            start = text.at
            yield from text.skip_space()
            if found:
                yield from text.skip(";")
                yield from text.skip_space()
            if not (yield from read_call(text, self)):
                text.at = start
                return found
            found = True
