"""Model families by the way they write calls: which one a template is of, its parser, and its layout of a call."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swiftkv_platform.serve.tools.formats import HermesParser, Llama3Parser, MistralParser
from swiftkv_platform.serve.tools.parser import ToolCallParser

NAME, ARGUMENTS = "\x00name\x00", "\x00arguments\x00"
"""Stand for both in a layout."""
_LETTERS = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Mistral's templates refuse ids of any other length."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class Layout:
    """Calls as a constrained answer writes them."""

    call: str
    """One call, with `NAME` and `ARGUMENTS`."""
    begin: str = ""
    """Text before the first of them."""
    between: str = "\n"
    end: str = ""
    marker: str | None = None
    """Text by which they begin, and other text does not; None: a brace, at the beginning of the answer alone."""
    tag: str = ""
    """Without a marker: text that may stand before them, where they are to be told from other JSON."""


@dataclass(frozen=True)
class Family:
    """Models that write calls alike."""

    parser: type[ToolCallParser]
    layout: Layout
    tokens: tuple[str, ...]
    """Texts that may be special tokens of a family's tokenizer."""
    new_id: Callable[[], str] = _call_id


_OBJECT = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
_TAGS = ("<tool_call>", "</tool_call>")
_MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

FAMILIES: Mapping[str, Family] = {
    "hermes": Family(HermesParser, Layout(f"<tool_call>\n{_OBJECT}\n</tool_call>", marker="<tool_call>"), tokens=_TAGS),
    "smollm2": Family(
        HermesParser,
        Layout(_OBJECT, begin="<tool_call>[", between=", ", end="]</tool_call>", marker="<tool_call>"),
        tokens=_TAGS,
    ),
    "llama3": Family(
        Llama3Parser,
        Layout(_OBJECT.replace('"arguments"', '"parameters"'), between="; ", tag="<|python_tag|>"),
        tokens=("<|python_tag|>",),
    ),
    "mistral": Family(
        MistralParser,
        Layout(_OBJECT, begin="[TOOL_CALLS] [", between=", ", end="]", marker="[TOOL_CALLS]"),
        tokens=_MISTRAL_TOKENS,
        new_id=_mistral_id,
    ),
    "mistral_v11": Family(
        MistralParser,
        Layout(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}", between="", marker="[TOOL_CALLS]"),
        tokens=_MISTRAL_TOKENS,
        new_id=_mistral_id,
    ),
}
"""By the names that a deployment's `tool_call_parser` takes."""


def family_of(template: str) -> str | None:
    """Return the family that a chat template tells to write calls, or shows those of earlier turns; None: unknown."""
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder writes XML between the tags
        return "smollm2" if "<tool_call>[" in template else "hermes"
    is_llama = "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    return "llama3" if is_llama else None
