"""Generate `docs/compatibility.md` from `serve.openai.fields`.

Write it with `python docs/hooks/compatibility.py > docs/compatibility.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from swiftkv_platform.serve.openai.fields import ALL, FIELDS, MESSAGES, FieldTreatment, RequestField

_HEAD = """\
# Compatibility with OpenAI's and Anthropic's APIs

<!-- Written by `python docs/hooks/compatibility.py > docs/compatibility.md`. -->

**Programs for OpenAI's or Anthropic's API work with another address** ([tested](verification.md#outside-judges)).

`/v1/completions`, `/v1/chat/completions` and `/v1/responses` take OpenAI's fields, `/v1/messages` takes Anthropic's.
All take some of vLLM's and our own. Each field is served, accepted without effect, or refused; if routes are named in
*italics*, only they take it.

- `null` is the same as leaving a field out, and `16.0` as `16`.
- An unknown field is refused with 400, and the message names the nearest known one. A deployment's `ignored_fields`
  (`swiftkv deploy --ignored-fields NAME`) lists refused or unknown fields to accept without effect; `*` stands for all
  unknown ones. `/generate` refuses unknown fields.
- Unknown keys inside messages, tools, formats and `stream_options` are accepted without effect. Those of
  `structured_outputs` are refused, unless `ignored_fields` has `*`.
- Ranges are OpenAI's with both engines: `temperature` 0 to 2 (greedy below 0.01), `top_p` and `min_p` 0 to 1, penalties
  -2 to 2, biases -100 to 100, `repetition_penalty` 0.01 to 100. `top_k` 0 and -1 keep all tokens; `seed` -1 draws one.
- Use HTTP/1.1 with deployments: Ray Serve's proxy streams in chunks to HTTP/1.0 clients too.
"""
_PARTS = """\
## Other parts

Images, files and other parts that are not text are replaced by their text, or by `[image omitted]`, in results of
tools and in messages that were answered. In instructions and in a new message of the user they are refused with 400,
unless they have only text. An `item_reference` becomes a placeholder, since nothing is stored. Calls of other tools
become calls of functions.

Tools of other types, such as `web_search`, are skipped; a `tool_choice` that names one is refused. The header
`x-swiftkv-ignored-fields` names all of these (`messages.content.image`, `tools.web_search`).
"""
_SECTIONS = {
    FieldTreatment.SERVED: "",
    FieldTreatment.WITHOUT_EFFECT: "Listed in the answer's header `x-swiftkv-ignored-fields` and in the request log.",
    FieldTreatment.REFUSED: "Refused with 400 and the reason, because the field would change the answer.",
}


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for treatment, remark in _SECTIONS.items():
        yield from (f"## {treatment.capitalize()}", "", *([remark, ""] if remark else []))
        shown = [field for field in FIELDS if field.treatment is treatment]
        for origin in dict.fromkeys(field.origin for field in shown):
            yield from (f"| {origin}'s field | remark |", "|---|---|")
            rows: dict[str, list[str]] = {}
            for field in (field for field in shown if field.origin == origin):
                rows.setdefault(_remarks(field), []).append(f"`{field.name}`")
            yield from (f"| {', '.join(names)} | {remarks} |" for remarks, names in rows.items())
            yield ""
    yield _PARTS.rstrip("\n")
    yield ""


def _remarks(field: RequestField) -> str:
    """Return the cell behind a field's name: its routes, if not all, and the note. Equal cells share a row."""
    is_usual = field.routes == ALL or (field.origin == "Anthropic" and field.routes == MESSAGES)
    parts = ("" if is_usual else f"*{', '.join(field.routes)}*", field.note)
    return ": ".join(part for part in parts if part)


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # into the file
