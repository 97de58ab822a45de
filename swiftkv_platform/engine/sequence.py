"""One request on its way through the engine: its tokens, its text, its clock. Knows neither model nor schedule."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import Literal

import torch

from swiftkv_platform.engine.config import SamplingParams
from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: end of sequence, a stop token or a stop string; `length`: max_tokens or the context; `abort`: taken back."""


class SequenceStatus(enum.Enum):
    """waiting -> running -> finished; a waiting sequence that is aborted finishes as well."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestMetrics:
    """Durations in seconds since the request arrived; None where it has not come to that."""

    queue_time: float | None
    """Until it was first scheduled."""
    ttft: float | None
    """Until the first token."""
    tpot: float | None
    """From one token to the next, the first apart, on average."""
    total: float
    """Until now, or until it finished."""


@dataclass(frozen=True)
class RequestOutput:
    """Everything generated for a request so far."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, the one that ended the answer included."""
    text: str
    """Text of `token_ids` up to the stop; empty where the model has no tokenizer."""
    finish_reason: FinishReason | None
    """None while it runs."""
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    num_prefill_layers_skipped_tokens: int = 0
    """Prompt tokens that did not go through the layers that compute no KV of their own."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Sequence:
    """A prompt, the tokens generated for it, and the state their generation needs."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        generator: torch.Generator,
        detokenizer: IncrementalDetokenizer | None,
        stop_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.generator = generator
        self.output_token_ids: list[int] = []
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache; 0 says that the prompt is still to be run."""
        self.num_prefill_layers_skipped_tokens = 0
        self._detokenizer = detokenizer
        self._stop_token_ids = stop_token_ids
        self._max_output_tokens = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self._arrived = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._finished: float | None = None

    @property
    def last_token_id(self) -> int:
        return self.output_token_ids[-1]

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer else ""

    def start(self) -> None:
        """Note that it leaves the queue."""
        self.status = SequenceStatus.RUNNING
        self._scheduled = time.perf_counter()

    def append(self, token_id: int) -> None:
        """Take the next token, and finish if it is the last one."""
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        self.output_token_ids.append(token_id)
        if token_id in self._stop_token_ids:
            self.finish("stop")
            return
        if self._detokenizer:
            self._detokenizer.append(token_id)
            if self._detokenizer.stopped:
                self.finish("stop")
                return
        if len(self.output_token_ids) >= self._max_output_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End the sequence; what follows changes nothing."""
        assert self.status is not SequenceStatus.FINISHED, f"sequence {self.request_id} finishes twice"
        if self._detokenizer:
            self._detokenizer.finish()
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self._finished = time.perf_counter()

    def output(self) -> RequestOutput:
        """A snapshot for the caller."""
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt_token_ids),
            token_ids=tuple(self.output_token_ids),
            text=self.text,
            finish_reason=self.finish_reason,
            metrics=self._metrics(),
            num_prefill_layers_skipped_tokens=self.num_prefill_layers_skipped_tokens,
        )

    def _metrics(self) -> RequestMetrics:
        decoded = len(self.output_token_ids) - 1
        between = self._last_token - self._first_token if self._first_token and self._last_token else 0.0
        return RequestMetrics(
            queue_time=self._since_arrival(self._scheduled),
            ttft=self._since_arrival(self._first_token),
            tpot=between / decoded if decoded > 0 else None,
            total=(self._finished or time.perf_counter()) - self._arrived,
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._arrived
