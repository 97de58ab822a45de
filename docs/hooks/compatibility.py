"""Generate `docs/compatibility.md` from `serve.openai.fields`.

Write it with `python docs/hooks/compatibility.py > docs/compatibility.md`.
"""

from __future__ import annotations

from collections.abc import Iterator

from swiftkv_platform.serve.openai.fields import ALL, FIELDS, RequestField, Treatment

_HEAD = """\
# Compatibility with OpenAI's and Anthropic's APIs

<!-- Written by `python docs/hooks/compatibility.py > docs/compatibility.md`. -->

`/v1/completions`, `/v1/chat/completions` and `/v1/responses` take OpenAI's fields, `/v1/messages` takes Anthropic's,
and all take some of vLLM's and our own. A field is served, accepted without effect, or refused. `null` is the same as
leaving a field out, and `16.0` as `16`.

An unknown field is refused with 400, and the message names the nearest known one. A deployment's `ignored_fields`
(`swiftkv deploy --ignored-fields NAME`) lists refused or unknown fields to accept without effect; `*` stands for all
unknown ones. `/generate` refuses unknown fields.

Unknown keys inside messages, items, blocks, calls, tools, formats and `stream_options` are accepted without effect, and
named as `messages.tool_calls.function.parsed_arguments`. Those of `structured_outputs` are refused, unless
`ignored_fields` has `*`.

Both engines have OpenAI's ranges, on every route: `temperature` 0 to 2, `top_p` and `min_p` 0 to 1, penalties -2 to 2,
biases -100 to 100, `repetition_penalty` 0.01 to 100. `top_k` 0 and -1 keep all tokens, and `seed` -1 draws one.
"""
_PROGRAMS = """\
## Programs

Requests of Open WebUI, Continue, Zed, Cline, Claude Code, Codex and Vercel's AI SDK, taken from their public sources,
are answered in the tests of both engines (`tests/contract/serving/recorded.yaml`). In sessions of five turns, each turn
computes only what it adds. `/v1/fim/completions` does not exist. Clients that run as programs are
[outside judges](judges.md).

Use HTTP/1.1 with deployments: Ray Serve's proxy streams in chunks to HTTP/1.0 clients too. `swiftkv serve` does not.
"""
_PARTS = """\
## Other parts

Parts, blocks, items and calls of other types, such as images and files, have no effect where the client cannot leave
them out: in results of tools and what comes with them, and in messages that were answered. The model gets their text,
or `[image omitted]`, and the header names them (`messages.content.image`). In instructions and in a new message of the
user they are refused with 400, unless they have only text (`document`, `search_result`). Calls of other tools become
calls of functions.

Items of type `item_reference` become a placeholder too, since nothing is stored. Vercel's AI SDK sends them instead of
the assistant's messages unless it has `providerOptions: {openai: {store: false}}`.

Tools of other types, such as `web_search` and `custom`, are skipped, and the header names them (`tools.web_search`). A
`tool_choice` that names one is refused.
"""
_SECTIONS = {
    Treatment.SERVED: "",
    Treatment.WITHOUT_EFFECT: "Listed in the answer's header `x-swiftkv-ignored-fields` and in the request log.",
    Treatment.REFUSED: "Refused with 400, because the field would change the answer; the message has the reason.",
}


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    for treatment, remark in _SECTIONS.items():
        yield from (f"## {treatment.capitalize()}", "", *([remark, ""] if remark else []))
        yield from ("| field | from | only on | |", "|---|---|---|---|")
        rows: dict[str, list[str]] = {}
        for field in FIELDS:
            if field.treatment is treatment:
                rows.setdefault(_remarks(field), []).append(f"`{field.name}`")
        yield from (f"| {', '.join(names)} | {remarks} |" for remarks, names in rows.items())
        yield ""
    yield _PARTS
    yield _PROGRAMS


def _remarks(field: RequestField) -> str:
    """Return the cells of a field after its name; fields with equal cells share a row."""
    origin = "" if field.origin == "OpenAI" else field.origin
    route = "" if field.routes == ALL else ", ".join(field.routes)
    return f"{origin} | {route} | {field.note}"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201  # into the file
