"""The page of `serve.openai.fields`.

Write it with `python -m swiftkv_platform.serve.openai.compatibility > docs/compatibility.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from swiftkv_platform.serve.openai.fields import FIELDS, RequestField, Treatment

_HEAD = """\
# Compatibility with OpenAI's API

<!-- Written by `python -m swiftkv_platform.serve.openai.compatibility > docs/compatibility.md`. -->

`/v1/completions` and `/v1/chat/completions` take OpenAI's fields and vLLM's extensions, each in one of three ways:

- **served**;
- **accepted without effect**: named in the answer's header `x-swiftkv-ignored-fields` and in the request log;
- **refused** with 400, because it would change the answer. The message names the field and the reason.

`null` is the same as leaving a field out, and `16.0` as `16`. A field that is in neither table is refused with 400,
and the message names the nearest one that is. A deployment's `ignored_fields` (`swiftkv deploy --ignored-fields NAME`)
lists refused or unknown fields to accept without effect; `*` stands for all unknown ones. `/generate` refuses unknown
fields.

Unknown keys inside messages, their parts and calls, tools, `response_format` and `stream_options` are accepted without
effect, and named as `messages.tool_calls.function.parsed_arguments`: what a client's helpers returned can be sent back.
Those of `structured_outputs` would change the answer and are refused, unless `ignored_fields` has `*`.

Numbers have OpenAI's ranges on both engines: `temperature` 0 to 2, `top_p` and `min_p` 0 to 1, penalties -2 to 2,
biases -100 to 100, `repetition_penalty` 0.01 to 100. `top_k` 0 and -1 keep all tokens, and `seed` -1 draws one.
"""
_TITLES = {"completions": "`/v1/completions`", "chat/completions": "`/v1/chat/completions`"}


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for route, title in _TITLES.items():
        yield from (f"## {title}", "", "| field | of | | |", "|---|---|---|---|")
        order = list(Treatment)
        fields = [field for field in FIELDS if route in field.routes]
        yield from map(_row, sorted(fields, key=lambda field: order.index(field.treatment)))
        yield ""


def _row(field: RequestField) -> str:
    return f"| `{field.name}` | {field.origin} | {field.treatment} | {field.note} |"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # into the file
