"""Outputs that a caller gets: tokens, text, log-probabilities, durations. Plain data, no behaviour, no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swiftkv_platform.errors import GenerationError, InvalidInputError, SwiftKVError

NOT_FINITE = "the model's logits are not a number; the request was ended, others are not affected"

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: end of sequence, a stop token or a stop string; `length`: max_tokens or the context; `abort`: taken back;
`error`: the model's output is no number, see `RequestOutput.error`."""

TokenLogprobs = Mapping[int, float]
"""Natural logarithms of probabilities by token id: the token that is there and the most probable ones."""


@dataclass(frozen=True)
class RequestMetrics:
    """Durations in seconds since the request arrived; None where it has not come to that."""

    queue_time: float | None
    """Seconds until it was first scheduled."""
    ttft: float | None
    """Seconds until the first token."""
    tpot: float | None
    """Seconds from one token to the next, the first apart, on average."""
    total: float
    """Seconds until now, or until it finished."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything generated so far for a request, or for one of its `n` samples."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Generated tokens, the one that ended the answer included."""
    text: str
    """Text of `token_ids` up to the stop; empty where the model has no tokenizer."""
    finish_reason: FinishReason | None
    """Reason of the end; None while it runs."""
    metrics: RequestMetrics
    index: int = 0
    """Index of the sample among the request's `n`."""
    stop_reason: int | str | None = None
    """The stop string, or the request's stop token, that ended the answer; None for any other end."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry a generated token, before temperature and penalties; None unless asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt token, from the full model; None for the first, and unless asked for."""
    text_offsets: tuple[int, ...] = ()
    """Places in the text at which each generated token's own text begins; empty without `logprobs`, and without a
    tokenizer."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    num_exited_tokens: int = 0
    """Generated tokens that were chosen at layer l and did not go through the layers above."""
    num_draft_tokens: int = 0
    """Tokens that were drafted, by the exit head or from the text, and verified."""
    num_accepted_tokens: int = 0
    """Drafted tokens that became tokens of the answer."""
    num_prefill_layers_skipped_tokens: int = 0
    """Prompt tokens that were computed and did not go through the layers that compute no KV of their own."""
    error: str | None = None
    """Error that ended the answer, where `finish_reason` is `error`."""
    error_field: str | None = None
    """The request's field that is to blame for it; None: the model."""
    samples: tuple[RequestOutput, ...] = ()
    """All `n` samples in the order of their index, this one first: in what `LLMEngine.generate` returns for n > 1."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def failure(self) -> SwiftKVError:
        """`error`, to be raised: `InvalidInputError` where a field of the request is to blame, else
        `GenerationError`."""
        assert self.error is not None, "it has not failed"
        if self.error_field is not None:
            return InvalidInputError(self.error, field=self.error_field)
        return GenerationError(self.error)


@dataclass(frozen=True)
class EngineState:
    """Load of an engine at one moment."""

    num_running: int
    """Sequences that run."""
    num_waiting: int
    """Sequences that wait for their turn."""
    num_waiting_tokens: int
    """Prompt tokens that are not read yet."""
    num_preemptions: int
    """Sequences pushed out of the KV cache so far, to be computed again."""
    kv_cache_usage: float
    """Share of the KV cache that sequences hold, 0 to 1."""


@dataclass
class StepResult:
    """Result of a step for one scheduled sequence."""

    token_ids: list[int] = field(default_factory=list)
    """Next tokens: none while the prompt is being read, one, or the accepted drafts and the one after them."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, if asked for."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Number of `token_ids`, the first ones, that were drafts."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the next prompt tokens that have none yet."""
    exited: bool = False
    """The token was chosen at layer l."""
    num_skipped_tokens: int = 0
    """Tokens of this step that did not go through the layers above."""
    error: str | None = None
    """Reason that nothing can follow `token_ids`."""
    error_field: str | None = None
    """The request's field that is to blame for it; None: the model."""
