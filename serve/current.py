"""The model version that a replica currently serves, with its engine. A swap replaces it as a whole. Knows no HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.errors import InvalidInputError, LoadingError, QueueFullError, RateLimitedError, SwiftKVError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.limits import REPLICA_BODY_BYTES, REPLICA_BODY_VALUES, REPLICA_TOKEN_IDS
from swiftkv_platform.serve.access import Caller, Reservation
from swiftkv_platform.serve.answers import Answers, RequestContext
from swiftkv_platform.serve.args import Served
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.web.limiters import Sender

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.frontend import EngineFrontend

T = TypeVar("T")

_DRAIN_POLL_S = 0.05
_BYTES_PER_TOKEN = 64
"""Approximate bytes of a log-probability in a response, by which its rendering is scheduled like a text's reading."""
BASE_BODY_BYTES = 1 << 20
"""Bytes allowed for anything but prompts: stop strings, schemas, names, spaces."""
NUM_LONGEST_PROMPTS = 8
"""Prompts of the longest text that fit into one body; there may be more shorter ones."""
ESCAPED_BYTES = 6
"""Most bytes that JSON takes for one byte of text."""


class ModelCard(FrozenModel):
    """Description of the served model."""

    deployment: str
    """`dep_` id."""
    model: str
    manifest_digest: str | None
    """SHA-256 of the artifact's manifest; null for a model served unverified."""
    swiftkv: dict[str, int] | None
    """num_hidden_layers, num_key_value_layers and key_value_group_size; null for a dense model."""
    max_model_len: int
    """Tokens of prompt and answer together."""
    load_seconds: dict[str, float] = {}
    """Seconds by phase that this replica needed to serve the model: `fetch`, `load` and `check`."""


class SwapState(FrozenModel):
    """State of a replica's swap to the version that was last requested."""

    status: Literal["done", "loading", "refused"] = "done"
    """With `loading` and `refused`, the previous version is served."""
    revision: str = ""
    """Revision that was last requested."""
    message: str = ""
    """Reason of the refusal."""


@dataclass(eq=False)
class Version:
    """A loaded model with its engine. A request stays with the version it began with."""

    engine: EngineFrontend
    card: ModelCard
    created: int
    """Unix seconds."""
    candidate: Version | None = None
    """Answers `candidate_share` of the requests."""
    candidate_share: float = 0.0
    tool_call_parser: str | None = None
    """Family whose parser reads tool calls, see `serve.tools.families`; None: detected from the chat template."""
    names: frozenset[str] = frozenset()
    """Other names by which requests may name the model."""
    ignored_fields: frozenset[str] = frozenset()
    """Request fields below `/v1` that the operator wants ignored."""
    cors_origins: frozenset[str] = frozenset()
    """Origins whose pages may send requests."""
    num_entering: int = field(default=0, init=False)
    """Requests that use this version while they are not in the engine: not yet, or not any more."""

    @cached_property
    def body_limits(self) -> tuple[int, int]:
        """Most bytes and most values of a request body, as its context requires."""
        text = self.engine.input_processor.max_prompt_bytes * ESCAPED_BYTES * NUM_LONGEST_PROMPTS
        max_model_len = self.engine.model.context_length
        of_all = min(max_model_len * self.engine.max_sequences_per_caller, REPLICA_TOKEN_IDS.default)
        num_values = REPLICA_BODY_VALUES.default + max(max_model_len, of_all)
        return min(BASE_BODY_BYTES + text, REPLICA_BODY_BYTES.default), num_values

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the engine open within the context, even if no request is in it."""
        self.num_entering += 1
        try:
            yield
        finally:
            self.num_entering -= 1

    def answers_to(self, name: str) -> bool:
        return name == self.card.model or name in self.names

    def chosen(self) -> Version:
        """Return this version, or at random the candidate for its share of the requests."""
        draws = self.candidate is not None and random.random() < self.candidate_share  # noqa: S311  # not a secret
        return self.candidate if self.candidate is not None and draws else self

    def take_over(self, served: Served) -> None:
        """Apply the parts of `served` that need no loading: shares, ignored fields and CORS origins."""
        self.ignored_fields = frozenset(served.ignored_fields or ())
        self.cors_origins = frozenset(served.cors_origins or ())
        if self.candidate is not None:
            self.candidate.ignored_fields = self.ignored_fields
        if served.candidate is not None:
            self.candidate_share = served.candidate.share

    def check_health(self) -> None:
        """Raise `EngineDeadError` if an engine has failed."""
        self.engine.check_health()
        if self.candidate is not None:
            self.candidate.check_health()

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    async def rendered(
        self, render: Callable[[], T], outputs: Sequence[RequestOutput], sender: Sender, *, echo: bool = False
    ) -> T:
        """Call `render` and return its result. Responses with log-probabilities or echoed prompts, in which each token
        is decoded, are rendered in the engine's reader threads; others at once."""
        if not echo and all(output.logprobs is None and output.prompt_logprobs is None for output in outputs):
            return render()
        num_tokens = sum(len(output.prompt_token_ids) + len(output.token_ids) for output in outputs)
        return await self.engine.tokenizer_threads.run(render, num_tokens * _BYTES_PER_TOKEN, sender)

    async def drain(self) -> None:
        """Wait until no request uses this version, then close its engine and candidate."""
        while self.num_entering or self.engine.num_requests:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self.candidate is not None:
            await self.candidate.drain()
        await self.engine.aclose()


class Observer(Protocol):
    """Listener that is notified when a request ends."""

    def closed(self, answers: Answers, card: ModelCard) -> None:
        """Handle the end of an admitted request: finished, failed or left by its caller."""
        ...

    def refused(self, error: SwiftKVError, caller: Caller, card: ModelCard) -> None:
        """Handle a request that was not admitted."""
        ...


class Current:
    """Holder of the version that new requests go to."""

    def __init__(
        self,
        version: Version | None = None,
        metrics: Metrics | None = None,
        *,
        replica: str = "",
        observers: Sequence[Observer] = (),
    ) -> None:
        self.swap = SwapState()
        self.replica = replica
        """Serve's name of this replica."""
        self._observers = observers
        self.metrics = metrics or Metrics()
        self.metrics.replica = replica
        self.metrics.version = self._version = version

    @property
    def is_empty(self) -> bool:
        return self._version is None

    @property
    def version(self) -> Version:
        """Current version. Raises `LoadingError` while no model is loaded."""
        if self._version is None:
            raise LoadingError("no model is loaded yet: the first one is being loaded")
        return self._version

    def replace(self, version: Version) -> Version | None:
        """Send new requests to `version` from now on. Returns the previous version, which must be drained."""
        before, self._version = self._version, version
        self.metrics.version = version
        return before

    def origins(self) -> frozenset[str]:
        """Return the origins whose pages may send requests now."""
        return frozenset() if self._version is None else self._version.cors_origins

    @property
    def body_limits(self) -> tuple[int, int]:
        """Most bytes and most values of a request body, for the models served now."""
        served = () if self._version is None else (self._version, self._version.candidate)
        limits = [version.body_limits for version in served if version is not None]
        if not limits:
            return REPLICA_BODY_BYTES.default, REPLICA_BODY_VALUES.default + REPLICA_TOKEN_IDS.default
        most_bytes, most_values = zip(*limits, strict=True)
        return max(most_bytes), max(most_values)

    @contextmanager
    def entering(self) -> Iterator[Version]:
        """Yield the version for a new request, kept open until the request is in its engine."""
        version = self.version.chosen()
        with version.in_use():
            yield version

    async def ask(
        self, version: Version, prompts: Sequence[str | list[int]], params: SamplingParams, context: RequestContext
    ) -> Answers:
        """Submit a request to a version. Raises as `EngineFrontend.submit`, `RateLimitedError` and `ForbiddenError`."""
        context.caller.check_priority(context.priority)
        self.metrics.asked(version.card.model)
        reservation, cost = Reservation(), 0

        def closed(answers: Answers) -> None:
            if answers.outputs:  # without outputs, the cost of reading the prompt is unknown
                reservation.settle(answers.num_tokens)
            for observer in self._observers:
                observer.closed(answers, version.card)

        try:
            if context.caller.quota is not None:
                reservation = context.caller.quota.reserve_tokens(_most_tokens(prompts, params))
            version.engine.validate(prompts, params)
            cost = _tokens_of_texts(prompts)
            finished = partial(self.metrics.finished, model=version.card.model)
            return await Answers.begin(version.engine, prompts, params, context, finished, closed)
        except (QueueFullError, InvalidInputError, RateLimitedError) as error:
            # Reading texts that turn out invalid costs tokens; a full queue costs nothing, since the caller retries.
            reservation.settle(cost if isinstance(error, InvalidInputError) else 0)
            self.metrics.refused(error, version.card.model)
            for observer in self._observers:
                observer.refused(error, context.caller, version.card)
            raise


def _most_tokens(prompts: Sequence[str | list[int]], params: SamplingParams) -> int:
    """Return the most tokens that a request may use, not counting texts, which are not tokenized yet."""
    answers = len(prompts) * params.n * params.max_tokens
    return answers + sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))


def _tokens_of_texts(prompts: Sequence[str | list[int]]) -> int:
    """Estimate the tokens of the texts among the prompts, at four bytes each."""
    return sum(len(prompt.encode(errors="surrogatepass")) for prompt in prompts if isinstance(prompt, str)) // 4
