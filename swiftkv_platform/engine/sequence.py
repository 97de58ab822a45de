"""State of one sample of a request in the engine: tokens, text, blocks, times."""

from __future__ import annotations

import enum
import time
from functools import cached_property

from swiftkv_platform.engine.detokenizer import IncrementalDetokenizer
from swiftkv_platform.engine.drafting import AcceptanceHistory
from swiftkv_platform.engine.grammars import Constraint
from swiftkv_platform.engine.kv_cache import BlockTable
from swiftkv_platform.engine.outputs import FinishReason, RequestMetrics, RequestOutput, StepResult, TokenLogprobs
from swiftkv_platform.specs.sampling import SamplingParams
from swiftkv_platform.student_shape import find_deep_start
from swiftkv_platform.web.limiters import Sender

_ANONYMOUS_SENDER = Sender()


class SequenceStatus(enum.Enum):
    """Status of a sequence. `_STATUS_TRANSITIONS` has the valid transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_STATUS_TRANSITIONS = {
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.WAITING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set(),
}


class Sequence:
    """A prompt, the tokens generated for it, and the state of their generation."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int,
        stop_token_ids: frozenset[int],
        max_model_len: int,
        excluded_token_ids: frozenset[int] = frozenset(),
        detokenizer: IncrementalDetokenizer | None = None,
        arrival: int = 0,
        index: int = 0,
        priority: int = 0,
        sender: Sender = _ANONYMOUS_SENDER,
        constraint: Constraint | None = None,
        deep_tail: int | None = None,
        adapter: str | None = None,
        adapter_digest: str = "",
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.arrival = arrival
        """Position of the request in the order of arrival."""
        self.priority = priority
        self.sender = sender
        self.constraint = constraint
        """Grammar of this sequence's output, or None."""
        self.deep_tail = deep_tail
        """As in `LayerMap`; None: the K and V of all tokens come from x."""
        self.adapter = adapter
        """Name of the adapter that runs the sequence; None: the engine's own model."""
        self.token_ids = list(prompt_token_ids)
        self.block_table = BlockTable(adapter_digest=adapter_digest)
        self.num_computed_tokens = 0
        """Number of leading tokens whose KV is in the cache."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.num_exited_tokens = 0
        self.exited_positions: set[int] = set()
        """Positions of tokens that exited at layer l. Their K and V in layers >= l come from x, as for prompts."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_skipped_tokens = 0
        self.max_output_tokens = min(params.max_tokens, max_model_len - len(prompt_token_ids))
        self._num_cached_tokens: int | None = None
        self._error: str | None = None
        self._error_field: str | None = None
        self._detokenizer = detokenizer
        self.stop_token_ids = stop_token_ids
        self._excluded_token_ids = excluded_token_ids
        self._arrived = time.perf_counter()
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._finished: float | None = None

    @cached_property
    def drafts(self) -> AcceptanceHistory:
        """Results of drafting, created on first use."""
        return AcceptanceHistory()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last are computed."""
        return self.num_tokens - self.num_computed_tokens == 1

    @property
    def num_draftable_tokens(self) -> int:
        """Max number of draft tokens: with the token after them they reach `max_output_tokens`."""
        return self.max_output_tokens - self.num_output_tokens - 1

    @property
    def can_generate(self) -> bool:
        """Whether tokens are generated. If not, the prompt is only prefilled and scored."""
        return self.max_output_tokens > 0

    @property
    def can_exit(self) -> bool:
        """Whether the next token may come from the exit head. A deep tail of several tokens runs all layers, so that a
        prompt's last token does not exit."""
        return self.deep_tail in (None, 1) or self.num_output_tokens > 0

    @property
    def num_shareable_tokens(self) -> int:
        """Number of leading tokens whose K and V any sequence with the same prefix can use: those before the first
        token with its own K and V."""
        return self.num_tokens if self.deep_tail is None else find_deep_start(self.num_prompt_tokens, self.deep_tail)

    def find_deep_positions(self, first: int, end: int) -> range:
        """Return the positions from `first` to `end` - 1 of tokens with their own K and V. Without generated tokens,
        only prompt log-probabilities need them, and these do not read the last token."""
        needs_own = self.can_generate or self.params.prompt_logprobs is not None
        if self.deep_tail is None or not needs_own:
            return range(0)
        return range(max(self.num_shareable_tokens, first), end if self.can_generate else min(end, self.num_tokens - 1))

    def get_excluded_token_ids(self, num_output_tokens: int) -> frozenset[int]:
        """Return the tokens that may not follow the first `num_output_tokens` output tokens."""
        return self._excluded_token_ids if num_output_tokens < self.params.min_tokens else frozenset()

    @property
    def is_missing_prompt_logprobs(self) -> bool:
        """Whether some prompt log-probabilities are not computed yet."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer else ""

    def start(self, *, num_cached_tokens: int, waited_s: float | None = None) -> None:
        """Start running, with the KV of the first `num_cached_tokens` tokens cached. `waited_s`: seconds in the queue;
        None: the time since arrival."""
        self._set_status(SequenceStatus.RUNNING)
        self.num_computed_tokens = num_cached_tokens
        if self._scheduled is None:
            self._scheduled = time.perf_counter() if waited_s is None else self._arrived + waited_s
            self._num_cached_tokens = num_cached_tokens

    def preempt(self) -> None:
        """Return to the queue. The KV is lost and will be recomputed."""
        self._set_status(SequenceStatus.WAITING)
        self.num_computed_tokens = 0
        if self.num_output_tokens == 0:
            self.num_skipped_tokens = 0

    def apply_result(self, result: StepResult) -> None:
        """Add the tokens, log-probabilities and counts of a step, and finish the sequence if it has ended."""
        if self.num_output_tokens == 0:
            self.num_skipped_tokens += result.num_skipped_tokens
        self.prompt_logprobs += result.prompt_logprobs
        self.num_draft_tokens += result.num_draft_tokens
        if result.is_exited:
            self.num_exited_tokens += 1
            self.exited_positions.add(self.num_tokens - 1)
        for at, token_id in enumerate(result.token_ids):
            self.num_accepted_tokens += at < result.num_accepted_tokens
            self.logprobs += result.logprobs[at : at + 1]
            self.append_token(token_id)
            if self.finish_reason is not None:
                return  # an accepted draft ended the sequence; drop the tokens after it
        if result.error is not None:
            self._error, self._error_field = result.error, result.error_field
            self.finish("error")

    def append_token(self, token_id: int) -> None:
        self._last_token = time.perf_counter()
        self._first_token = self._first_token or self._last_token
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            if self._detokenizer:
                self._detokenizer.append_stop_token(token_id)
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
            self.finish("stop")
            return
        if self._detokenizer:
            self._detokenizer.append(token_id)
            if self._detokenizer.is_stopped:
                self.finish("stop")
                return
        if self.constraint is not None and self.constraint.is_complete(self.output_token_ids):
            self.finish("stop")
        elif self.constraint is not None and self.constraint.has_rejected_token:
            self._error, self._error_field = self.constraint.failure, self.constraint.name
            self.finish("error")
        elif self.num_output_tokens >= self.max_output_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        self._set_status(SequenceStatus.FINISHED)
        if self._detokenizer:
            self._detokenizer.finish()
        self.finish_reason = reason
        if reason == "stop" and self._detokenizer and self._detokenizer.stop_string is not None:
            self.stop_reason = self._detokenizer.stop_string
        self._finished = time.perf_counter()

    def make_output(self) -> RequestOutput:
        params = self.params
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            prompt_token_ids=list(self.prompt_token_ids),
            token_ids=self.output_token_ids,
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            metrics=self._make_metrics(),
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            text_offsets=tuple(self._detokenizer.offsets) if self._detokenizer else (),
            num_cached_tokens=self._num_cached_tokens or 0,
            num_exited_tokens=self.num_exited_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_skipped_tokens=self.num_skipped_tokens,
            error=self._error,
            error_field=self._error_field,
        )

    def _set_status(self, status: SequenceStatus) -> None:
        assert status in _STATUS_TRANSITIONS[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def _make_metrics(self) -> RequestMetrics:
        num_intervals = self.num_output_tokens - 1
        decode_s = self._last_token - self._first_token if self._first_token and self._last_token else 0.0
        return RequestMetrics(
            queue_time=self._measure_since_arrival(self._scheduled),
            ttft=self._measure_since_arrival(self._first_token),
            tpot=decode_s / num_intervals if num_intervals > 0 else None,
            total=(self._finished or time.perf_counter()) - self._arrived,
        )

    def _measure_since_arrival(self, event_time: float | None) -> float | None:
        return None if event_time is None else event_time - self._arrived
