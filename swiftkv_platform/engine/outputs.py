"""Outputs that a caller gets: tokens, text, log-probabilities, durations, as plain data without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swiftkv_platform.errors import GenerationError, InvalidInputError, SwiftKVError
from swiftkv_platform.web.places import Sender

NOT_FINITE = "the model's logits are not a number; the request was ended, others are not affected"

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: end of sequence, a stop token or a stop string; `length`: max_tokens or the context; `abort`: aborted;
`error`: the answer failed, see `RequestOutput.error`."""

TokenLogprobs = Mapping[int, float]
"""Natural logarithms of probabilities by token id: the actual token and the most probable ones."""


@dataclass(frozen=True)
class RequestMetrics:
    """Durations in seconds since the request arrived; None for events that have not happened."""

    queue_time: float | None
    """Seconds until it was first scheduled."""
    ttft: float | None
    """Seconds until the first token."""
    tpot: float | None
    """Mean seconds between tokens, from the first one on."""
    total: float
    """Seconds until it finished, or until now."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything generated so far for a request, or for one of its `n` samples."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, including the one that ended the answer."""
    text: str
    """Text of `token_ids` up to the stop; empty if the model has no tokenizer."""
    finish_reason: FinishReason | None
    """Reason why it ended; None while it runs."""
    metrics: RequestMetrics
    index: int = 0
    """Index of the sample among the request's `n`."""
    stop_reason: int | str | None = None
    """The stop string, or the request's stop token, that ended the answer; None for any other end."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per generated token, before temperature and penalties; None unless asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry per prompt token, from the full model, None for the first; None unless asked for."""
    text_offsets: tuple[int, ...] = ()
    """Indices in the text at which each generated token's text begins; empty without `logprobs` or a tokenizer."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV was cached already."""
    num_exited_tokens: int = 0
    """Number of generated tokens that were chosen at layer l, without layers >= l."""
    num_draft_tokens: int = 0
    """Number of tokens that were drafted, by the exit head or from the text, and verified."""
    num_accepted_tokens: int = 0
    """Number of drafted tokens that became tokens of the answer."""
    num_skipped_tokens: int = 0
    """Number of prompt tokens that were computed without layers >= l."""
    error: str | None = None
    """Error that ended the answer, if `finish_reason` is `error`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model did."""
    samples: tuple[RequestOutput, ...] = ()
    """All `n` samples in order of their index, beginning with this one; only from `LLMEngine.generate` with n > 1."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def failure(self) -> SwiftKVError:
        """Return `error` as an exception: `InvalidInputError` if a field of the request caused it, else
        `GenerationError`."""
        assert self.error is not None, "it has not failed"
        if self.error_field is not None:
            return InvalidInputError(self.error, field=self.error_field)
        return GenerationError(self.error)


@dataclass(frozen=True)
class EngineState:
    """Load of an engine at a moment."""

    num_running: int
    """Number of running sequences."""
    num_waiting: int
    """Number of waiting sequences."""
    waiting_tokens: Mapping[Sender, int]
    """Number of prompt tokens not prefilled yet, by their senders."""
    num_preemptions: int
    """Number of preemptions so far; each recomputes a sequence that was pushed out of the KV cache."""
    kv_cache_usage: float
    """Share of the KV cache that sequences hold, 0 to 1."""

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens not prefilled yet."""
        return sum(self.waiting_tokens.values())


@dataclass
class StepResult:
    """Result of a step for one scheduled sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Next tokens: none while the prompt is prefilled, else one, or the accepted drafts and the one after them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token, if asked for."""
    num_draft_tokens: int = 0
    """Number of drafts that were verified."""
    num_accepted_tokens: int = 0
    """Number of drafts among `token_ids`, which are the first ones."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the next prompt tokens that have none yet."""
    exited: bool = False
    """Whether the token was chosen at layer l."""
    num_skipped_tokens: int = 0
    """Number of tokens of this step that did not run through layers >= l."""
    error: str | None = None
    """Error because of which nothing can follow `token_ids`."""
    error_field: str | None = None
    """Field of the request that caused the error; None: the model did."""
