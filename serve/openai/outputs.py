"""Outputs in OpenAI's formats: completions, chat completions, tool calls, and streams of their chunks."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fastapi import Response
from sse_starlette import EventSourceResponse

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.serve.collector import OutputCollector
from swiftkv_platform.serve.openai.schemas import StreamOptions
from swiftkv_platform.serve.schemas import Usage
from swiftkv_platform.serve.tools.calling import ToolCallRules
from swiftkv_platform.serve.tools.parser import Delta, NewCall, ParsedAnswer, ParsedCall, TextDelta, ToolCallParser
from swiftkv_platform.web.problems import make_error_problem, to_openai_error

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.detokenizer import Vocabulary
    from swiftkv_platform.engine.requests import InputProcessor
    from swiftkv_platform.serve.replica_state import ModelVersion


NUM_DETOKENIZER_CONTEXT_TOKENS = 8
"""Number of last prompt tokens decoded with the first generated token, to see whether a space separates them."""


def make_usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the usage of all choices. A prompt counts once for all its samples."""
    usage = Usage.from_outputs(outputs)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"early_exit_tokens": usage.early_exit_tokens},
    }


class CompletionFormatter:
    """Formats the choices of a text completion, complete or streamed. `echo`: each choice begins with its prompt."""

    def __init__(self, input_processor: InputProcessor, *, echo: bool = False) -> None:
        self._input_processor = input_processor
        self._echo = echo
        self._echoed_prompts: dict[int, EchoedPrompt] = {}

    def format_choice(self, index: int, output: RequestOutput, previous: RequestOutput | None = None) -> dict[str, Any]:
        """Return a choice; with a `previous` output only its additions."""
        old_text, old_tokens = (len(previous.text), len(previous.token_ids)) if previous else (0, 0)
        text, prompt = output.text[old_text:], EchoedPrompt()
        if self._echo:
            if previous is None or index not in self._echoed_prompts:
                self._echoed_prompts[index] = echo_prompt(self._input_processor, output)
            prompt = self._echoed_prompts[index]
            text = text if previous else prompt.text + text
        logprobs = None
        if output.logprobs is not None:
            entries = list(zip(output.token_ids[old_tokens:], output.logprobs[old_tokens:], strict=True))
            text_offsets = output.text_offsets[old_tokens:] or [0] * len(entries)  # no text without a tokenizer
            offsets = [len(prompt.text) + offset for offset in text_offsets]
            if previous is None:
                offsets[:1] = [offset - prompt.ends_with_space for offset in offsets[:1]]
                scored_prompt = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
                entries = [*(scored_prompt if self._echo else ()), *entries]
                offsets = [*prompt.offsets, *offsets]
            logprobs = self._format_logprobs(entries, offsets)
        return {"index": index, "text": text, "logprobs": logprobs, **_make_finish_fields(output)}

    def _format_logprobs(self, entries: Sequence[tuple[int, Any]], offsets: Sequence[int]) -> dict[str, Any]:
        text_of = self._input_processor.vocabulary.get_text
        return {
            "tokens": [text_of(token) for token, _ in entries],
            "token_logprobs": [None if entry is None else entry[token] for token, entry in entries],
            "top_logprobs": [None if entry is None else self._key_by_text(token, entry) for token, entry in entries],
            "text_offset": list(offsets),
        }

    def _key_by_text(self, chosen: int, entry: Mapping[int, float]) -> dict[str, float]:
        """Return log-probabilities by token text. Of tokens with equal text, all but the first, which is the chosen one
        if among them, are named by id."""
        by_text: dict[str, float] = {}
        for token in sorted(entry, key=lambda token_id: (token_id != chosen, -entry[token_id])):
            text = self._input_processor.vocabulary.get_text(token)
            by_text[f"token_id:{token}" if text in by_text else text] = entry[token]
        return by_text


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt's text before its completion."""

    text: str = ""
    offsets: tuple[int, ...] = ()
    ends_with_space: bool = False
    """Whether the last space belongs to the first generated token; decoders drop it at the beginning of a text."""


def echo_prompt(input_processor: InputProcessor, output: RequestOutput) -> EchoedPrompt:
    """Return the text of an output's prompt, up to the text of its completion."""
    token_ids, first = output.prompt_token_ids, output.token_ids[:1]
    detokenizer = input_processor.make_prompt_detokenizer()
    if detokenizer is None:
        numbers = [str(token_id) for token_id in token_ids]
        offsets = accumulate((len(number) + 1 for number in numbers[:-1]), initial=0)
        return EchoedPrompt(" ".join(numbers), tuple(offsets))
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    both, alone = (
        input_processor.decode([*token_ids[-NUM_DETOKENIZER_CONTEXT_TOKENS:], *part]) for part in (first, ())
    )
    has_space = bool(first) and both == f"{alone} {input_processor.decode(first)}"
    return EchoedPrompt(detokenizer.text + " " * has_space, tuple(detokenizer.offsets), has_space)


def format_prompt_logprobs(output: RequestOutput, vocabulary: Vocabulary, top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's format. Only the `top` most probable tokens have a
    rank."""

    def format_entry(entry: Mapping[int, float]) -> dict[str, Any]:
        ranked = enumerate(sorted(entry.items(), key=lambda item: -item[1]), start=1)
        return {
            str(token): {"logprob": value, "rank": rank if rank <= top else None, "decoded_token": text_of(token)}
            for rank, (token, value) in ranked
        }

    text_of = vocabulary.get_text
    return [None if entry is None else format_entry(entry) for entry in output.prompt_logprobs or ()]


def format_chat_choice(index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int) -> dict[str, Any]:
    """Return a choice of a chat completion, with the `top` most probable tokens at each position."""
    return {"index": index, **format_answer(output), "logprobs": _format_chat_logprobs(output, vocabulary, 0, top)}


def format_answer(output: RequestOutput) -> dict[str, Any]:
    """Return the part of a chat completion's choice that does not depend on the request."""
    return {"message": {"role": "assistant", "content": output.text, "refusal": None}, **_make_finish_fields(output)}


def format_chat_delta(
    index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int, previous: RequestOutput | None = None
) -> dict[str, Any]:
    """Return the additions of a chat choice to its `previous` output; the first delta has the role."""
    old_text, old_tokens = (len(previous.text), len(previous.token_ids)) if previous else (0, 0)
    delta = {"content": output.text[old_text:]} | ({} if previous else {"role": "assistant"})
    logprobs = _format_chat_logprobs(output, vocabulary, old_tokens, top)
    return {"index": index, "delta": delta, "logprobs": logprobs, **_make_finish_fields(output)}


def _make_finish_fields(output: RequestOutput) -> dict[str, Any]:
    """Return `finish_reason`, and `stop_reason` as in vLLM."""
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _format_chat_logprobs(output: RequestOutput, vocabulary: Vocabulary, first: int, top: int) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None

    def format_token(token: int, logprob: float) -> dict[str, Any]:
        return {"token": vocabulary.get_text(token), "logprob": logprob, "bytes": list(vocabulary.get_bytes(token))}

    content = []
    for token, entry in zip(output.token_ids[first:], output.logprobs[first:], strict=True):
        # The engine returns the k most probable tokens, plus the chosen one if it is not among them.
        ranked = sorted(entry.items(), key=lambda item: -item[1])[:top]
        content.append({**format_token(token, entry[token]), "top_logprobs": [format_token(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def parse_tool_calls(choice: dict[str, Any], rules: ToolCallRules) -> dict[str, Any]:
    """Return a complete choice with the tool calls of its text in `tool_calls`."""
    parser, parsed = rules.make_parser(), ParsedAnswer()
    parsed.add_deltas(parser.feed(choice["message"]["content"]))
    parsed.add_deltas(parser.finish())
    message = {**choice["message"], "content": parsed.text}
    if parsed.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
        calls = [{"id": rules.family.make_id(), "type": "function", "function": function} for function in functions]
        message |= {"content": parsed.text or None, "tool_calls": calls}
    return {**choice, "message": message, "finish_reason": _select_finish_reason(choice, parsed.calls)}


class ToolCallStreams:
    """Parses tool calls in the deltas of a request's choices."""

    def __init__(self, rules: ToolCallRules) -> None:
        self._rules = rules
        self._parsers: dict[int, ToolCallParser] = {}
        self._parsed: dict[int, ParsedAnswer] = {}

    def convert_delta(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Convert the next chunk of a choice; call it once per chunk, in order."""
        parser = self._parsers.setdefault(choice["index"], self._rules.make_parser())
        parsed = self._parsed.setdefault(choice["index"], ParsedAnswer())
        deltas = parser.feed(choice["delta"]["content"])
        if choice["finish_reason"] is not None:
            deltas += parser.finish()
        parsed.add_deltas(deltas)
        delta = {name: value for name, value in choice["delta"].items() if name != "content"}
        return {
            **choice,
            "delta": delta | self._format_deltas(deltas),
            "finish_reason": _select_finish_reason(choice, parsed.calls),
        }

    def _format_deltas(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a delta's content and calls, with one entry per call, since clients join deltas by the entry's
        index."""
        text, calls = "", dict[int, dict[str, Any]]()
        for delta in deltas:
            if isinstance(delta, TextDelta):
                text += delta.text
            elif isinstance(delta, NewCall):
                function = {"name": delta.name, "arguments": ""}
                new_id = self._rules.family.make_id()
                calls[delta.index] = {"index": delta.index, "id": new_id, "type": "function", "function": function}
            else:
                call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += delta.text
        return ({"content": text} if text else {}) | ({"tool_calls": list(calls.values())} if calls else {})


def _select_finish_reason(choice: dict[str, Any], calls: Sequence[ParsedCall]) -> str | None:
    """Return the finish reason: `tool_calls` if there are calls and all are complete."""
    reason: str | None = choice["finish_reason"]
    return "tool_calls" if reason == "stop" and calls and all(_is_object(call.arguments) for call in calls) else reason


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


DONE = "[DONE]"

FormatChunk = Callable[[int, "RequestOutput", "RequestOutput | None"], Awaitable[dict[str, Any]]]
"""Function: (choice, output up to now, previous output or None) -> entry of `choices` in the chunk."""


def make_common_fields(prefix: str, kind: str, collector: OutputCollector, version: ModelVersion) -> dict[str, Any]:
    """Return the common fields of a response and its chunks: id, object, created, model."""
    request_id = f"{prefix}-{collector.id.removeprefix('gen_')}"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": version.model_info.model}


async def stream_chunks(
    collector: OutputCollector, head: dict[str, Any], format_chunk: FormatChunk, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield a chunk for each new output, and the usage if requested. Raises as `OutputCollector.stream_outputs`."""
    outputs: dict[int, RequestOutput] = {}

    def make_current_usage() -> dict[str, Any]:
        return make_usage([outputs[choice] for choice in sorted(outputs)])

    async for choice, output in collector.stream_outputs():
        added = await format_chunk(choice, output, outputs.get(choice))
        outputs[choice] = output
        event = {**head, "choices": [added]}
        if options.continuous_usage_stats:
            event["usage"] = make_current_usage()
        elif options.include_usage:
            event["usage"] = None
        yield event
    if options.include_usage:
        yield {**head, "choices": [], "usage": make_current_usage()}


def make_event_stream(events: AsyncIterator[dict[str, str]]) -> Response:
    stream: Response = EventSourceResponse(events, sep="\n")
    del stream.headers["connection"]  # the HTTP server sends its own, which may be `close`
    return stream


async def stream_events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """Yield server-sent events of chunks, then `[DONE]` or the document of an error."""
    try:
        async for chunk in chunks:
            yield {"data": json.dumps(chunk)}
    except SwiftKVError as error:
        yield {"data": json.dumps(to_openai_error(make_error_problem(error, "/v1/")))}
        return
    yield {"data": DONE}
