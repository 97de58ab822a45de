"""Outputs in OpenAI's formats: completions, chat completions, tool calls, and streams of chunks of each."""

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
from swiftkv_platform.serve.answers import Answers
from swiftkv_platform.serve.openai.schemas import StreamOptions
from swiftkv_platform.serve.schemas import Usage
from swiftkv_platform.serve.tools.calling import ToolCalling
from swiftkv_platform.serve.tools.parser import Assembled, Call, CallBegin, Piece, Text, ToolCallParser
from swiftkv_platform.web.problems import make_error_problem, to_openai_error

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.detokenizer import Vocabulary
    from swiftkv_platform.engine.requests import InputProcessor
    from swiftkv_platform.serve.current import Version


CONTEXT = 8
"""Prompt tokens decoded with an answer's first token to find out whether a space separates them."""


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the usage summed over the choices, finished or not; a prompt counts once for all its samples."""
    told = Usage.of(outputs)
    return {
        "prompt_tokens": told.prompt_tokens,
        "completion_tokens": told.completion_tokens,
        "total_tokens": told.prompt_tokens + told.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": told.cached_tokens},
        "completion_tokens_details": {"early_exit_tokens": told.early_exit_tokens},
    }


class CompletionChoices:
    """Builds the choices of one text completion, whole or in pieces. `echo`: each choice begins with its prompt."""

    def __init__(self, input_processor: InputProcessor, *, echo: bool = False) -> None:
        self._input_processor = input_processor
        self._echo = echo
        self._echoed: dict[int, Echoed] = {}

    def choice(self, index: int, output: RequestOutput, since: RequestOutput | None = None) -> dict[str, Any]:
        """Return a choice, or with `since` what it adds to that earlier output."""
        old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
        text, prompt = output.text[old_text:], Echoed()
        if self._echo:
            if since is None or index not in self._echoed:
                self._echoed[index] = echoed(self._input_processor, output)
            prompt = self._echoed[index]
            text = text if since else prompt.text + text
        logprobs = None
        if output.logprobs is not None:
            entries = list(zip(output.token_ids[old_tokens:], output.logprobs[old_tokens:], strict=True))
            places = output.text_offsets[old_tokens:] or [0] * len(entries)  # no text without a tokenizer
            offsets = [len(prompt.text) + place for place in places]
            if since is None:
                offsets[:1] = [offset - prompt.ends_with_space for offset in offsets[:1]]
                scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
                entries = [*(scored if self._echo else ()), *entries]
                offsets = [*prompt.offsets, *offsets]
            logprobs = self._logprobs(entries, offsets)
        return {"index": index, "text": text, "logprobs": logprobs, **_end(output)}

    def _logprobs(self, entries: Sequence[tuple[int, Any]], offsets: Sequence[int]) -> dict[str, Any]:
        text_of = self._input_processor.vocabulary.get_text
        return {
            "tokens": [text_of(token) for token, _ in entries],
            "token_logprobs": [None if entry is None else entry[token] for token, entry in entries],
            "top_logprobs": [None if entry is None else self._by_text(token, entry) for token, entry in entries],
            "text_offset": list(offsets),
        }

    def _by_text(self, chosen: int, entry: Mapping[int, float]) -> dict[str, float]:
        """Return log-probabilities by token text. The chosen token has precedence; others with equal text are named by
        id."""
        found: dict[str, float] = {}
        for token in sorted(entry, key=lambda one: (one != chosen, -entry[one])):
            text = self._input_processor.vocabulary.get_text(token)
            found[f"token_id:{token}" if text in found else text] = entry[token]
        return found


@dataclass(frozen=True)
class Echoed:
    """A prompt's text as an echo before the answer."""

    text: str = ""
    offsets: tuple[int, ...] = ()
    """Start of each token's text."""
    ends_with_space: bool = False
    """Whether the last space belongs to the answer's first token; decoders drop it at the beginning of a text."""


def echoed(input_processor: InputProcessor, output: RequestOutput) -> Echoed:
    """Return the text of an output's prompt, up to the answer's text."""
    token_ids, first = output.prompt_token_ids, output.token_ids[:1]
    detokenizer = input_processor.make_prompt_detokenizer()
    if detokenizer is None:
        numbers = [str(token_id) for token_id in token_ids]
        places = accumulate((len(number) + 1 for number in numbers[:-1]), initial=0)
        return Echoed(" ".join(numbers), tuple(places))
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    text, offsets = detokenizer.text, tuple(detokenizer.offsets)
    both, alone = (input_processor.decode([*token_ids[-CONTEXT:], *part]) for part in (first, ()))
    spaced = bool(first) and both == f"{alone} {input_processor.decode(first)}"
    return Echoed(text + " " * spaced, offsets, spaced)


def prompt_logprobs(output: RequestOutput, vocabulary: Vocabulary, top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's format. Only the `top` most probable have a rank."""

    def told(entry: Mapping[int, float]) -> dict[str, Any]:
        ranked = enumerate(sorted(entry.items(), key=lambda item: -item[1]), start=1)
        return {
            str(token): {"logprob": value, "rank": rank if rank <= top else None, "decoded_token": text_of(token)}
            for rank, (token, value) in ranked
        }

    text_of = vocabulary.get_text
    return [None if entry is None else told(entry) for entry in output.prompt_logprobs or ()]


def chat_choice(index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int) -> dict[str, Any]:
    """Return a choice of a chat completion, with the `top` most probable tokens at each position."""
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": _chat_logprobs(output, vocabulary, 0, top), **_end(output)}


def chat_delta(
    index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int, since: RequestOutput | None = None
) -> dict[str, Any]:
    """Return what a chat choice adds to the output `since`; the first delta has the role."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    delta = {"content": output.text[old_text:]} | ({} if since else {"role": "assistant"})
    logprobs = _chat_logprobs(output, vocabulary, old_tokens, top)
    return {"index": index, "delta": delta, "logprobs": logprobs, **_end(output)}


def _end(output: RequestOutput) -> dict[str, Any]:
    """Return the fields on how a choice ended; `stop_reason` is vLLM's extension."""
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _chat_logprobs(output: RequestOutput, vocabulary: Vocabulary, first: int, top: int) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": vocabulary.get_text(token), "logprob": logprob, "bytes": list(vocabulary.get_bytes(token))}

    content = []
    for token, found in zip(output.token_ids[first:], output.logprobs[first:], strict=True):
        # The engine returns the k most probable tokens, plus the chosen one if it is not among them.
        ranked = sorted(found.items(), key=lambda item: -item[1])[:top]
        content.append({**entry(token, found[token]), "top_logprobs": [entry(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def with_calls(choice: dict[str, Any], calling: ToolCalling) -> dict[str, Any]:
    """Parse tool calls out of a complete choice's message. Returns the choice with `tool_calls`."""
    parser, answer = calling.parser(), Assembled()
    answer.add(parser.feed(choice["message"]["content"]))
    answer.add(parser.finish())
    message = {**choice["message"], "content": answer.text}
    if answer.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
        calls = [{"id": calling.family.new_id(), "type": "function", "function": function} for function in functions]
        message |= {"content": answer.text or None, "tool_calls": calls}
    return {**choice, "message": message, "finish_reason": _reason(choice, answer.calls)}


class CallStreams:
    """Separates tool calls from text in the deltas of a request's choices."""

    def __init__(self, calling: ToolCalling) -> None:
        self._calling = calling
        self._parsers: dict[int, ToolCallParser] = {}
        self._answers: dict[int, Assembled] = {}
        """Text and calls of each choice so far."""

    def delta(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Convert the next chunk of a choice. Call once for each chunk, in order."""
        parser = self._parsers.setdefault(choice["index"], self._calling.parser())
        answer = self._answers.setdefault(choice["index"], Assembled())
        pieces = parser.feed(choice["delta"]["content"])
        if choice["finish_reason"] is not None:
            pieces += parser.finish()
        answer.add(pieces)
        delta = {name: value for name, value in choice["delta"].items() if name != "content"}
        return {**choice, "delta": delta | self._added(pieces), "finish_reason": _reason(choice, answer.calls)}

    def _added(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return a delta's content and calls, one entry per call, since clients join deltas by an entry's position."""
        text, calls = "", dict[int, dict[str, Any]]()
        for piece in pieces:
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, CallBegin):
                function = {"name": piece.name, "arguments": ""}
                new_id = self._calling.family.new_id()
                calls[piece.index] = {"index": piece.index, "id": new_id, "type": "function", "function": function}
            else:
                call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return ({"content": text} if text else {}) | ({"tool_calls": list(calls.values())} if calls else {})


def _reason(choice: dict[str, Any], calls: Sequence[Call]) -> str | None:
    """Return the finish reason: `tool_calls` if there are calls and none was cut off by the length or a stop."""
    reason: str | None = choice["finish_reason"]
    return "tool_calls" if reason == "stop" and calls and all(_is_object(call.arguments) for call in calls) else reason


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


DONE = "[DONE]"

Chunk = Callable[[int, "RequestOutput", "RequestOutput | None"], Awaitable[dict[str, Any]]]
"""(choice, output so far, previous output or None) -> the chunk's entry in `choices`."""


def head_of(prefix: str, kind: str, answers: Answers, version: Version) -> dict[str, Any]:
    """Return the first fields of an answer and of each of its chunks: id, object, created, model."""
    request_id = f"{prefix}-{answers.id.removeprefix('gen_')}"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": version.card.model}


async def chunks_of(
    answers: Answers, head: dict[str, Any], chunk: Chunk, options: StreamOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield chunks with the additions of each output, and the usage if wanted. Raises as `Answers.as_they_come`."""
    outputs: dict[int, RequestOutput] = {}

    def usage_so_far() -> dict[str, Any]:
        return usage([outputs[choice] for choice in sorted(outputs)])

    async for choice, output in answers.as_they_come():
        fresh = await chunk(choice, output, outputs.get(choice))
        outputs[choice] = output
        event = {**head, "choices": [fresh]}
        if options.continuous_usage_stats:
            event["usage"] = usage_so_far()
        elif options.include_usage:
            event["usage"] = None
        yield event
    if options.include_usage:
        yield {**head, "choices": [], "usage": usage_so_far()}


def event_stream(events: AsyncIterator[dict[str, str]]) -> Response:
    stream: Response = EventSourceResponse(events, sep="\n")
    return stream


async def events_of(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """Yield the events of a completion or chat: its chunks, then `[DONE]`; after a failure an error document."""
    try:
        async for chunk in chunks:
            yield {"data": json.dumps(chunk)}
    except SwiftKVError as error:
        yield {"data": json.dumps(to_openai_error(make_error_problem(error, "/v1/")))}
        return
    yield {"data": DONE}
