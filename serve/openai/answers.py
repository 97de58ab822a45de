"""Outputs in OpenAI's shapes: completions, chat completions and the chunks of both. Knows no stream and no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput

Decode = Any
"""A tokenizer's `decode`; None where the model has no tokenizer."""


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


def completion_choice(
    index: int, output: RequestOutput, tokenizer: Decode, *, since: RequestOutput | None = None, echo: bool = False
) -> dict[str, Any]:
    """A choice of a text completion, or what it adds to the output before it."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    text = output.text[old_text:]
    prompt: list[tuple[int, Any]] = []
    if echo and since is None:
        text = _decoded(tokenizer, output.prompt_token_ids) + text
        prompt = list(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False))
    logprobs = None
    if output.logprobs is not None:
        fresh = zip(output.token_ids[old_tokens:], output.logprobs[old_tokens:], strict=True)
        logprobs = _completion_logprobs(tokenizer, [*prompt, *fresh], offset=old_text)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _completion_logprobs(tokenizer: Decode, entries: list[tuple[int, Any]], offset: int) -> dict[str, Any]:
    tokens = [_decoded(tokenizer, [token]) for token, _ in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else entry[token] for token, entry in entries],
        "top_logprobs": [
            None if entry is None else {_decoded(tokenizer, [other]): value for other, value in entry.items()}
            for _, entry in entries
        ],
        "text_offset": offsets,
    }


def chat_choice(index: int, output: RequestOutput, tokenizer: Decode, *, top: int) -> dict[str, Any]:
    """A choice of a chat completion; `top` of the most probable tokens are told beside each."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": _chat_logprobs(output, tokenizer, 0, top),
        "finish_reason": output.finish_reason,
    }


def chat_delta(
    index: int, output: RequestOutput, tokenizer: Decode, *, top: int, since: RequestOutput | None = None
) -> dict[str, Any]:
    """Addition of a chat choice to the output before it; the first delta names the role."""
    old_text, old_tokens = (len(since.text), len(since.token_ids)) if since else (0, 0)
    delta = {"content": output.text[old_text:]} | ({} if since else {"role": "assistant"})
    return {
        "index": index,
        "delta": delta,
        "logprobs": _chat_logprobs(output, tokenizer, old_tokens, top),
        "finish_reason": output.finish_reason,
    }


def _chat_logprobs(output: RequestOutput, tokenizer: Decode, first: int, top: int) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _decoded(tokenizer, [token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = []
    for token, found in zip(output.token_ids[first:], output.logprobs[first:], strict=True):
        # Asked for k, the engine gives the k most probable tokens, and the chosen one where it is none of them.
        ranked = sorted(found.items(), key=lambda item: -item[1])[:top]
        content.append({**entry(token, found[token]), "top_logprobs": [entry(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def _decoded(tokenizer: Decode, token_ids: Sequence[int]) -> str:
    if tokenizer is None:
        return " ".join(str(token) for token in token_ids)
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
