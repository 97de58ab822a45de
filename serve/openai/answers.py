"""Outputs in OpenAI's shapes: completions, chat completions, their calls of tools, and the chunks of all. Knows no
stream and no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from swiftkv_platform.serve.tools.calling import ToolCalling
from swiftkv_platform.serve.tools.parser import Assembled, Call, CallBegin, Piece, Text, ToolCallParser

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.detokenizer import Vocabulary
    from swiftkv_platform.engine.requests import RequestReader

CONTEXT = 8
"""Tokens before an answer that show whether a space stands between."""


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Sums over the choices, of an answer so far as well; a prompt counts once for all its samples."""
    # Reversed, so that of samples the first one stands: what it found in the prefix cache was there before them.
    prompts = {output.request_id: output for output in reversed(outputs)}.values()
    prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
    completion_tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in prompts)},
        "completion_tokens_details": {"early_exit_tokens": sum(output.num_exited_tokens for output in outputs)},
    }


class CompletionChoices:
    """Choices of one text completion, whole or piece by piece. `echo`: each begins with its prompt."""

    def __init__(self, reader: RequestReader, *, echo: bool = False) -> None:
        self._reader = reader
        self._echo = echo
        self._echoed: dict[int, Echoed] = {}

    def choice(self, index: int, output: RequestOutput, since: RequestOutput | None = None) -> dict[str, Any]:
        """A choice, or what it adds to the output before it."""
        old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
        text, prompt = output.text[old_text:], Echoed()
        if self._echo:
            if since is None or index not in self._echoed:
                self._echoed[index] = echoed(self._reader, output)
            prompt = self._echoed[index]
            text = text if since else prompt.text + text
        logprobs = None
        if output.logprobs is not None:
            entries = list(zip(output.token_ids[old_tokens:], output.logprobs[old_tokens:], strict=True))
            places = output.text_offsets[old_tokens:] or [0] * len(entries)  # without a tokenizer there is no text
            offsets = [len(prompt.text) + place for place in places]
            if since is None:
                offsets[:1] = [offset - prompt.ends_with_space for offset in offsets[:1]]
                scored = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
                entries = [*(scored if self._echo else ()), *entries]
                offsets = [*prompt.offsets, *offsets]
            logprobs = self._logprobs(entries, offsets)
        return {"index": index, "text": text, "logprobs": logprobs, **_end(output)}

    def _logprobs(self, entries: Sequence[tuple[int, Any]], offsets: Sequence[int]) -> dict[str, Any]:
        text_of = self._reader.vocabulary.text_of
        return {
            "tokens": [text_of(token) for token, _ in entries],
            "token_logprobs": [None if entry is None else entry[token] for token, entry in entries],
            "top_logprobs": [None if entry is None else self._by_text(token, entry) for token, entry in entries],
            "text_offset": list(offsets),
        }

    def _by_text(self, chosen: int, entry: Mapping[int, float]) -> dict[str, float]:
        """Log-probabilities by text, the chosen token's among them; another token of the same text is its number."""
        found: dict[str, float] = {}
        for token in sorted(entry, key=lambda one: (one != chosen, -entry[one])):
            text = self._reader.vocabulary.text_of(token)
            found[f"token_id:{token}" if text in found else text] = entry[token]
        return found


@dataclass(frozen=True)
class Echoed:
    """A prompt as its answer repeats it."""

    text: str = ""
    offsets: tuple[int, ...] = ()
    """Places in the text at which its tokens' own texts begin."""
    ends_with_space: bool = False
    """The last space is the answer's first token's, which a decoder drops at a text's beginning."""


def echoed(reader: RequestReader, output: RequestOutput) -> Echoed:
    """The prompt of an output, up to the answer's text."""
    token_ids, first = output.prompt_token_ids, output.token_ids[:1]
    detokenizer = reader.detokenizer_of_prompts()
    if detokenizer is None:
        numbers = [str(token_id) for token_id in token_ids]
        places = accumulate((len(number) + 1 for number in numbers[:-1]), initial=0)
        return Echoed(" ".join(numbers), tuple(places))
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    text, offsets = detokenizer.text, tuple(detokenizer.offsets)
    both, alone = (reader.decoded([*token_ids[-CONTEXT:], *part]) for part in (first, ()))
    spaced = bool(first) and both == f"{alone} {reader.decoded(first)}"
    return Echoed(text + " " * spaced, offsets, spaced)


def prompt_logprobs(output: RequestOutput, vocabulary: Vocabulary, top: int) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt's tokens in vLLM's shape. Ranks are told of the `top` most probable ones alone."""

    def told(entry: Mapping[int, float]) -> dict[str, Any]:
        ranked = enumerate(sorted(entry.items(), key=lambda item: -item[1]), start=1)
        return {
            str(token): {"logprob": value, "rank": rank if rank <= top else None, "decoded_token": text_of(token)}
            for rank, (token, value) in ranked
        }

    text_of = vocabulary.text_of
    return [None if entry is None else told(entry) for entry in output.prompt_logprobs or ()]


def chat_choice(index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int) -> dict[str, Any]:
    """A choice of a chat completion; `top` of the most probable tokens are told beside each."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": _chat_logprobs(output, vocabulary, 0, top),
        **_end(output),
    }


def chat_delta(
    index: int, output: RequestOutput, vocabulary: Vocabulary, *, top: int, since: RequestOutput | None = None
) -> dict[str, Any]:
    """Addition of a chat choice to the output before it; the first delta names the role."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    delta = {"content": output.text[old_text:]} | ({} if since else {"role": "assistant"})
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_logprobs(output, vocabulary, old_tokens, top),
        **_end(output),
    }


def _end(output: RequestOutput) -> dict[str, Any]:
    """A choice's keys that say how it ended; `stop_reason` is vLLM's."""
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _chat_logprobs(output: RequestOutput, vocabulary: Vocabulary, first: int, top: int) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": vocabulary.text_of(token), "logprob": logprob, "bytes": list(vocabulary.bytes_of(token))}

    content = []
    for token, found in zip(output.token_ids[first:], output.logprobs[first:], strict=True):
        # Asked for k, the engine gives the k most probable tokens, and the chosen one where it is none of them.
        ranked = sorted(found.items(), key=lambda item: -item[1])[:top]
        content.append({**entry(token, found[token]), "top_logprobs": [entry(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def with_calls(choice: dict[str, Any], calling: ToolCalling) -> dict[str, Any]:
    """A whole choice whose message names its calls."""
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
    """Deltas of a request's choices with the calls in their text told apart."""

    def __init__(self, calling: ToolCalling) -> None:
        self._calling = calling
        self._parsers: dict[int, ToolCallParser] = {}
        self._answers: dict[int, Assembled] = {}
        """Each choice, so far."""

    def delta(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The next chunk of a choice; each is taken once, in order."""
        parser = self._parsers.setdefault(choice["index"], self._calling.parser())
        answer = self._answers.setdefault(choice["index"], Assembled())
        pieces = parser.feed(choice["delta"]["content"])
        if choice["finish_reason"] is not None:
            pieces += parser.finish()
        answer.add(pieces)
        delta = {name: value for name, value in choice["delta"].items() if name != "content"}
        return {**choice, "delta": delta | self._added(pieces), "finish_reason": _reason(choice, answer.calls)}

    def _added(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A delta's content and calls: one entry a call, since clients join deltas by position in the first of them."""
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
    """The reason of an end: calls, unless the answer was cut off in them, by its length or by a stop."""
    reason: str | None = choice["finish_reason"]
    return "tool_calls" if reason == "stop" and calls and all(_is_object(call.arguments) for call in calls) else reason


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
