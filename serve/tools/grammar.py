"""Grammars of answers that call tools, in llguidance's dialect of Lark, which both engines compile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.serve.tools.families import ARGUMENTS, NAME, Layout
from swiftkv_platform.specs.json_schema import settled
from swiftkv_platform.specs.structured_outputs import WHITESPACE

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class CallGrammar:
    """Grammar of calls by a family's layout."""

    layout: Layout
    schemas: Mapping[str, Schema]
    """Schemas of arguments, by the names of the tools that may be called."""
    special: Mapping[str, int]
    """Ids of the layout's texts that are special tokens."""
    parallel: bool = True
    """Several calls may be made."""

    def required(self) -> str:
        """Calls, and nothing else."""
        return self._with_calls("start: calls")

    def or_answer(self, schema: Schema) -> str:
        """Calls, or JSON that follows a schema."""
        # Without a marker, what begins both is one brace, and a lexer does not go back.
        tag = self._literal(self.layout.tag) if self.layout.marker is None else ""
        return self._with_calls(f"start: {tag} calls | answer\nanswer: %json {_json(schema)}")

    def or_text(self) -> str:
        """Calls among text, in which nothing else begins as they do; or a single one behind text."""
        marker = self.layout.marker
        if marker is None:
            return self._with_calls("start: calls | TEXT\n" + r"TEXT: /\s*([^\s{](.|\n)*)?/")
        text = r"TEXT: /(.|\n)*/"
        if marker in self.special:
            start = "(TEXT calls)* TEXT" if self.parallel else "TEXT calls?"
            return self._with_calls(f"start: {start}\n{text}")
        start = "(lead calls)* rest" if self.parallel else "lead calls | rest"
        lead = f"lead[lazy]: TEXT {json.dumps(marker)}\nrest: TEXT"
        return self._with_calls(f"start: {start}\n{lead}\n{text}", without=marker)

    def _with_calls(self, start: str, without: str = "") -> str:
        """The grammar below a rule `start`. `without`: the marker, where that is read before the rule `calls`."""
        begin, call = self.layout.begin, self.layout.call
        several = self.parallel and not (without and not begin)  # each call behind a marker of its own
        begin = begin.removeprefix(without) if begin else begin
        call = call if begin or not without else call.removeprefix(without)
        more = f" ({self._literal(self.layout.between)} call)*" if several else ""
        rules = [start, f"calls: {self._literal(begin)} call{more} {self._literal(self.layout.end)}"]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(self.schemas))))
        for number, (name, schema) in enumerate(self.schemas.items()):
            before, after = call.replace(NAME, name).split(ARGUMENTS)
            rules.append(f"call_{number}: {self._literal(before)} arguments_{number} {self._literal(after)}")
            rules.append(f"arguments_{number}: %json {_json(schema)}")
        return "%llguidance {}\n" + "\n".join(rules) + "\n"

    def lines(self, grammar: str) -> dict[int, str]:
        """Tools by the lines, counted from 1, of a grammar of these calls in which their arguments stand."""
        numbers = {line.partition(":")[0]: number for number, line in enumerate(grammar.splitlines(), start=1)}
        return {numbers[f"arguments_{number}"]: name for number, name in enumerate(self.schemas)}

    def _literal(self, text: str) -> str:
        """A text as the tokens and strings of a rule."""
        tokens = "|".join(map(re.escape, self.special))
        parts = re.split(f"({tokens})", text) if tokens else [text]
        return " ".join(f"<[{self.special[one]}]>" if one in self.special else json.dumps(one) for one in parts if one)


def _json(schema: Schema) -> str:
    options = {"whitespace_pattern": WHITESPACE, **schema.get("x-guidance", {})}
    return json.dumps({**settled(schema), "x-guidance": options}, allow_nan=False)
